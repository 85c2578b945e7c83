"""Metrics of chunks, each counted of one run.

Owns: those of runs that have not ended. Does not own: what becomes of a number (engine/observe),
nor which chunks are run again (coordinator: of one that has ended before, a further run reports
nothing).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.coordinator.messages import ChunkDone, Reported, WorkerLost
from engine.observe.reports import Report


class RunReports:
    """The runs under way, by the number of their chunk."""

    def __init__(self) -> None:
        self._runs: dict[int, list[Reported]] = {}

    def hear(self, event: Any) -> Iterable[Report]:
        """What counts now: all that was reported of a run that ends. Those of a Worker that is lost
        come to nothing, as their chunks are run by others.
        """
        match event:
            case Reported(id=chunk):
                self._runs.setdefault(chunk, []).append(event)
            case ChunkDone(id=chunk):
                return _metrics(self._runs.pop(chunk, []))
            case WorkerLost(worker=worker):
                self._runs = {
                    chunk: said for chunk, said in self._runs.items() if said[0].worker != worker
                }
        return ()

    def rest(self) -> Iterable[Report]:
        """What runs have reported that have not ended, as a Step closes: of rows that came before
        it.
        """
        found = [each for said in self._runs.values() for each in said]
        self._runs.clear()
        return _metrics(found)


def _metrics(said: Iterable[Reported]) -> list[Report]:
    return [metric for each in said for metric in each.metrics]
