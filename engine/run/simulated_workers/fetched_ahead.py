"""What a simulated Worker has fetched ahead: the rows of its nodes in the next Step.

Owns: which blocks are here, or on their way until when. Does not own: how long a fetch takes
(kernel_times.py), what it is for (simulated_worker.py).
"""

from __future__ import annotations

from itertools import chain

from engine.protocol import messages as m
from engine.run.simulated_workers.kernel_times import Rows
from engine.run.simulated_workers.row_checks import require_rows_ahead
from engine.run.simulated_workers.world import SharedWorld

_NOTHING = frozenset[tuple[str, int]]()


class FetchedAhead:
    """Of one Worker, whose fetches come one after another."""

    def __init__(self, world: SharedWorld) -> None:
        self._world = world
        self._free_at = 0.0
        self._here: dict[str, tuple[int, frozenset[tuple[str, int]], float]] = {}
        """Node -> the Step, the blocks (worker, number) of its rows, when they are here."""

    def begin(self, message: m.FetchAhead) -> None:
        """Begin to fetch. Raises RunError for rows that are not there."""
        if self._world.over:  # what was told before the end may come after the last releases
            return
        if self._world.proving:
            require_rows_ahead(self._world, message)
        start = max(self._free_at, self._world.clock.now)
        self._free_at = start + self._world.fetching(message)
        gathers = chain.from_iterable(message.inputs.values())
        blocks = frozenset(chain.from_iterable(gather.refs for gather in gathers))
        self._here[message.node] = message.step, blocks, self._free_at

    def take(self, message: Rows) -> tuple[frozenset[tuple[str, int]], float]:
        """The blocks that are here for a task, and the seconds until they are."""
        if not isinstance(message, m.RunChunk | m.TrainStep):
            return _NOTHING, 0.0
        step, blocks, ready = self._here.get(message.node, (-1, _NOTHING, 0.0))
        if step != message.step:
            return _NOTHING, 0.0
        if isinstance(message, m.TrainStep):
            del self._here[message.node]
        return blocks, max(0.0, ready - self._world.clock.now)
