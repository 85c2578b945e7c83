"""How long the Workers of a run take to start, and what memory they have then.

    python -m benchmarks.starts [--quick] [--json FILE]

Owns: starting the Workers of the demo's graph with several generators, forked from a template and
as interpreters of their own, in turns. Does not own: how results are shown (report.py), the task
(overhead.py).

Seconds are until all Workers have opened their kernels, which load a Model of the smallest size:
nearly all of them are imports. A Worker's own memory is what no other process shares with it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from unittest import mock

import tyro

from benchmarks.overhead import prepare
from benchmarks.report import SideResult, machine, show, write_json
from engine.api import plan
from engine.keep.run_folder import RunFolder
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.protocol.messages import WorkerOpened
from engine.run.launch.starter import Starter
from engine.run.launch.supervisor import Supervisor
from graphs.grpo import grpo

GENERATORS = 6
ALL, AGAIN, MEMORY = "start of all", "start of one again", "memory of all"
GOALS = {ALL: 0.5, AGAIN: 0.25, MEMORY: 0.5}
"""What forked Workers may take of what interpreters of their own do."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """Seconds until all Workers are open, and one that is started again; MiB of all together, with
    each shared page once, and of each alone.
    """

    all: float
    again: float
    memory: float
    own: float


def started(planned: Plan, folder: Path, options: RunOptions) -> Started:
    """Start the Workers once, and a generator once more."""
    with (
        RunFolder.create("starts", folder, overwrite=True) as runs,
        closing(Supervisor(planned, runs, options)) as workers,
    ):
        began = monotonic()
        for _ in workers.open():
            pass
        everything = monotonic() - began
        pids = workers.pids().values()
        memory = sum(_mib(pid, "Pss:") for pid in [*pids, *_templates(workers)])
        own = statistics.mean(_mib(pid, "Private_") for pid in pids)
        began = monotonic()
        workers.respawn([next(w for w in workers.pids() if w.startswith("rollout"))])
        while not isinstance(getattr(workers.next(60.0), "event", None), WorkerOpened):
            assert workers.busy, "the Worker was not opened again"
        return Started(all=everything, again=monotonic() - began, memory=memory, own=own)


def _templates(workers: Supervisor) -> list[int]:
    return [template.process.pid for template in workers._starter._templates.values()]


def _mib(pid: int, kind: str) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def results(forked: list[Started], alone: list[Started]) -> list[SideResult]:
    """Medians, and the ratio of each pair."""
    pairs = list(zip(forked, alone, strict=True))
    ratios: Mapping[str, float] = {
        ALL: statistics.median(f.all / a.all for f, a in pairs),
        AGAIN: statistics.median(f.again / a.again for f, a in pairs),
        MEMORY: statistics.median(f.memory / a.memory for f, a in pairs),
    }
    found = [
        SideResult(
            name=f"{name}: forked / alone", value=ratio, unit="", goal=GOALS[name], least=False
        )
        for name, ratio in ratios.items()
    ]
    for how, seen in (("forked", forked), ("alone", alone)):
        found += [
            SideResult(name=f"{ALL}, {how}", value=_of(seen, "all"), unit="s"),
            SideResult(name=f"{AGAIN}, {how}", value=_of(seen, "again"), unit="s"),
            SideResult(name=f"{MEMORY}, {how}", value=_of(seen, "memory"), unit="MiB"),
            SideResult(name=f"own memory of each, {how}", value=_of(seen, "own"), unit="MiB"),
        ]
    return found


def _of(seen: list[Started], what: str) -> float:
    return statistics.median(getattr(each, what) for each in seen)


def main(*, quick: bool = False, json: Path | None = None) -> None:
    """Measure.

    Args:
        quick: one pair; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        reward_fn = prepare(folder, 500)
        base, data = str(folder / "model"), str(folder / "train.parquet")
        graph = grpo(base, data, reward_fn, n=8, batch=32, max_tokens=6, lr=5e-4)
        options = RunOptions(
            runs=folder, threads=1, workers="apart", replicas={"rollout": GENERATORS}
        )
        planned = plan(graph, options)
        forked, alone = [], []
        for _ in range(1 if quick else 5):
            forked.append(started(planned, folder, options))
            with mock.patch.object(Starter, "forked", return_value=False):
                alone.append(started(planned, folder, options))
    found, where = results(forked, alone), machine()
    show(f"starting {len(planned.workers)} Workers", found, where)
    if json is not None:
        write_json(json, found, where)


if __name__ == "__main__":
    tyro.cli(main)
