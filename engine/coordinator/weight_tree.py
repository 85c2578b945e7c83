"""From whom each reader loads a version: a tree over hosts.

    a reader's host      waits for                              loads from
    has a source         nothing                                that source, by shared memory
    has none, and its    a source anywhere that has room        that source, over the network
    first reader asks
    has none, and one    that one to have it, or to come to     it
    is loading it        nothing

Owns: who has a version, the choice of a source, how many load from each. Does not own: who waits,
nor what is told (versions.py); which ranks of a writer offer (ranks.py).

A source is a rank of the writer that offered, or a reader's Worker that keeps what it has fetched
and verified. Over the network at most `FAN_OUT` load from one at a time: more would share its link
and be later all of them, while who has it can pass it on. On one host nothing is gained by a tree:
all readers map the same slab, which nobody copies, so they load from the source directly, however
many they are.
"""

from __future__ import annotations

from collections.abc import Callable
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


class WeightTree:
    """Of one version of one Model. host_of: of a Worker; empty where all are on one."""

    def __init__(self, host_of: Callable[[str], str]) -> None:
        self._host_of = host_of
        self.sources: dict[str, WeightSource] = {}
        """By Worker, in the order in which they came."""
        self._far: dict[int, str] = {}
        """Load over the network, by its id -> its source's Worker."""
        self._firsts: dict[str, int] = {}
        """Host -> the load of its first reader, which will be a source there."""

    def add(self, source: WeightSource) -> None:
        """Note that a Worker has it. One source a Worker: a further block of it is not used."""
        self.sources.setdefault(source.worker, source)

    def drop(self, worker: str) -> WeightSource | None:
        """Load no more from a Worker that is gone, or could not be reached; returns what it had."""
        return self.sources.pop(worker, None)

    def choose(self, load: int, reader: str, *, others_wait: bool) -> SourceChoice | None:
        """The source for a load, by its id, of this Worker; None while it has to wait. others_wait:
        whether further readers have no source yet.
        """
        host = self._host_of(reader)
        for source in self.sources.values():
            if self._host_of(source.worker) == host:
                return SourceChoice(source=source)
        if host in self._firsts:
            return None
        source = self._idlest()
        if source is None:
            return None
        self._far[load] = source.worker
        if others_wait:
            self._firsts[host] = load
        return SourceChoice(source=source, keeps=others_wait)

    def _idlest(self) -> WeightSource | None:
        """A source that has room, of those the one from which the fewest load."""
        loads = dict.fromkeys(self.sources, 0)
        for worker in self._far.values():
            if worker in loads:
                loads[worker] += 1
        with_room = [worker for worker, count in loads.items() if count < FAN_OUT]
        if not with_room:
            return None
        return self.sources[min(with_room, key=lambda worker: loads[worker])]

    def end(self, load: int) -> None:
        """A load has its pieces, or comes to nothing: it needs its source no more."""
        self._far.pop(load, None)
        for host in [host for host, first in self._firsts.items() if first == load]:
            del self._firsts[host]
