"""Columns that kernels build in the outbox's own memory: kept without a copy, then given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import KernelError
from dataflow.kernel import Chunk
from dataflow.model import Model
from dataflow.schema import Logprobs
from engine.channels.inproc import InprocChannel
from engine.channels.shm.outbox import SlabOutbox
from engine.channels.shm.slabs import POISON, SlabPool
from engine.run.worker.kernel_session import Allocate, NodeSession
from operators.kernels.torch.forward import TorchLogprobs, TorchScores, TorchValues
from operators.kernels.torch.generate import TorchGenerate
from tests.kit.kernels import FakeSession, open_kernel, prompt_chunk, rows_chunk
from tests.kit.rows import random_rows


class RecordingOutbox:
    """A slab outbox that records which memory it gave out, and how many bytes."""

    def __init__(self, tmp_path: Path) -> None:
        self.pool = SlabPool(limit=1 << 30, directory=tmp_path, poison=True)
        self.outbox = SlabOutbox(self.pool, 0)
        self.given: dict[int, int] = {}

    def allocate(self, nbytes: int) -> np.ndarray:
        memory = self.outbox.allocate(nbytes)
        self.given[memory.ctypes.data] = nbytes
        return memory

    def array(self, count: int, dtype: Any = np.float32, value: float = 0.0) -> np.ndarray:
        """What a kernel gets that asks for it, filled."""
        array = session_on(self.allocate).allocate(count, dtype)
        array[:] = value
        return array

    def built(self, block: int) -> set[str]:
        """Columns of a block whose values lie where they were built."""
        records = self.outbox.records(block, ())
        columns = {name: _values(records.column(name)) for name in records.schema.names}
        return {name for name, values in columns.items() if values.address in self.given}

    def live(self) -> int:
        """Regions that are held, once all views that nobody has are gone."""
        gc.collect()
        self.outbox.allocate(1)  # takes note of what has been dropped before
        return self.pool.live - 1


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[RecordingOutbox]:
    outbox = RecordingOutbox(tmp_path)
    yield outbox
    outbox.outbox.close()


def session_on(memory: Allocate | None) -> NodeSession:
    return NodeSession("n", 0, {}, {"m": "m"}, memory=memory)


def _values(array: pa.Array) -> pa.Buffer:
    return (array.values if pa.types.is_large_list(array.type) else array).buffers()[1]


def logprobs(values: np.ndarray, offsets: np.ndarray) -> Batch:
    keys = Keys.of(range(len(offsets) - 1))
    return Batch.make(keys, {"logprobs": Ragged(values, offsets)}, Logprobs)


# the door


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_memory_is_aligned_typed_and_as_long_as_asked(
    recording: RecordingOutbox, dtype: Any, count: int
) -> None:
    array = recording.array(count, dtype)
    assert (array.dtype, array.shape) == (np.dtype(dtype), (count,))
    assert array.flags.writeable
    assert not count or array.ctypes.data % 64 == 0


def test_a_batch_of_built_columns_is_kept_where_it_lies(recording: RecordingOutbox) -> None:
    values, offsets = recording.array(1000), recording.array(11, np.int64)
    values[:], offsets[:] = np.arange(1000), np.arange(0, 1001, 100)
    block = recording.outbox.keep(logprobs(values, offsets))
    assert recording.pool.live == 2, "no region for a copy"
    column = recording.outbox.records(block, ()).column("logprobs")
    assert _values(column).address == values.ctypes.data
    assert column.buffers()[1].address == offsets.ctypes.data
    assert column.to_pylist()[9] == list(range(900, 1000))
    recording.outbox.release(block)
    assert values[5] == 5, "a view of it is left"
    del values, offsets, column
    assert recording.live() == 0


def test_other_columns_of_the_batch_are_copied_alone(recording: RecordingOutbox) -> None:
    values, offsets = recording.array(1000, value=3.0), np.arange(0, 1001, 100)
    others = {"note": pa.array(["x"] * 10), "other": pa.array(range(10))}
    expected = logprobs(values.copy(), offsets.copy()).with_columns(others)
    block = recording.outbox.keep(logprobs(values, offsets).with_columns(others))
    assert recording.built(block) == {"logprobs"}
    assert recording.pool.live == 2, "one copy of all the rest"
    offsets[:] = 0
    assert recording.outbox.records(block, ()).equals(expected.records)


@pytest.mark.parametrize(("dtype", "step"), [(np.float64, 1), (np.float32, 2)])
def test_what_has_to_be_converted_is_a_copy(
    recording: RecordingOutbox, dtype: Any, step: int
) -> None:
    values = recording.array(8 * step, dtype, value=2.0)[::step]
    block = recording.outbox.keep(logprobs(values, np.array([0, 8])))
    assert recording.built(block) == set()
    assert recording.outbox.records(block, ()).column("logprobs").to_pylist() == [[2.0] * 8]


def test_what_is_never_yielded_is_given_back(recording: RecordingOutbox) -> None:
    part = recording.array(1 << 20, value=7.0)[:10]
    gc.collect()
    more = recording.array(4)
    assert (part == 7.0).all(), "a part of it is still looked at"
    assert recording.pool.live == 2
    del part
    gc.collect()
    again = session_on(recording.allocate).allocate(1 << 22, np.uint8)
    assert recording.pool.live == 2, "the same memory, free in between"
    assert (again[:40] == POISON).all()
    del more


@pytest.mark.parametrize("memory", [None, InprocChannel().allocate])
def test_without_other_processes_it_is_ordinary_memory(memory: Allocate | None) -> None:
    values = session_on(memory).allocate(100, np.float32)
    values[:] = np.arange(100)
    batch = logprobs(values, np.array([0, 60, 100]))
    assert _values(batch.array("logprobs")).address == values.ctypes.data
    channel = InprocChannel()
    assert channel._blocks[channel.keep(batch)] is batch


@pytest.mark.parametrize(
    "count,dtype,found", [(-1, np.int32, "-1 of int32"), (3, object, "3 of object")]
)
def test_no_memory_of_no_size(
    recording: RecordingOutbox, count: int, dtype: Any, found: str
) -> None:
    with pytest.raises(KernelError, match=f"n: allocate: expected .*found {found}.*Fix: "):
        session_on(recording.allocate).allocate(count, dtype)
    assert recording.pool.live == 0


# the kernels that make large columns


def yielded(kernel: Any, session: Any, chunk: Chunk, model: Model, **params: Any) -> Batch:
    """The one batch that the kernel makes of a chunk; the kernel has ended."""
    open_kernel(kernel, model, node="n", session=session, **params)
    (batch,) = kernel.run(chunk)
    kernel.close()
    return batch


WRITTEN = {"prompt_ids", "completion_ids", "completion_mask", "sampler_logprobs", "version"}
KERNELS = {
    "logprobs": (TorchLogprobs, "lm", {}, {"logprobs"}),
    "values": (TorchValues, "scalar", {}, {"values"}),
    "scores": (TorchScores, "scalar", {}, {"reward"}),
    "generate": (TorchGenerate, "lm", {"n": 2, "max_tokens": 12}, WRITTEN),
}


@pytest.mark.parametrize("name", KERNELS)
def test_their_columns_are_kept_where_they_were_built(
    recording: RecordingOutbox, base: str, name: str
) -> None:
    kernel, head, params, built = KERNELS[name]
    chunk = rows_chunk(random_rows(4, 3))
    if kernel is TorchGenerate:
        chunk = prompt_chunk(["abc", "de"])
    model = Model("m", base, head=head, trainable=True)  # type: ignore[arg-type]
    batch = yielded(kernel(), session_on(recording.allocate), chunk, model, **params)
    block = recording.outbox.keep(batch)
    assert recording.built(block) == built
    ordinary = yielded(kernel(), FakeSession(node="n"), chunk, model, **params)
    assert recording.outbox.records(block, ()).equals(ordinary.records)
    assert recording.pool.live <= len(recording.given) + 1, "more than one copy of all the rest"
    recording.outbox.release(block)
    del batch
    assert recording.live() == 0
