"""The thread that tells peers where rows are: what ends one connection harms no other."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pyarrow as pa
import pytest

from dataflow.batch import Batch, Keys
from engine.channels.shm.channel import ShmChannel
from tests.contracts.pull_worlds import fetched, of_a, shm

SOON = 20.0
MIB = 1 << 20

pytestmark = pytest.mark.timeout(60)


def keep_bytes(channel: ShmChannel, size: int) -> int:
    """A block of one row of so many bytes."""
    column = pa.array([np.zeros(size, np.uint8)], pa.large_list(pa.uint8()))
    return channel.keep(Batch(Keys.of([0]), pa.RecordBatch.from_pydict({"x": column})))


def test_a_peer_that_dies_as_it_is_told_something_ends_no_others_connection(
    tmp_path: Path,
) -> None:
    """The thread finds both at once: that a slab is gone, which it tells, and the peer's end."""
    world = shm(limit=10 * MIB, directory=tmp_path)
    small, _, spilled = (keep_bytes(world["a"], size) for size in (10, 8 * MIB, 6 * MIB))
    assert fetched(world, spilled).num_rows == 1
    is_busy, may_go_on = threading.Event(), threading.Event()

    def wait(peer: str, sequence: int, requests: object) -> None:
        is_busy.set()
        assert may_go_on.wait(SOON)

    world["a"].send_by(wait)
    world["c"].have_sent("a", 0, of_a(small))
    assert is_busy.wait(SOON)
    world["a"].release(spilled)
    world.kill("b")
    may_go_on.set()
    (rows,) = world["c"].fetch(of_a(small))
    assert rows.num_rows == 1
    world.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_ends_the_thread_is_told() -> None:
    world, told = shm(), SimpleQueue()
    block = keep_bytes(world["a"], 10)
    world["a"].fail_by(told.put)

    def fail(peer: str, sequence: int, requests: object) -> None:
        raise LookupError(f"nobody expects {peer}")

    world["a"].send_by(fail)
    world["c"].have_sent("a", 0, of_a(block))
    assert isinstance(told.get(timeout=SOON), LookupError)
    world.close()
