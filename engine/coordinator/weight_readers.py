"""Which readers wait for weights.

Owns: for each Worker of each reader, how many reasons there are to wait for it (it is owed a
version, waits for an offer, loads one), and whether it has had any version since it restarted. Does
not own: these reasons (versions.py). All of it is counted as it changes, as every event asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.plan.plan import Plan
from engine.protocol.messages import Load

Place = tuple[str, str, str]
"""(reader, model, worker)."""


def place_of(message: Load) -> Place:
    """Where a Load goes to."""
    return message.reader, message.model, message.worker


class StillLoading:
    """elastic: readers whose replicas nobody waits for until they have had a version.

    readers: for each reader that is waited for, in how many places.
    """

    def __init__(self, elastic: Iterable[str]) -> None:
        self._elastic = frozenset(elastic)
        self._reasons: Counter[Place] = Counter()
        self._fresh: set[Place] = set()
        """Who has had no version since its Worker restarted."""
        self._lacking: Counter[tuple[str, str]] = Counter()
        """How many Models a (reader, Worker) lacks."""
        self.readers: dict[str, int] = {}

    def add(self, place: Place) -> None:
        """There is one reason more to wait for this."""
        self._reasons[place] += 1
        if self._reasons[place] == 1 and not self._is_overlooked(place):
            self._count(place[0], 1)

    def drop(self, place: Place) -> None:
        """There is one less."""
        self._reasons[place] -= 1
        if self._reasons[place]:
            return
        del self._reasons[place]
        if not self._is_overlooked(place):
            self._count(place[0], -1)

    def has_none(self, place: Place) -> None:
        """Its Worker is gone, and its weights."""
        if place in self._fresh:
            return
        if place in self._reasons and place[0] in self._elastic:
            self._count(place[0], -1)
        self._fresh.add(place)
        self._lacking[place[0], place[2]] += 1

    def has_one(self, place: Place) -> None:
        """It has had a version."""
        if place not in self._fresh:
            return
        self._fresh.discard(place)
        self._lacking[place[0], place[2]] -= 1
        if place in self._reasons and place[0] in self._elastic:
            self._count(place[0], 1)

    def lacks(self, reader: str, worker: str) -> bool:
        """Whether a reader has had no version of some Model in a Worker that restarted."""
        return bool(self._fresh) and self._lacking[reader, worker] > 0

    def places(self) -> set[Place]:
        """All that is waited for."""
        return {place for place in self._reasons if not self._is_overlooked(place)}

    def _is_overlooked(self, place: Place) -> bool:
        return place[0] in self._elastic and place in self._fresh

    def _count(self, reader: str, more: int) -> None:
        self.readers[reader] = self.readers.get(reader, 0) + more
        if not self.readers[reader]:
            del self.readers[reader]


def list_readers(plan: Plan) -> dict[str, list[tuple[str, str]]]:
    """Worker -> (reader, model) of each Model with a writer that is read there."""
    nodes = {n.name: n for n in plan.nodes}
    readers: dict[str, list[tuple[str, str]]] = {}
    for model in plan.states:
        if not model.writer:
            continue
        for reader in model.readers:
            for worker in dict.fromkeys(nodes[reader].workers):
                readers.setdefault(worker, []).append((reader, model.name))
    return readers
