"""Rows that the first rank of a rerun makes, given to the others.

Owns: their form on the way. Does not own: the way (engine/channels/tensors/row_broadcast.py), who
makes them (task_replay.py).
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


def give(channel: RowBroadcast, made: Sequence[Batch]) -> None:
    """The first rank: what a chunk made, which may be nothing."""
    whole = Batch.concat(list(made)) if made else Batch(Keys.of([]), pa.RecordBatch.from_pydict({}))
    keyed = whole.with_keys()
    channel.give({_ROWS: Batch(Keys.of(range(len(keyed))), keyed)})


def take(channel: RowBroadcast) -> Batch:
    """Any other rank: the same."""
    records, _ = channel.take([_ROWS])[_ROWS]
    return recorded_batch(pa.Table.from_batches([records]))
