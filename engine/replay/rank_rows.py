"""Rows that the first rank of a rerun makes, sent to the others.

Owns: the form in which they are sent. Does not own: the channel
(engine/channels/tensors/row_broadcast.py), who makes them (task_replay.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from dataflow.batch import Batch, Keys
from engine.keep.record.stored_rows import recorded_batch

if TYPE_CHECKING:
    from engine.channels.tensors.row_broadcast import RowBroadcast

_ROWS = "rows"


def send_rows(channel: RowBroadcast, batches: Sequence[Batch]) -> None:
    """Send what a chunk made, which may be nothing, from the first rank to all others."""
    if batches:
        whole = Batch.concat(list(batches))
    else:
        whole = Batch(Keys.of([]), pa.RecordBatch.from_pydict({}))
    # The keys travel as columns: the channel's own keys number the rows.
    keyed = whole.with_keys()
    row_numbers = Keys.of(range(len(keyed)))
    channel.give({_ROWS: Batch(row_numbers, keyed)})


def receive_rows(channel: RowBroadcast) -> Batch:
    """Receive on any other rank what the first one sent."""
    records, _ = channel.take([_ROWS])[_ROWS]
    return recorded_batch(pa.Table.from_batches([records]))
