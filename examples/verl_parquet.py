"""verl's Parquet and verl's compute_score, both unchanged.

    python examples/verl_parquet.py

Prompts are lists of messages, rendered by the tokenizer's own chat template. `split` reads
extra_info.split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tiny
from verl_score import compute_score

from dataflow import Graph
from engine.api import Result, run
from graphs.grpo import grpo
from operators.rewards import verl_reward


def row(index: int) -> dict[str, Any]:
    """One row in the shape of verl's prepared data sets."""
    a, b = index % 8, index // 8
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{a}+{b}="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": "train", "index": index},
    }


def write(path: Path) -> str:
    """64 rows."""
    pq.write_table(pa.Table.from_pylist([row(i) for i in range(64)]), path)
    return str(path)


def graph() -> Graph:
    """GRPO on these rows."""
    files = tiny.make()
    data = write(Path(files.train).with_name("verl.parquet"))
    return grpo(files.model, data, verl_reward(compute_score), n=8, batch=8, max_tokens=4, lr=5e-3)


def main(steps: int = 12) -> Result:
    """A short run; compute_score's `acc` becomes the metric reward/compute_score/acc."""
    return run(graph(), tiny.options("verl_parquet", steps=steps), on_step=[tiny.show])


if __name__ == "__main__":
    main()
