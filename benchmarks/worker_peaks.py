"""The peak memory of Workers that `explain` predicts, against what their processes had in a run.

    python -m benchmarks.worker_peaks [--profile FILE] [--sizes 0 1] [--keep FOLDER] [--json FILE]

Owns: the graphs, their rows, and the comparison. Does not own: the formulas
(engine/plan/cost/memory.py), what a process takes (engine/plan/cost/process_memory.py), how results
are shown (report.py).

Predictions are for the greatest lengths, so the rows have these: prompts of just `PROMPT`
characters, and a vocabulary so large that a Model of random weights hardly ever ends an answer.
Each run has an interpreter of its own: one Worker alone runs in the process that starts it, whose
greatest memory is that of all it has done before. A busy machine changes nothing here. With
`--keep` the peaks of runs stay in a folder, and a run whose peaks are there is not made again: a
formula that was mended is compared with the same runs.
"""

from __future__ import annotations

import json as json_format
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_letters

import pyarrow as pa
import pyarrow.parquet as pq
import tyro

from benchmarks.predicted import ModelSize, make
from benchmarks.report import SideResult, machine, show, write_json
from engine.api import plan
from engine.cli.flags import graph_and
from engine.keep.run_measurements import read_measured
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.plan.worker_index import nodes_by_worker
from engine.plan.worker_peaks import worker_peak

PROMPT, ANSWER = 128, 64
"""Tokens of each."""
ROWS = 128
"""Of a Step."""
STEPS = 3
PATIENCE = 3600.0
"""Seconds that a pass of the largest Model may take: PPO's first Step has more than the default."""
GOAL = 1.25
"""Predicted over measured, which must be 1 at least."""
SIZES = tuple(
    ModelSize(name=f"{layers} x {hidden}", layers=layers, hidden=hidden, vocabulary=1024)
    for layers, hidden in ((1, 32), (2, 128), (4, 256), (8, 512))
)
"""The tests' and those of benchmarks/predicted.py."""


_COMMAND = "import sys; from engine.start import main; sys.exit(main())"
"""`dataflow`, with this interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRun:
    """A graph and where its nodes are. flags: of the command line, for graph and run."""

    name: str
    target: str
    flags: tuple[str, ...]
    workers: str


_REWARD = ("--reward-fn", "benchmarks.rewards:even_share", "--max-tokens", str(ANSWER))
_SET = ("--set", f"rollout.max_prompt_tokens={PROMPT}")
_GRPO = (*_REWARD, "--n", "8", "--batch", str(ROWS // 8), "--beta", "0.04", *_SET)
_PPO = (*_REWARD, "--batch", str(ROWS), *_SET)
_DPO = ("--batch", str(ROWS // 2))
RUNS = (
    PlacedRun(name="GRPO", target="graphs.grpo:grpo", flags=_GRPO, workers="one"),
    PlacedRun(
        name="GRPO, lag 1",
        target="graphs.grpo:grpo",
        flags=(*_GRPO, "--max-lag", "1"),
        workers="apart",
    ),
    PlacedRun(name="PPO", target="graphs.ppo:ppo", flags=_PPO, workers="one"),
    PlacedRun(name="PPO apart", target="graphs.ppo:ppo", flags=_PPO, workers="apart"),
    PlacedRun(
        name="PPO with adapters",
        target="graphs.ppo:ppo",
        flags=(*_PPO, "--adapter", "lora(rank=16)"),
        workers="one",
    ),
    PlacedRun(name="DPO", target="graphs.dpo:dpo", flags=_DPO, workers="one"),
    PlacedRun(name="DPO apart", target="graphs.dpo:dpo", flags=_DPO, workers="apart"),
)


def data_of(folder: Path, size: ModelSize) -> tuple[str, str, str]:
    """The Model's directory, prompts, and pairs of answers, all of the greatest lengths."""
    base, _ = make(folder, size)
    draw = random.Random(0)

    def texts(length: int) -> list[str]:
        return ["".join(draw.choices(ascii_letters, k=length)) for _ in range(2 * ROWS)]

    prompts, pairs = folder / "same.parquet", folder / "pairs.parquet"
    pq.write_table(pa.table({"prompt": texts(PROMPT)}), prompts)
    answers = {"chosen": texts(ANSWER), "rejected": texts(ANSWER)}
    pq.write_table(pa.table({"prompt": texts(PROMPT), **answers}), pairs)
    return base, str(prompts), str(pairs)


def worker_results(
    folder: Path, placed: PlacedRun, size: ModelSize, profile: Path | None
) -> Iterator[SideResult]:
    """Of each Worker of a run, which has a process of its own."""
    base, prompts, pairs = data_of(folder, size)
    data = pairs if placed.target.endswith(":dpo") else prompts
    name = f"{placed.name} {size.name}".replace(" ", "-").replace(",", "")
    words = [placed.target, "--base", base, "--data", data, *placed.flags]
    words += ["--workers", placed.workers, "--threads", "1"]
    graph, options = graph_and(RunOptions, "explain", words)
    planned = plan(graph, replace(options, profile=profile))
    assert isinstance(planned, Plan)
    how = ["--steps", str(STEPS), "--no-progress", "--runs", str(folder / "runs"), "--name", name]
    how += ["--watchdog", str(PATIENCE), "--overwrite"]
    kept_peaks = folder / f"{name}.peaks.json"
    if not kept_peaks.exists():
        command = [sys.executable, "-c", _COMMAND, "run", *words, *how]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        kept_peaks.write_text(json_format.dumps(read_measured(folder / "runs" / name)[0].peaks))
    measured: dict[str, int] = json_format.loads(kept_peaks.read_text())
    for worker, nodes in nodes_by_worker(planned.nodes).items():
        predicted, where = (
            worker_peak(planned, worker, nodes),
            f"{placed.name}, {size.name}: {worker}",
        )
        ratio = predicted / measured[worker]
        sizes = f"{predicted / 2**20:.0f} / {measured[worker] / 2**20:.0f} MiB"
        print(f"{where}: {sizes} = {ratio:.2f}", file=sys.stderr, flush=True)
        yield SideResult(name=f"{where}, measured", value=measured[worker] / 2**20, unit="MiB")
        yield SideResult(
            name="  predicted / measured", value=ratio, unit="", goal=GOAL, least=False
        )
        yield SideResult(name="  the same, at least", value=ratio, unit="", goal=1.0)


def main(
    json: Path | None = None,
    profile: Path | None = None,
    sizes: tuple[int, ...] = (0, 1, 2, 3),
    runs: tuple[int, ...] | None = None,
    keep: Path | None = None,
) -> None:
    """Print predicted beside measured.

    Args:
        json: Where to write the numbers.
        profile: Of these graphs on this machine; without one the defaults count.
        sizes: Models, by place.
        runs: Graphs, by place; by default all.
        keep: A folder for data, runs and their peaks; by default they are removed.
    """
    where, chosen = machine(), RUNS if runs is None else [RUNS[at] for at in runs]
    results: list[SideResult] = []
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for at in sizes:
            for placed in chosen:
                results += worker_results(folder, placed, SIZES[at], profile)
    show("peak memory of Workers", results, where)
    if json is not None:
        write_json(json, results, where)


if __name__ == "__main__":
    tyro.cli(main)
