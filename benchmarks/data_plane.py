"""How long a batch takes from one process to another by each route, compared with a plain memcpy
of it; and from several processes to several.

    python -m benchmarks.data_plane [--quick] [--json FILE]

Owns: the two processes, what is timed, the goals. Does not own: the batch (data_plane_batch.py),
the routes (data_plane_routes.py, data_plane_reshard.py), how results are shown (report.py).

A round lasts from the start of sending until the receiver has torch views of all columns and its
acknowledgement is back over a pipe. Each round is paired with a warm memcpy of as many bytes by one
thread; ratios are medians over the pairs. What is built in the slab is timed without a memcpy:
nothing of it is copied, and a large memcpy just before would leave both processes with cold caches.
It gets as many rounds as 4 kB, whatever its size, since eight of them last three milliseconds. For
Ray and TransferQueue, which run without memcpy in between, our one copy is timed that way, too.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tyro

from benchmarks import data_plane_peers as peers
from benchmarks import data_plane_reshard as reshard
from benchmarks.data_plane_batch import MIB, make_batch, views
from benchmarks.data_plane_reshard import Reshard
from benchmarks.data_plane_routes import ROUTES, Route, Sender
from benchmarks.report import SideResult, machine, show, write_json
from engine.run.launch.child import environment

SIZES = {"4 kB": 4 << 10, "16 MB": 16 * MIB, "256 MB": 256 * MIB}
WARM_UP = 10
ROUNDS = {"4 kB": 200, "16 MB": 30, "256 MB": 8}

GOALS = {
    ("shm, one copy", "16 MB"): 0.45,
    ("shm, one copy", "256 MB"): 0.8,
    ("shm, one copy, content verified", "16 MB"): 0.30,
}
"""Least share of memcpy's rate."""
RESHARDED = (64 * MIB, 256 * MIB)
BUILT_MS = 0.4
"""Most milliseconds for what was built in the slab, whatever its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Medians for one route and size: seconds per round, and memcpy's seconds divided by them."""

    seconds: float
    of_memcpy: float | None


def consume(route_name: str, given: Any, pipe: Connection) -> None:
    """The receiving process: takes a token, makes views, returns the number of values; None ends
    it.
    """
    route = next(r for r in ROUTES if r.name == route_name)
    pipe.send("here")
    with route.receive(given) as receive:
        while (message := pipe.recv()) is not None:
            count = views(receive(message[0]))
            pipe.send(count)


@contextmanager
def across(route: Route) -> Iterator[tuple[Sender, Connection]]:
    """A receiving process at the other end of a route."""
    context = multiprocessing.get_context("spawn")
    sender, given = route.start()
    mine, its = context.Pipe()
    process = context.Process(target=consume, args=(route.name, given, its), daemon=True)
    process.start()
    its.close()
    mine.recv()
    yield sender, mine
    mine.send(None)
    process.join(10)
    process.kill()


def measure(
    route: Route, sizes: Sequence[str], rounds: dict[str, int], *, alone: bool = False
) -> dict[str, Timed]:
    """Each size by one route. alone: no memcpy before each round."""
    found = {}
    with across(route) as (sender, pipe):
        for size in sizes:
            records = make_batch(SIZES[size])
            sender.prepare(records)
            copied = Copied(records.nbytes) if route.copies and not alone else None
            often = rounds[size] if route.copies else max(rounds.values())
            pairs = [paired(sender, pipe, records, copied) for _ in range(often + WARM_UP)][
                WARM_UP:
            ]
            found[size] = Timed(
                seconds=statistics.median(seconds for _, seconds in pairs),
                of_memcpy=(
                    statistics.median(c / s for c, s in pairs) if copied is not None else None
                ),
            )
    return found


class Copied:
    """A warm memcpy of this many bytes; a call returns its seconds."""

    def __init__(self, nbytes: int) -> None:
        self._source, self._target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)

    def __call__(self) -> float:
        start = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - start


def paired(
    sender: Sender, pipe: Connection, records: pa.RecordBatch, copied: Copied | None
) -> tuple[float, float]:
    """Seconds of a memcpy (0 for none), and of a round right after it."""
    before = copied() if copied is not None else 0.0
    start = time.perf_counter()
    token = once(sender, pipe, records)
    seconds = time.perf_counter() - start
    sender.done(token)
    return before, seconds


def once(sender: Sender, pipe: Connection, records: pa.RecordBatch) -> Any:
    """Send one batch and wait for the acknowledgement."""
    token = sender.send()
    pipe.send((token,))
    after = getattr(sender, "after_token", None)
    if after is not None:
        after()
    count = pipe.recv()
    assert count >= records.num_rows
    return token


