"""Real SIGKILLs at random moments, over every kind of process of a run.

    python -m tests.chaos.kills --kills 50 --seed 0

Each trial runs a case, kills some of its processes (the coordinator's, a Worker's, a reward
child's) at random moments, resumes it if the coordinator is gone or has given up (as it must
after a few attempts without a Step), and then asserts about what the run left:

    every admitted row trained exactly once, no group split, no row older than max_lag
    at max_lag 0: metrics and weights of an undisturbed run in one process, to the bit
    after every exit: no process, shared memory or socket file of the run within 10 s

Owns: the cases, the kills and the assertions. Does not own: the process of a run
(tests/kit/killable_run.py).
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.api import run
from engine.plan.options import RunOptions
from engine.session.attempts import FRUITLESS
from tests.kit import forked
from tests.kit import processes as kit
from tests.kit.killable_run import GRAPHS, words
from tests.kit.nothing_left import (
    left_in_shared_memory,
    require_gone,
    require_no_sockets,
    shared_memory,
)
from tests.kit.runs import column, require_each_row_once, require_same_numbers, steps_recorded
from tests.kit.tiny_runs import save_tiny_inputs

STEPS, BATCH, SAMPLES = 24, 4, 4
TRIAL_LIMIT = 240.0
REPEATED = "/passed_when_repeated"
"""The end of a metric: reward calls made again in a fresh child, as when one is killed."""


@dataclass(frozen=True, kw_only=True)
class KilledCase:
    """chunks: of the run and its reference; exact: same numbers as one process, to the bit."""

    graph: str = "small"
    places: Mapping[str, Any] = field(default_factory=dict)
    chunks: Mapping[str, int] = field(default_factory=dict)
    max_lag: int = 0
    exact: bool = True
    samples: int = SAMPLES

    def options(self, runs: Path, name: str, **places: Any) -> RunOptions:
        usual = {"threads": 1, "progress": False, "checkpoint_every": 3, "chunks": self.chunks}
        return RunOptions(steps=STEPS, name=name, runs=runs, **usual | places)


APART = {"workers": "apart"}
REPLICAS = {"replicas": {"rollout": 3}, "together": (("score", "advantage"),)}
PINS = {"rollout": "gen", "train_policy": "actor-0,actor-1", "train_critic": "critic-0,critic-1"}
TURNS = {
    "workers": "one",
    "pin": PINS,
    "ranks": {"train_policy": 2, "train_critic": 2},
    "turns": (("gen", "actor-0", "critic-0"), ("actor-1", "critic-1")),
}
CASES = {
    "apart": KilledCase(places=APART),
    "replicas": KilledCase(places=APART | REPLICAS, chunks={"rollout": 3}),
    "evaluated": KilledCase(graph="evaluated every 4", places=APART),
    "followed": KilledCase(graph="followed", places=APART, samples=1),
    "ranks": KilledCase(places=APART | {"ranks": {"train_policy": 2}}, exact=False),
    "tensor": KilledCase(places=APART | {"tensor": {"train_policy": 2}}, exact=False),
    "context": KilledCase(places=APART | {"context": {"train_policy": 2}}, exact=False),
    "turns": KilledCase(graph="followed", places=TURNS, exact=False, samples=1),
    "agent": KilledCase(
        graph="agent",
        places=APART | {"replicas": {"episode": 2}},
        chunks={"episode": 2},
        exact=False,  # an episode whose environment was killed is written again, in other company
    ),
    "lagging agent": KilledCase(
        graph="lagging agent",
        places=APART | {"replicas": {"episode": 2}},
        max_lag=1,
        exact=False,
    ),
    "lagging": KilledCase(
        graph="lagging", places=APART | {"replicas": {"rollout": 2}}, max_lag=1, exact=False
    ),
}


@dataclass(kw_only=True)
class KilledRun:
    """One run with its kills. kind: the only kind of process that is killed; empty: any."""

    case: str
    seed: int
    kills: int
    folder: Path
    runs: Path
    kind: str = ""
    mark: str = field(default_factory=kit.new_mark)
    killed: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.runs / self.case


def survive(trial: KilledRun) -> None:
    """Run a case to its end, whatever is killed on the way."""
    draw = random.Random(trial.seed)
    left, resuming = trial.kills, False
    while True:
        process, before = _start(trial, resuming), len(trial.killed)
        try:
            left = _disturb(trial, process, draw, left)
            output = process.communicate(timeout=TRIAL_LIMIT)[0]
        finally:
            _end(trial, process)
        require_gone(trial.mark)
        require_no_sockets(trial.runs)
        if process.returncode == 0:
            return
        fruitless = f"{FRUITLESS} attempts in a row came no further" in output
        gave_up = fruitless and len(trial.killed) - before >= FRUITLESS
        told = f"exit {process.returncode} after {trial.killed}:\n{output[-6000:]}"
        assert gave_up or process.returncode == -signal.SIGKILL, told
        resuming = (trial.run / "options.json").is_file()


def _start(trial: KilledRun, resuming: bool) -> subprocess.Popen[str]:
    case = CASES[trial.case]
    options = case.options(trial.runs, trial.case, **case.places)
    given = words(case.graph, trial.folder, options, *(["resume"] if resuming else []))
    own = {"stderr": subprocess.STDOUT, "start_new_session": True}
    return kit.start_python(*given, env={kit.MARK: trial.mark}, **own)


def _disturb(
    trial: KilledRun, process: subprocess.Popen[str], draw: random.Random, left: int
) -> int:
    """Kill processes until the run has ended or enough were killed; returns the kills left."""
    while left and not _ended_before_a_moment(trial, process, draw):
        there = processes(trial, process.pid)
        kinds = sorted({kind for kind in there.values() if kind.startswith(trial.kind)})
        if not kinds:
            continue
        kind = draw.choice(kinds)
        if kind == "coordinator" and draw.random() < 0.5:  # its death ends the others' trial
            continue
        chosen = draw.choice([pid for pid in there if there[pid] == kind])
        try:
            os.kill(chosen, signal.SIGKILL)
        except ProcessLookupError:
            continue
        trial.killed.append(f"{kind} at step {steps_recorded(trial.run)}")
        left -= 1
        if kind == "coordinator":
            break
    return left


def processes(trial: KilledRun, main: int) -> dict[int, str]:
    """Each process of a trial and its kind: coordinator, worker:NAME or child (of a Worker)."""
    kinds = {}
    for pid in kit.marked(trial.mark):
        try:
            worker = kit.is_worker(pid)
            log = Path(os.readlink(f"/proc/{pid}/fd/1")).stem
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        kinds[pid] = "coordinator" if pid == main else f"worker:{log}" if worker else "child"
    return kinds


def _ended_before_a_moment(
    trial: KilledRun, process: subprocess.Popen[str], draw: random.Random
) -> bool:
    """Wait for a moment: soon after the (slow) start, or in a random Step."""
    if draw.random() < 0.3:
        return kit.ended_within(process, draw.uniform(0.0, 1.5))
    wanted = draw.randint(min(steps_recorded(trial.run), STEPS - 1), STEPS - 1)
    while steps_recorded(trial.run) < wanted:
        if kit.ended_within(process, 0.01):
            return True
    return kit.ended_within(process, draw.uniform(0.0, 0.1))


def _end(trial: KilledRun, process: subprocess.Popen[str]) -> None:
    """End everything that is left of the trial."""
    if process.poll() is None:
        process.kill()
        process.wait()
        kit.kill(kit.marked(trial.mark))


def proof(trial: KilledRun, reference: Path) -> None:
    """Assert every promise about what the run left."""
    case = CASES[trial.case]
    assert column(trial.run, "step") == list(range(1, STEPS + 1))
    assert max(column(trial.run, "policy/lag/max")) <= case.max_lag
    require_each_row_once(trial.run, BATCH * STEPS, case.samples)
    if case.exact:
        require_same_numbers(trial.run, reference, but=REPEATED)


def undisturbed(name: str, folder: Path, runs: Path) -> Path:
    """The folder of the case's run in one process."""
    case = CASES[name]
    options = case.options(runs, f"{name}_undisturbed", inproc=True)
    return run(GRAPHS[case.graph](folder), options).folder


