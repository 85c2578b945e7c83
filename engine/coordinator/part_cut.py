"""Into which parts the groups of a synchronous Step are cut, while its other groups are generated.

    ordered    groups by their longest answer, then position; from their lengths alone
    arrival    groups as they come; a part that a record has is cut as it was

Owns: the cut. Does not own: which groups have ended (streamed_groups.py), nor what a part is for
(step_parts.py).

An ordered cut is the same whatever comes first: a group takes its place only once no group that
would stand before it can still come, since a group with a row that has not ended, and has
`watermark` tokens at least, will have a longer answer than that. A part never spans two waves of
admission (decision 0003): whether there is a second one, nobody knows before the first has ended.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple, Protocol

from engine.plan.planned_source import Streaming


class EndedGroup(NamedTuple):
    """A group that is generated. longest: tokens of its longest answer; tokens: of all of them.
    They compare in the order of the cut.
    """

    longest: int
    position: int
    slot: int
    tokens: int


class PartCut(Protocol):
    """One Step's cut after another."""

    def add(self, group: EndedGroup) -> None:
        """A group has ended."""
        ...

    def cut(self, watermark: int) -> list[list[EndedGroup]]:
        """The parts that are full by now, in order. watermark: the least tokens of a row that has
        not ended.
        """
        ...

    def close(self) -> list[list[EndedGroup]]:
        """All that is left of a wave of which every group has ended, as parts."""
        ...


class _Filling:
    """The part that groups are put into. tokens: of answers, that a part has at least."""

    def __init__(self, tokens: int) -> None:
        self._least = tokens
        self._groups: list[EndedGroup] = []
        self._tokens = 0

    def put(self, group: EndedGroup) -> list[list[EndedGroup]]:
        """Put a group in; the part, if that fills it."""
        self._groups.append(group)
        self._tokens += group.tokens
        return self.take() if self._tokens >= self._least else []

    def take(self) -> list[list[EndedGroup]]:
        """Take the part as it is, if it has a group."""
        groups, self._groups, self._tokens = self._groups, [], 0
        return [groups] if groups else []


class OrderedCut:
    """See the module."""

    def __init__(self, tokens: int) -> None:
        self._filling = _Filling(tokens)
        self._ended: list[EndedGroup] = []
        """A heap: those whose place is not known yet."""

    def add(self, group: EndedGroup) -> None:
        """As in PartCut."""
        heapq.heappush(self._ended, group)

    def cut(self, watermark: int) -> list[list[EndedGroup]]:
        """As in PartCut."""
        parts: list[list[EndedGroup]] = []
        while self._ended and self._ended[0].longest <= watermark:
            parts += self._filling.put(heapq.heappop(self._ended))
        return parts

    def close(self) -> list[list[EndedGroup]]:
        """As in PartCut."""
        parts: list[list[EndedGroup]] = []
        while self._ended:
            parts += self._filling.put(heapq.heappop(self._ended))
        return parts + self._filling.take()


class ArrivalCut:
    """See the module. recorded: positions of the parts that the Step was cut into before it was
    repeated.
    """

    def __init__(self, tokens: int, recorded: Iterable[Iterable[int]] = ()) -> None:
        self._filling = _Filling(tokens)
        self._recorded = deque(frozenset(positions) for positions in recorded)
        self._waiting: dict[int, EndedGroup] = {}
        """By position, the groups of recorded parts that come later."""

    def add(self, group: EndedGroup) -> None:
        """As in PartCut."""
        self._waiting[group.position] = group

    def cut(self, watermark: int) -> list[list[EndedGroup]]:
        """As in PartCut; whatever has not ended, it changes nothing."""
        del watermark
        parts = self._take_recorded()
        if not self._recorded:
            for group in list(self._waiting.values()):
                parts += self._filling.put(group)
            self._waiting.clear()
        return parts

    def close(self) -> list[list[EndedGroup]]:
        """As in PartCut. Of a recorded part that has a group which does not come any more, the
        others are one.
        """
        parts = self.cut(0)
        while self._waiting and self._recorded:
            groups = self._take_waiting(self._recorded.popleft() & self._waiting.keys())
            if groups:
                parts.append(groups)
            parts += self.cut(0)
        return parts + self._filling.take()

    def _take_recorded(self) -> list[list[EndedGroup]]:
        parts: list[list[EndedGroup]] = []
        while self._recorded and self._recorded[0] <= self._waiting.keys():
            parts.append(self._take_waiting(self._recorded.popleft()))
        return parts

    def _take_waiting(self, positions: Set[int]) -> list[EndedGroup]:
        return [self._waiting.pop(position) for position in sorted(positions)]


def make_cut(
    stream: Streaming, tokens: int, recorded: Mapping[int, Iterable[Iterable[int]]], step: int
) -> PartCut:
    """The cut of a Step that is streamed so. recorded: as in Settings, of one source."""
    if stream == "ordered":
        return OrderedCut(tokens)
    return ArrivalCut(tokens, recorded.get(step, ()))
