"""How fast environments answer: a round trip, and the steps of many at once.

    python -m benchmarks.environments [--quick] [--json FILE]

Owns: the environments that are played, what is counted. Does not own: how results are shown
(report.py).

`round trip`: a step of one environment that does nothing, until its reply is there; of an
environment in a process of its own, and in one that is shared. `steps`: 256 episodes over two
templates, whose environments take 20 ms a step; each is asked again as soon as it has answered.
`reset`: all 256 begin at once, which forks their processes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.report import SideResult, machine, show, write_json
from operators.environments import Environment, isolated
from operators.kernels.environments.pool import ProcessPool

EPISODES = 256
TEMPLATES = 2
STEP_SECONDS = 0.02
ROUND_TRIP_MS = 1.0
STEPS_PER_SECOND = 2_000.0
MESSAGE = {"role": "assistant", "content": "a turn of some words " * 10}
Isolation = Literal["process", "shared"]
ISOLATIONS: Sequence[Isolation] = ("process", "shared")


class InstantEnvironment:
    """Answers at once."""

    def reset(self) -> None:
        return None

    def step(self, message: dict[str, Any]) -> tuple[str, None, bool]:
        return "go on", None, False


class SleepingEnvironment(InstantEnvironment):
    """Answers after a while, as one that waits for something else."""

    def step(self, message: dict[str, Any]) -> tuple[str, None, bool]:
        time.sleep(STEP_SECONDS)
        return "go on", None, False


@contextmanager
def opened_pool(target: type, isolation: Isolation, processes: int) -> Iterator[ProcessPool]:
    """A pool of these environments, closed afterwards."""
    environment = isolated(target, isolation=isolation, processes=processes)
    assert isinstance(environment, Environment)
    pool = ProcessPool(environment, name="measured", reset_timeout=120.0, step_timeout=120.0)
    try:
        yield pool
    finally:
        pool.close()


def answered(pool: ProcessPool) -> list[int]:
    """The episodes that have answered, after waiting for one."""
    replies = pool.wait(None)
    faults = [reply.fault for reply in replies if reply.fault is not None]
    assert not faults, faults
    return [reply.episode for reply in replies]


def measure_round_trip(isolation: Isolation, steps: int) -> float:
    """Milliseconds, the median."""
    with opened_pool(InstantEnvironment, isolation, 1) as pool:
        pool.reset(0, 0, {})
        answered(pool)
        seconds: list[float] = []
        for _ in range(steps):
            begun = time.perf_counter()
            pool.step(0, MESSAGE)
            answered(pool)
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds) * 1e3


def measure_steps(isolation: Isolation, steps: int) -> tuple[float, float]:
    """Seconds until all episodes have begun, and steps in a second."""
    with opened_pool(SleepingEnvironment, isolation, TEMPLATES) as pool:
        begun = time.perf_counter()
        for episode in range(EPISODES):
            pool.reset(episode, episode, {})
        waiting = EPISODES
        while waiting:
            waiting -= len(answered(pool))
        reset_seconds = time.perf_counter() - begun
        begun = time.perf_counter()
        for episode in range(EPISODES):
            pool.step(episode, MESSAGE)
        left = [steps] * EPISODES
        while any(left):
            for episode in answered(pool):
                left[episode] -= 1
                if left[episode]:
                    pool.step(episode, MESSAGE)
        return reset_seconds, EPISODES * steps / (time.perf_counter() - begun)


def measure(isolation: Isolation, *, quick: bool) -> list[SideResult]:
    """All numbers of one isolation, each the median of several rounds."""
    rounds = 1 if quick else 3
    trips = [measure_round_trip(isolation, 200 if quick else 2000) for _ in range(rounds)]
    pairs = [measure_steps(isolation, 10 if quick else 50) for _ in range(rounds)]
    resets = [reset_seconds for reset_seconds, _ in pairs]
    rates = [rate for _, rate in pairs]
    return [
        SideResult(
            name=f"{isolation}/round_trip",
            value=statistics.median(trips),
            unit="ms",
            goal=ROUND_TRIP_MS,
            least=False,
        ),
        SideResult(
            name=f"{isolation}/steps_of_{EPISODES}",
            value=statistics.median(rates),
            unit="steps/s",
            goal=STEPS_PER_SECOND,
        ),
        SideResult(
            name=f"{isolation}/reset_of_{EPISODES}", value=statistics.median(resets), unit="s"
        ),
    ]


def main(*, quick: bool = False, json: Path | None = None) -> None:
    """Measure.

    Args:
        quick: one short round; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    where = machine()
    results: list[SideResult] = []
    for isolation in ISOLATIONS:
        results += measure(isolation, quick=quick)
    if json is not None:
        write_json(json, results, where)
    show("Environments in processes", results, where)


if __name__ == "__main__":
    tyro.cli(main)
