"""Chunks that wait to be told, in the order in which they came.

Owns: that order, among all and among those of one node. Does not own: what they wait for
(dispatch.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from heapq import merge
from itertools import count

from engine.coordinator.chunk import NodeChunk

_Place = tuple[int, NodeChunk]


def _number(place: _Place) -> int:
    return place[0]


class Parked:
    """See the module. A chunk is in it once."""

    def __init__(self) -> None:
        self._numbers = count()
        self._of: dict[str, deque[_Place]] = {}
        """By node; none is empty."""

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[NodeChunk]:
        return (chunk for _, chunk in self._in_order())

    def add(self, chunk: NodeChunk) -> None:
        """It comes after all others."""
        self._of.setdefault(chunk.node.name, deque()).append((next(self._numbers), chunk))

    def first(self, but: Collection[str] = ()) -> NodeChunk | None:
        """The first chunk; but: of no such node."""
        heads = [places[0] for node, places in self._of.items() if node not in but]
        return min(heads, key=_number)[1] if heads else None

    def pop(self, node: str) -> NodeChunk:
        """Take the first chunk of a node."""
        places = self._of[node]
        _, chunk = places.popleft()
        if not places:
            del self._of[node]
        return chunk

    def take(self) -> list[NodeChunk]:
        """Take all, in order."""
        chunks = list(self)
        self._of.clear()
        return chunks

    def take_if(self, is_taken: Callable[[NodeChunk], bool]) -> list[NodeChunk]:
        """Take those for which this holds, in order; the others stay where they are."""
        taken: list[_Place] = []
        for node, places in list(self._of.items()):
            others: deque[_Place] = deque()
            for place in places:
                if is_taken(place[1]):
                    taken.append(place)
                else:
                    others.append(place)
            if others:
                self._of[node] = others
            else:
                del self._of[node]
        return [chunk for _, chunk in sorted(taken, key=_number)]

    def _in_order(self) -> Iterator[_Place]:
        return merge(*self._of.values(), key=_number)