def results(found: dict[str, dict[str, Timed]]) -> list[SideResult]:
    """The numbers of every route and size, with this project's own goals."""
    rows = []
    for name, by_size in found.items():
        for size, timed in by_size.items():
            built = name == "shm, built in the slab" and size != "4 kB"
            goal = BUILT_MS if built else None
            rows.append(
                SideResult(
                    name=f"{name}, {size}",
                    value=1e3 * timed.seconds,
                    unit="ms",
                    goal=goal,
                    least=False,
                )
            )
            if size != "4 kB" and timed.of_memcpy is not None:
                least = GOALS.get((name, size))
                rows.append(
                    SideResult(
                        name=f"{name}, {size}", value=timed.of_memcpy, unit="of memcpy", goal=least
                    )
                )
    return rows


AGAINST = (
    ("4 kB", "shm, one copy", "bare zmq ipc", 1.0, False),
    ("16 MB", "bare zmq tcp", "zmq tcp", 0.9, True),
)
"""(size, route, other route, goal for the first one's seconds divided by the second's, whether the
goal is a lower bound).
"""


def side_by_side(only: Sequence[str], rounds: dict[str, int]) -> list[SideResult]:
    """Two routes with alternating rounds, as the machine's speed changes from second to second."""
    found = []
    for size, one, other, goal, least in AGAINST:
        if not only or any(word in name for word in only for name in (one, other)):
            value = alternated(size, one, other, rounds[size])
            found.append(
                SideResult(
                    name=f"{size}, {one} / {other}", value=value, unit="x", goal=goal, least=least
                )
            )
    return found


def alternated(size: str, one: str, other: str, rounds: int) -> float:
    """The median of the first route's seconds divided by the second's, over adjacent rounds."""
    records = make_batch(SIZES[size])
    with ExitStack() as stack:
        ways = [
            stack.enter_context(across(r))
            for name in (one, other)
            for r in ROUTES
            if r.name == name
        ]
        for sender, _ in ways:
            sender.prepare(records)
        seconds = [
            [paired(*way, records, None)[1] for way in ways] for _ in range(rounds + WARM_UP)
        ][WARM_UP:]
    return statistics.median(first / second for first, second in seconds)


def reshard_all(quick: bool) -> list[SideResult]:
    """From four processes to four others."""
    found = []
    for nbytes in RESHARDED[:1] if quick else RESHARDED:
        setting = Reshard(producers=4, consumers=4, nbytes=nbytes)
        found += reshard.results(setting, reshard.measure(setting, 3 if quick else 9))
    return found


def peers_all(sizes: Sequence[str], rounds: dict[str, int]) -> list[SideResult]:
    """Ray and TransferQueue, and this project's one copy, one round after the other; if they cannot
    be installed, prints why.
    """
    reason = peers.prepare()
    if reason:
        print(f"Ray and TransferQueue are left out: .venv-ray cannot be made: {reason}")
        return []
    told = {size: (SIZES[size], min(20, rounds[size])) for size in sizes}
    (route,) = [r for r in ROUTES if r.name == peers.OURS]
    ours = {
        size: timed.seconds for size, timed in measure(route, sizes, rounds, alone=True).items()
    }
    return peers.results({peer: peers.measure(peer, told) for peer in peers.PEERS}, ours)


def main(*, quick: bool = False, json: Path | None = None, only: tuple[str, ...] = ()) -> None:
    """Measure.

    Args:
        quick: fewer rounds, and nothing of 256 MB; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        only: the routes whose names contain one of these; "reshard": from several processes to
            several; "peers": Ray and TransferQueue.
    """
    sizes = [s for s in SIZES if not quick or s != "256 MB"]
    rounds = {size: max(5, n // 6) if quick else n for size, n in ROUNDS.items()}
    routes = [r for r in ROUTES if not only or any(word in r.name for word in only)]
    with tempfile.TemporaryDirectory() as folder:
        # Sockets lie there; the receivers inherit the environment.
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        found = {route.name: measure(route, sizes, rounds) for route in routes}
        resharded = reshard_all(quick) if not only or "reshard" in only else []
        rows = results(found) + side_by_side(only, rounds) + resharded
        if not only or "peers" in only:
            rows += peers_all(sizes, rounds)
    where = machine()
    show("from one process to another", rows, where)
    if json is not None:
        write_json(json, rows, where)


def begin_as_a_worker() -> None:
    """Restart this process in the environment that the engine gives its Workers, unless it has it:
    so the routes and the memcpy are measured as in a Worker.
    """
    wanted = environment(threads=1)
    if wanted != dict(os.environ):
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.data_plane", *sys.argv[1:]], wanted
        )


if __name__ == "__main__":
    begin_as_a_worker()
    tyro.cli(main)
