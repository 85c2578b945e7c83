"""From whom each reader loads a version: a tree over hosts, with one way into each region.

    a reader                                        waits for                      loads from
    whose host has a source                         nothing                        that source, by
                                                                                   shared memory
    one of whose host is loading it                 that one to have it, or to     it
                                                    come to nothing
    whose region has a source                       one of those to have room      that, over the
                                                                                   network
    one of whose region is taking it across         as for one of its host         as above
    whose region has none, and who asks first       a source anywhere to have      that, across
                                                    room

Owns: who has a version, the choice of a source, how many load from each. Does not own: who waits,
nor what is told (versions.py); which ranks of a writer offer (ranks.py); who is in one region
(engine/plan/host_regions.py).

A source is a rank of the writer that offered, or a reader's Worker that keeps what it has fetched
and verified. Over the network at most `FAN_OUT` load from one at a time: more would share its link
and be later all of them, while who has it can pass it on. On one host nothing is gained by a tree:
all readers map the same slab, which nobody copies, so they load from the source directly, however
many they are.

Between regions the link is slow and shared by all. So one reader of a region takes a version across
and the others wait for it, also where a second one could have it sooner; if it is lost, the next
one takes it. What goes across takes no room of what goes to hosts nearby: a slow link takes little
of a source's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.plan.run_limits import FAN_OUT


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """A Worker that has a version, in a block."""

    worker: str
    block: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceChoice:
    """Where a reader loads from. keeps: it becomes a source itself."""

    source: WeightSource
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class _FarLoad:
    """A load from another host. source: its source's Worker. crosses: from another region."""

    source: str
    crosses: bool


def _one_region(worker: str) -> str:
    del worker
    return ""


class WeightTree:
    """Of one version of one Model. host_of, region_of: of a Worker; empty where all are on one, or
    in one.
    """

    def __init__(
        self, host_of: Callable[[str], str], region_of: Callable[[str], str] = _one_region
    ) -> None:
        self._host_of, self._region_of = host_of, region_of
        self.sources: dict[str, WeightSource] = {}
        """By Worker, in the order in which they came."""
        self._near: dict[str, list[str]] = {}
        """Region -> the sources in it."""
        self._far: dict[int, _FarLoad] = {}
        """Loads over the network, by id."""
        self._firsts: dict[str, int] = {}
        """Host -> the load of its first reader, which will be a source there."""
        self._crossings: dict[str, int] = {}
        """Region -> the load that takes the version into it."""

    def add(self, source: WeightSource) -> None:
        """Note that a Worker has it. One source a Worker: a further block of it is not used."""
        if source.worker not in self.sources:
            self.sources[source.worker] = source
            self._near.setdefault(self._region_of(source.worker), []).append(source.worker)

    def drop(self, worker: str) -> WeightSource | None:
        """Load no more from a Worker that is gone, or could not be reached; returns what it had."""
        if worker in self.sources:
            self._near[self._region_of(worker)].remove(worker)
        return self.sources.pop(worker, None)

    def crosses(self, reader: str) -> bool:
        """Whether a reader's region has no source yet: who takes it across takes longest."""
        return not self._near.get(self._region_of(reader))

    def choose(self, load: int, reader: str, *, others_wait: bool) -> SourceChoice | None:
        """The source for a load, by its id, of this Worker; None while it has to wait. others_wait:
        whether further readers have no source yet.
        """
        host, region = self._host_of(reader), self._region_of(reader)
        for source in self.sources.values():
            if self._host_of(source.worker) == host:
                return SourceChoice(source=source)
        if host in self._firsts:
            return None
        near = self._near.get(region)
        if not near and region in self._crossings:
            return None
        source = self._idlest(near or self.sources, crosses=not near)
        if source is None:
            return None
        self._far[load] = _FarLoad(source.worker, crosses=not near)
        if not near:
            self._crossings[region] = load
        if others_wait:
            self._firsts[host] = load
        return SourceChoice(source=source, keeps=others_wait)

    def _idlest(self, workers: Iterable[str], *, crosses: bool) -> WeightSource | None:
        """Of these sources that have room, the one from which the fewest load, of those that stay
        in its region, or of those that leave it.
        """
        loads = Counter(far.source for far in self._far.values() if far.crosses == crosses)
        with_room = [worker for worker in workers if loads[worker] < FAN_OUT]
        if not with_room:
            return None
        return self.sources[min(with_room, key=lambda worker: loads[worker])]

    def end(self, load: int) -> None:
        """A load has its pieces, or comes to nothing: it needs its source no more."""
        self._far.pop(load, None)
        for host in [host for host, first in self._firsts.items() if first == load]:
            del self._firsts[host]
        for region in [region for region, first in self._crossings.items() if first == load]:
            del self._crossings[region]
