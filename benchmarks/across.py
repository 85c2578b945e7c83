"""The cost of several processes for the same graph, compared with one, where nothing overlaps
(max_lag 0, the same layouts and threads).

    python -m benchmarks.across [--quick] [--json FILE]

Owns: the paired runs and their ratios. Does not own: the setting (overhead.py: the demo's model and
data, short answers), how results are shown (report.py).

At max_lag 0 the nodes take turns, so a Step's seconds are the sum of the nodes' own and of the time
between them: the rest. One process is compared with three (generation, training, all else) and with
one for each node. The runs of a round share a seed and alternate in order, and each Step is
compared with the same Step of the other run, which has the same numbers in it; a ratio is the
median over all Steps. On a busy machine a process that computes without a break gets less of the
cores than several that take turns, which flatters the latter. So a second ratio uses the nodes'
times in one process on both sides, and only the rest is each side's own.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tyro

from benchmarks.overhead import BATCH, MAX_TOKENS, WARM_UP, N, prepare
from benchmarks.report import SideResult, machine, show, write_json
from engine.api import run
from engine.keep.trace.timeline import read_trace
from engine.plan.options import RunOptions
from graphs.grpo import grpo
from operators.rewards import RewardFn

GOAL = 1.15
"""Seconds per Step, relative to the run in one process."""
ONE = "one"
PLACES: Mapping[str, Mapping[str, Any]] = {
    ONE: {"workers": "one"},
    "three": {"workers": "one", "pin": {"rollout": "gen", "train_policy": "train"}},
    "apart": {"workers": "apart"},
}
TRAIN = "train_policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """Seconds of one Step, from one end of training to the next. nodes: their turns."""

    seconds: float
    nodes: float

    @property
    def rest(self) -> float:
        """Seconds in which no node had its turn."""
        return self.seconds - self.nodes


def measured(
    folder: Path, reward_fn: RewardFn, place: str, steps: int, seed: int
) -> list[TracedStep]:
    """The Steps after the warm-up."""
    data, base = str(folder / "train.parquet"), str(folder / "model")
    graph = grpo(
        base, data, reward_fn, n=N, batch=BATCH, max_tokens=MAX_TOKENS, lr=5e-4, minibatches=2
    )
    options = RunOptions(
        steps=WARM_UP + steps,
        seed=seed,
        name=place,
        runs=folder / "runs",
        threads=1,
        overwrite=True,
        progress=False,
        **PLACES[place],
    )
    (trace,) = (run(graph, options).folder / "trace").iterdir()
    return list(steps_of(read_trace(trace)))[WARM_UP - 1 :]


def steps_of(events: Iterable[Mapping[str, Any]]) -> Iterator[TracedStep]:
    """All Steps of a trace but the first, whose beginning is not in it. What a node does in its
    turn has its own name; all else (weights offered, loaded and probed, samples) is the rest.
    """
    events = list(events)
    nodes = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    turns = [
        (e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, nodes[e["pid"], e["tid"]])
        for e in events
        if e["ph"] == "X" and e["name"] == nodes[e["pid"], e["tid"]]
    ]
    ends = sorted(end for _, end, node in turns if node == TRAIN)
    for begin, end in pairwise(ends):
        yield TracedStep(
            seconds=end - begin, nodes=sum(e - s for s, e, _ in turns if begin < e <= end)
        )


def results(runs: Mapping[str, Sequence[TracedStep]]) -> list[SideResult]:
    """All numbers. runs: the Steps of all rounds, by place, in the same order."""
    alone = runs[ONE]
    found: list[SideResult] = []
    for place, steps in runs.items():
        if place != ONE:
            pairs = list(zip(steps, alone, strict=True))
            whole = statistics.median(s.seconds / a.seconds for s, a in pairs)
            rest = statistics.median((a.nodes + s.rest) / a.seconds for s, a in pairs)
            found.append(
                SideResult(name=f"{place}/ratio", value=whole, unit="", goal=GOAL, least=False)
            )
            found.append(
                SideResult(
                    name=f"{place}/ratio, nodes as in one",
                    value=rest,
                    unit="",
                    goal=GOAL,
                    least=False,
                )
            )
    for place, steps in runs.items():
        for part in ("seconds", "nodes", "rest"):
            value = 1e3 * statistics.median(getattr(step, part) for step in steps)
            found.append(
                SideResult(
                    name=f"{place}/{'step' if part == 'seconds' else part}", value=value, unit="ms"
                )
            )
    return found


def main(*, quick: bool = False, json: Path | None = None) -> None:
    """Measure.

    Args:
        quick: fewer Steps; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    rounds, steps = (1, 5) if quick else (4, 30)
    runs: dict[str, list[TracedStep]] = {place: [] for place in PLACES}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        reward_fn = prepare(folder, 500 if quick else 3000)
        for seed in range(rounds):
            for place in list(PLACES)[:: 1 if seed % 2 else -1]:
                runs[place] += measured(folder, reward_fn, place, steps, seed)
    found, where = results(runs), machine()
    show("several processes where nothing overlaps", found, where)
    if json is not None:
        write_json(json, found, where)


if __name__ == "__main__":
    tyro.cli(main)
