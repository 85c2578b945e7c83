"""Our side of a comparison: graphs/grpo.py on the engine, in a process of its own.

    python -m benchmarks.our_side RUN.json [LAYOUT]

Owns: running one Run and measuring it as the peer's side does. Does not own: the settings, the
pairing.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from transformers import AutoTokenizer

from benchmarks.rewards import REWARDS
from benchmarks.run_steps import StepRow, run_steps
from benchmarks.settings import Run
from graphs.grpo import grpo


@dataclass(frozen=True, slots=True, kw_only=True)
class SideLayout:
    """How the run's threads are divided. options: of the run, besides those of the setting."""

    max_lag: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "one": SideLayout(),
    "halves": SideLayout(
        options={
            "threads": 1,
            "replicas": {"rollout": 2},
            "ranks": {"train_policy": 2},
            "pin": {"rollout": "a,b", "train_policy": "a,b"},
        }
    ),
    "lag1": SideLayout(max_lag=1, options={"threads": 1}),
}
"""one: a Worker with all threads. halves: two Workers of one thread, which each generate half of
the prompts' answers and train half of the rows. lag1: generation beside training."""


def measure(told: Run, layout: SideLayout) -> dict[str, float]:
    """Train as told; numbers over the Steps after the warm-up, by the names of sides.Measured."""
    graph = grpo(
        told.model_dir,
        told.data,
        REWARDS[told.reward],
        n=told.num_generations,
        batch=told.prompts_per_step,
        max_tokens=told.max_new_tokens,
        lr=told.lr,
        max_lag=layout.max_lag,
    )
    return _numbers(run_steps(graph, told, **layout.options), told)


def _numbers(rows: Sequence[StepRow], told: Run) -> dict[str, float]:
    seconds = sum(row["time/step"] for row in rows)
    samples = told.prompts_per_step * told.num_generations * len(rows)
    tokens = sum(row["completion/tokens"] for row in rows)

    def median_ms(*names: str) -> float:
        return 1e3 * statistics.median(sum(row.get(name, 0.0) for name in names) for row in rows)

    return {
        "samples_per_second": samples / seconds,
        "tokens_per_second": tokens / seconds,
        "step_ms": median_ms("time/step"),
        "generation_ms": median_ms("time/rollout"),
        "rollout_ms": median_ms("time/prompts", "time/rollout", "time/score"),
        "train_ms": median_ms("time/train_policy"),
        "engine_ms": median_ms("time/engine"),
        "prompt_tokens": _prompt_tokens(told),
        "completion_tokens": tokens / samples,
        "slot_waste": _mean(rows, "generate/slot_waste"),
        "reward": _mean(rows, "reward/mean"),
        "reward_last": rows[-1]["reward/mean"],
        "steps": len(rows),
    }


def _prompt_tokens(told: Run) -> float:
    """Mean over the data; every Step draws from all of it."""
    prompts = pq.read_table(told.data, columns=["prompt"]).column("prompt").to_pylist()
    return statistics.fmean(
        len(ids) for ids in AutoTokenizer.from_pretrained(told.model_dir)(prompts)["input_ids"]
    )


def _mean(rows: Sequence[StepRow], name: str) -> float:
    return statistics.fmean(row.get(name, 0.0) for row in rows)


if __name__ == "__main__":
    chosen = LAYOUTS[sys.argv[2]] if len(sys.argv) > 2 else LAYOUTS["one"]
    print(json.dumps(measure(Run(**json.loads(Path(sys.argv[1]).read_text())), chosen)))
