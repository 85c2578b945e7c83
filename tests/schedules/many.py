"""Many schedules of each kind: `python -m tests.schedules.many --seeds 100000 --processes 2`.

Runs seeds in parallel and prints how to replay a failure; exits with 1 if a seed failed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import cycle

from tests.schedules.kinds import KINDS

_WINDOW = 64
"""Seeds under way or waiting for a process, for each process."""
_TOLD_EVERY = 10.0
"""Seconds."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """How far it has come."""

    total: int
    done: int = 0
    failed: int = 0

    def take(self, kind: str, seed: int, future: Future[None]) -> None:
        """Count a seed that has ended; a failure is told at once."""
        self.done += 1
        error = future.exception()
        if error is None:
            return
        self.failed += 1
        last = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        print(f"{kind}, seed {seed} failed: {last[:300]}", flush=True)
        print(f"  to see it again: {replay(kind, seed)}", flush=True)

    def line(self, seconds: float) -> str:
        """How far it has come, in words."""
        rate = self.done / seconds if seconds else 0.0
        left = (self.total - self.done) / rate if rate else 0.0
        return (
            f"{self.done} of {self.total} schedules, {self.failed} failed;"
            f" {rate:.0f} a second, {left / 60:.0f} minutes left"
        )


def replay(kind: str, seed: int) -> str:
    """The command that runs one seed alone, in this process, with the whole traceback."""
    how = f"--kind '{kind}' --first {seed} --seeds 1 --processes 0"
    return f"python -m tests.schedules.many {how}"


def proven(kind: str, seed: int) -> None:
    """Run a seed's case of this kind and prove every promise."""
    KINDS[kind](seed)


def many(kinds: Sequence[str], seeds: range, processes: int) -> Tally:
    """Run seeds in processes, each of the next kind; prints what fails, and how far it has come."""
    tally = Tally(total=len(seeds))
    began = told = time.monotonic()
    with ProcessPoolExecutor(processes, initializer=gc.freeze) as pool:
        for (kind, seed), future in _ended(pool, kinds, seeds, _WINDOW * processes):
            tally.take(kind, seed, future)
            if time.monotonic() - told > _TOLD_EVERY:
                told = time.monotonic()
                print(tally.line(told - began), flush=True)
    print(tally.line(time.monotonic() - began), flush=True)
    return tally


def _ended(
    pool: ProcessPoolExecutor, kinds: Sequence[str], seeds: range, window: int
) -> Iterator[tuple[tuple[str, int], Future[None]]]:
    """Seeds as they end, so many at a time."""
    under_way: dict[Future[None], tuple[str, int]] = {}
    left = zip(cycle(kinds), seeds)
    while True:
        for kind, seed in left:
            under_way[pool.submit(proven, kind, seed)] = kind, seed
            if len(under_way) >= window:
                break
        if not under_way:
            return
        for future in wait(under_way, return_when=FIRST_COMPLETED).done:
            yield under_way.pop(future), future


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.schedules.many", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--kind", choices=KINDS, help="one kind; each in turn if none is named")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    alone = "0: in this one, one after another"
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help=alone)
    given = parser.parse_args()
    kinds = [given.kind] if given.kind else list(KINDS)
    seeds = range(given.first, given.first + given.seeds)
    if given.processes:
        return 1 if many(kinds, seeds, given.processes).failed else 0
    for kind, seed in zip(cycle(kinds), seeds):
        print(f"{kind}, seed {seed}", flush=True)
        proven(kind, seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
