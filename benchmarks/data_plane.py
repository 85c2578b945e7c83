"""From one process to another: how long a batch takes by each way, beside a plain memcpy of it.

    python -m benchmarks.data_plane [--quick] [--json FILE]

Owns: the batch, the two processes, what is timed, the goals. Does not own: the ways (data_plane_routes.py), nor how
results are shown (report.py).

A batch is sample_id, reward and five ragged columns, 17 bytes a token, rows of 200 to 8000 tokens. The time of a round
is that from the start of sending until the receiver has torch views of all columns and its acknowledgement is back
over a pipe. Each round is paired with a warm memcpy of as many bytes by one thread; ratios are medians over the pairs.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tyro

from benchmarks.data_plane_routes import ROUTES, Route, Sender
from benchmarks.report import Result, machine, show, write_json
from dataflow.batch import ragged

MIB = 1 << 20
SIZES = {"4 kB": 4 << 10, "16 MB": 16 * MIB, "256 MB": 256 * MIB}
ROUNDS = {"4 kB": 200, "16 MB": 30, "256 MB": 8}
COLUMNS = {
    "completion_ids": np.int32,
    "sampler_logprobs": np.float32,
    "logprobs": np.float32,
    "advantage": np.float32,
    "completion_mask": np.uint8,
}

GOALS = {
    ("shm, one copy", "16 MB"): 0.45,
    ("shm, one copy", "256 MB"): 0.8,
    ("shm, one copy, content verified", "16 MB"): 0.30,
}
"""Least share of memcpy's rate."""
BUILT_MS = 0.4
"""Most milliseconds for what was built in the slab, whatever its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Medians of one way and size: seconds a round, and memcpy's seconds divided by it."""

    seconds: float
    of_memcpy: float


def make_batch(nbytes: int, seed: int = 0) -> pa.RecordBatch:
    """About so many bytes of rows; the small one is one row of fewer tokens."""
    rng = np.random.default_rng(seed)
    if nbytes < 100_000:
        lengths = np.array([nbytes // 17 - 10])
    else:
        lengths = rng.integers(200, 8001, max(1, nbytes // (17 * 4100)))
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]))
    total = int(lengths.sum())
    drawn = rng.integers(0, 100, MIB)
    arrays = {n: pa.array(np.resize(drawn.astype(kind), total)) for n, kind in COLUMNS.items()}
    columns = {n: pa.LargeListArray.from_arrays(offsets, a) for n, a in arrays.items()}
    one = {"sample_id": pa.array(np.arange(len(lengths))), "reward": pa.array(rng.random(len(lengths), np.float32))}
    return pa.RecordBatch.from_pydict(one | columns)


def views(records: pa.RecordBatch) -> int:
    """torch views of every column; returns how many values they have."""
    import torch

    found = 0
    for column in records.columns:
        numbers = ragged(column).values if pa.types.is_large_list(column.type) else column.to_numpy()
        found += torch.from_numpy(numbers).numel()
    return found


def consume(route_name: str, given: Any, pipe: Connection) -> None:
    """The receiving process: a token comes, views are made, the number of values goes back; None ends it."""
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes here
    route = next(r for r in ROUTES if r.name == route_name)
    pipe.send("here")
    with route.receive(given) as receive:
        while (message := pipe.recv()) is not None:
            count = views(receive(message[0]))
            pipe.send(count)


@contextmanager
def across(route: Route) -> Iterator[tuple[Sender, Connection]]:
    """A receiving process at the other end of a way."""
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


def measure(route: Route, sizes: Sequence[str], rounds: dict[str, int]) -> dict[str, Timed]:
    """Each size by one way."""
    found = {}
    with across(route) as (sender, pipe):
        for size in sizes:
            records = make_batch(SIZES[size])
            sender.prepare(records)
            source = np.ones(records.nbytes, np.uint8)
            target = np.ones(records.nbytes, np.uint8)
            pairs = []
            for number in range(rounds[size] + 3):
                start = time.perf_counter()
                np.copyto(target, source)
                copied = time.perf_counter()
                token = once(sender, pipe, records)
                seconds = time.perf_counter() - copied
                sender.done(token)
                if number >= 3:
                    pairs.append((copied - start, seconds))
            found[size] = Timed(
                seconds=statistics.median(s for _, s in pairs), of_memcpy=statistics.median(c / s for c, s in pairs)
            )
    return found


def once(sender: Sender, pipe: Connection, records: pa.RecordBatch) -> Any:
    """One batch there, and the acknowledgement back."""
    token = sender.send()
    pipe.send((token,))
    after = getattr(sender, "after_token", None)
    if after is not None:
        after()
    count = pipe.recv()
    assert count >= records.num_rows
    return token


def results(found: dict[str, dict[str, Timed]]) -> list[Result]:
    """The numbers of every way and size, with the goals of this project's own."""
    rows = []
    for name, by_size in found.items():
        for size, timed in by_size.items():
            built = name == "shm, built in the slab" and size != "4 kB"
            goal = BUILT_MS if built else None
            rows.append(Result(name=f"{name}, {size}", value=1e3 * timed.seconds, unit="ms", goal=goal, least=False))
            if size != "4 kB":
                least = GOALS.get((name, size))
                rows.append(Result(name=f"{name}, {size}", value=timed.of_memcpy, unit="of memcpy", goal=least))
    return rows + _against(found)


def _against(found: dict[str, dict[str, Timed]]) -> list[Result]:
    """The round trip of a small batch against ZeroMQ's own."""
    ours, bare = found.get("shm, one copy"), found.get("bare zmq ipc")
    if ours is None or bare is None:
        return []
    value = ours["4 kB"].seconds / bare["4 kB"].seconds
    return [Result(name="4 kB, shm / bare zmq ipc", value=value, unit="x", goal=1.0, least=False)]


def main(*, quick: bool = False, json: Path | None = None, only: tuple[str, ...] = ()) -> None:
    """Measure.

    Args:
        quick: fewer rounds, and nothing of 256 MB; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        only: the ways whose names contain one of these.
    """
    sizes = [s for s in SIZES if not quick or s != "256 MB"]
    rounds = {size: max(5, n // 6) if quick else n for size, n in ROUNDS.items()}
    routes = [r for r in ROUTES if not only or any(word in r.name for word in only)]
    with tempfile.TemporaryDirectory() as folder:  # of sockets; the receivers inherit the environment
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        found = {route.name: measure(route, sizes, rounds) for route in routes}
    rows, where = results(found), machine()
    show("from one process to another", rows, where)
    if json is not None:
        write_json(json, rows, where)


if __name__ == "__main__":
    tyro.cli(main)
