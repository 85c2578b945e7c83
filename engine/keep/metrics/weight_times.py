"""How long versions take from being offered until each reader has them.

Owns: the metric `weights/<model>/offered_to_loaded`. Does not own: what the ends take themselves,
which Workers report (engine/run/worker/weight_delivery.py). Both moments are those at which the
process of the run heard of them, by one clock, so messages and the reader's own work count.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.protocol import messages as m
from engine.protocol.reports import Report


class WeightTimes:
    """Of the versions that are offered now."""

    def __init__(self) -> None:
        self._offered: dict[tuple[str, int], float] = {}
        """By Worker and block."""
        self._loading: dict[tuple[int, str], m.Load] = {}
        """By task and Worker."""

    def tell(self, instruction: m.Instruction) -> None:
        """Note who is to load, and which blocks are gone."""
        match instruction:
            case m.Load(source=source) if source and source != instruction.worker:
                self._loading[instruction.id, instruction.worker] = instruction
            case m.Release(worker=worker, blocks=blocks):
                for block in blocks:
                    self._offered.pop((worker, block), None)

    def hear(self, event: m.Event, now: float) -> Iterable[Report]:
        """The seconds that a reader in another Worker has waited, once it has a version."""
        match event:
            case m.Offered(worker=worker, block=block):
                self._offered[worker, block] = now
            case m.Loaded(id=task, worker=worker):
                load = self._loading.pop((task, worker), None)
                if load is not None:
                    return self._report(load, now)
            case m.WorkerLost(worker=worker):
                self._forget(worker)
        return ()

    def _report(self, load: m.Load, now: float) -> Iterable[Report]:
        offered = self._offered.get((load.source, load.block))
        if offered is None:  # its Worker was lost meanwhile
            return ()
        return ((f"weights/{load.model}/offered_to_loaded", now - offered, 1.0),)

    def _forget(self, worker: str) -> None:
        """A Worker is gone, with the blocks that it kept and the loads that it was told."""
        for place in [place for place in self._offered if place[0] == worker]:
            del self._offered[place]
        for key in [key for key in self._loading if key[1] == worker]:
            del self._loading[key]
