"""The rows of a chunk that several ranks run, from the one that fetches them to the others.

    a rank           waits for                  unblocked by
    the lead         its rows                   the channels of their Workers
    any other one    the lead to give rows      the lead, also where it has none; its end

Owns: what the lead gives, and what the others take. Does not own: the broadcast itself
(engine/channels/tensors/row_broadcast.py), what becomes of the rows (chunk_runs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dataflow.batch import Batch
from dataflow.errors import RunError
from engine.channels.contract import PeerLost
from engine.protocol.messages import RunChunk
from engine.run.worker.device_columns import DeviceColumns

if TYPE_CHECKING:
    from engine.channels.tensors.row_broadcast import RowBroadcast

Inputs = Mapping[str, Batch]


class ReplicaRows:
    """Of one rank. broadcast: among the ranks of its replica; None where it is alone."""

    def __init__(self, worker: str, broadcast: RowBroadcast | None, device: DeviceColumns) -> None:
        self._worker, self._broadcast, self._device = worker, broadcast, device

    def is_taken(self, chunk: RunChunk) -> bool:
        """Whether another rank gives this one the chunk's rows."""
        return chunk.giver not in ("", self._worker)

    def give(self, chunk: RunChunk, fetch: Callable[[RunChunk], Inputs]) -> Inputs:
        """Fetch a chunk's rows, and give them to the other ranks, if there are any. Raises
        PeerLost where they are gone; the others get nothing then.
        """
        if not chunk.giver:
            return fetch(chunk)
        assert self._broadcast is not None
        try:
            inputs = fetch(chunk)
        except PeerLost:
            self._in_step(chunk, self._broadcast.give_nothing)
            raise
        self._in_step(chunk, lambda: self._give(inputs))
        return inputs

    def _give(self, inputs: Inputs) -> None:
        assert self._broadcast is not None
        self._broadcast.give(inputs)

    def _in_step(self, chunk: RunChunk, give: Callable[[], None]) -> None:
        """Raises RunError where another rank is gone: no rows are, which could come again."""
        try:
            give()
        except PeerLost as lost:
            raise RunError(f"{chunk.node}: rows of chunk {chunk.id}: {lost}") from lost

    def take(self, chunk: RunChunk) -> Inputs | None:
        """Take a chunk's rows from the lead; None where it has none. Raises RunError where it is
        gone.
        """
        assert self._broadcast is not None
        try:
            received = self._broadcast.take_any(list(chunk.inputs))
        except PeerLost as lost:
            raise RunError(f"{chunk.node}: rows of chunk {chunk.id}: {lost}") from lost
        if received is None:
            return None
        inputs: dict[str, Batch] = {}
        for name, (records, values) in received.items():
            moved_values = self._device.move_to_device(values)
            inputs[name] = Batch(chunk.keys, records, moved_values)
        return inputs