def trials(seed: int, folder: Path, cases: list[str], kind: str) -> Iterator[KilledRun]:
    """Endless trials, over the cases in turn."""
    draw = random.Random(seed)
    for number, case in enumerate(itertools.cycle(cases)):
        yield KilledRun(
            case=case,
            seed=seed * 1000 + number,
            kills=draw.randint(2, 5),
            folder=folder,
            runs=folder / f"{number}",
            kind=kind,
        )


def carry_out(trial: KilledRun, reference: Path) -> None:
    """Run a trial to its end, and see that nothing was lost."""
    start = time.monotonic()
    try:
        survive(trial)
        proof(trial, reference)
    finally:
        took = f"{time.monotonic() - start:.0f} s, killed {trial.killed}"
        print(f"{trial.case} (seed {trial.seed}): {took}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="kill real runs and see that nothing is lost")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", default=",".join(CASES))
    only = "kill only this kind: coordinator, child, or worker:NAME"
    parser.add_argument("--kind", default="", help=only)
    given = parser.parse_args()
    forked.install()
    killed: list[str] = []
    names = shared_memory()
    with tempfile.TemporaryDirectory(prefix="chaos_") as place:
        folder = Path(place)
        save_tiny_inputs(folder)
        references: dict[str, Path] = {}
        for trial in trials(given.seed, folder, given.cases.split(","), given.kind):
            if len(killed) >= given.kills:
                break
            if trial.case not in references:
                references[trial.case] = undisturbed(trial.case, folder, folder / "undisturbed")
            carry_out(trial, references[trial.case])
            killed += trial.killed
    left = left_in_shared_memory(names)
    assert not left, f"shared memory is left: {left}"
    by_kind = Counter(re.split("[ :]", each)[0] for each in killed)
    print(f"survived {len(killed)} kills: {dict(by_kind)}")


if __name__ == "__main__":
    main()
