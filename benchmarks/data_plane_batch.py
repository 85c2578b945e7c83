"""The batch that the data plane is measured with, and what a receiver does with it.

Owns: its columns and lengths: sample_id, reward and five ragged columns, 17 bytes per token, rows
of 200 to 8000 tokens. Does not own: how it travels.
"""

from __future__ import annotations

import warnings

import numpy as np
import pyarrow as pa

from dataflow.batch import as_ragged
from engine.channels.frames import put_together, take_apart
from engine.channels.shm.channel import ShmChannel

MIB = 1 << 20
COLUMNS = {
    "completion_ids": np.int32,
    "sampler_logprobs": np.float32,
    "logprobs": np.float32,
    "advantage": np.float32,
    "completion_mask": np.uint8,
}


def make_batch(nbytes: int, seed: int = 0) -> pa.RecordBatch:
    """About this many bytes of rows; the small batch is one row of fewer tokens."""
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
    one = {
        "sample_id": pa.array(np.arange(len(lengths))),
        "reward": pa.array(rng.random(len(lengths), np.float32)),
    }
    return pa.RecordBatch.from_pydict(one | columns)


def built_in(channel: ShmChannel, records: pa.RecordBatch) -> pa.RecordBatch:
    """The same columns, built in the outbox's own memory, as a kernel builds them."""
    framed = take_apart(records)
    buffers = [None if b is None else _into_slab(channel, b) for b in framed.buffers]
    return put_together(framed.layout, framed.rows, framed.nodes, buffers)


def _into_slab(channel: ShmChannel, buffer: pa.Buffer) -> pa.Buffer:
    memory = channel.allocate(buffer.size)
    memory[:] = np.frombuffer(buffer, np.uint8)
    return pa.py_buffer(memory)


def views(records: pa.RecordBatch) -> int:
    """torch views of every column; returns how many values they have."""
    import torch

    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes here
    found = 0
    for column in records.columns:
        numbers = (
            as_ragged(column).values if pa.types.is_large_list(column.type) else column.to_numpy()
        )
        found += torch.from_numpy(numbers).numel()
    return found
