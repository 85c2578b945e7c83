"""On which of several hosts each Worker is that no pin puts on one: by one rule, in one pass.

Owns: the rule. Does not own: which Workers there are (place.py), the hosts of spare ones
(spare.py), which GPUs they have (devices.py). It searches nothing, and whether memory is enough, a
check says.

Train nodes come first, then the others that compute with a Model, then rewards and columns. Workers
that have to be on one host go together: those that take turns, tensor ranks of one share, writers
and readers of device columns; and all ranks of a train node where a host has room for them, else
they fill host by host. Each goes, of the hosts that have room, to the one with fewest Workers of
the same node, then to the least full one, then to the first. All Workers of a node are on hosts of
one kind, with GPUs if there are any.

Where a pin names the host of some of these, the others are on the first host.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dataflow.device import declared
from engine.plan.cluster import Host
from engine.plan.draft import Draft
from engine.plan.passes.devices import inner_ranks
from engine.plan.plan import PlannedNode
from engine.plan.worker_index import turns_by_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Workers that are on one host. devices: that they need together, or Workers that compute on
    cores; 0 for rewards and columns.
    """

    workers: tuple[str, ...]
    devices: int


def spread(draft: Draft) -> dict[str, str]:
    """The host of each Worker; of spare ones that no pin names, the first. draft: with Workers."""
    groups, occupied = _HostGroups(draft), _Occupied(draft)
    found: dict[str, str] = {}
    first = occupied.hosts[0].name
    for worker in (w for w in draft.workers if groups.pinned(w)):
        found[worker] = draft.placing.hosts.get(worker, first)
    present = [w for w in found if w not in draft.spare]
    for group in dict.fromkeys(groups.of(worker) for worker in present):
        occupied.take(found[group.workers[0]], group)
    for node in sorted(draft.nodes, key=lambda n: (n.work != "train", not n.traits.computes)):
        free = [w for w in node.workers if w not in found and w not in draft.spare]
        found |= _placed(occupied, groups, node, free)
    return found | {w: first for w in draft.workers if w not in found}


def spread_note(hosts: Mapping[str, str], pinned: Collection[str]) -> Iterator[str]:
    """In words, where Workers that no pin names are on several hosts."""
    free = sum(worker not in pinned for worker in hosts)
    if len(set(hosts.values())) > 1 and free:
        workers = f"{free} Worker{'s' * (free != 1)} without a pin"
        rule = "ranks of a train node together, replicas round the hosts with free devices"
        yield f"{workers}, spread over the hosts: {rule}"


def _placed(
    occupied: _Occupied, groups: _HostGroups, node: PlannedNode, free: Sequence[str]
) -> dict[str, str]:
    """The hosts of these Workers of a node, and of those that take turns with them."""
    wanted = list(dict.fromkeys(groups.of(worker) for worker in free))
    if node.work == "train" and wanted:
        whole = groups.joined(wanted)
        wanted = [whole] if occupied.fits(whole) else groups.shares(node, free)
        hosts = occupied.filled(wanted)
    else:
        hosts = occupied.round(wanted)
    pairs = zip(wanted, hosts, strict=True)
    return {worker: host for group, host in pairs for worker in group.workers}


class _HostGroups:
    """Which Workers go together, and how many devices they need."""

    def __init__(self, draft: Draft) -> None:
        self._ranks, self._turns = inner_ranks(draft), turns_by_worker(draft.turns)
        bound = [*draft.turns, *_beside_device_columns(draft)]
        trains = [n.workers for n in draft.nodes if n.work == "train"]
        linked = _linked(draft.workers, bound)
        self._groups = {worker: group for group in linked for worker in group}
        named = draft.placing.hosts.keys()
        linked = _linked(draft.workers, [*bound, *trains])
        self._pinned = {w for group in linked if not named.isdisjoint(group) for w in group}

    def pinned(self, worker: str) -> bool:
        """Whether a pin names the host of it, or of another that goes together with it."""
        return worker in self._pinned

    def of(self, worker: str) -> HostGroup:
        """The Worker, with those that have to be on its host."""
        group = self._groups[worker]
        return HostGroup(workers=group, devices=self.devices(group))

    def joined(self, groups: Iterable[HostGroup]) -> HostGroup:
        """All of them."""
        workers = tuple(dict.fromkeys(w for group in groups for w in group.workers))
        return HostGroup(workers=workers, devices=self.devices(workers))

    def shares(self, node: PlannedNode, free: Sequence[str]) -> list[HostGroup]:
        """The ranks of a train node, those of one share together."""
        known = frozenset(free)
        some = ([self.of(w) for w in share if w in known] for share in node.shares)
        return [self.joined(share) for share in some if share]

    def devices(self, workers: Iterable[str]) -> int:
        """That these need; Workers that take turns have theirs together."""
        most: dict[tuple[str, ...], int] = {}
        for worker in workers:
            group = self._turns.get(worker, (worker,))
            most[group] = max(most.get(group, 0), self._ranks.get(worker, 0))
        return sum(most.values())


def _beside_device_columns(draft: Draft) -> Iterator[tuple[str, ...]]:
    """Workers that make device columns, with those that read them, and the recorder."""
    schemas = {n.name: declared(n.schemas) for n in draft.graph.nodes}
    for node in draft.nodes:
        for fetch in (f for i in node.inputs for f in i.fetches):
            if not schemas[fetch.producer].keys().isdisjoint(fetch.columns):
                made = draft.node(fetch.producer)
                recorder = (draft.recorder,) if made.region == "stream" else ()
                yield (*made.workers, *node.workers, *recorder)


def _linked(workers: Sequence[str], groups: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """The Workers, those together that share a group, directly or not."""
    found: dict[str, list[str]] = {worker: [worker] for worker in workers}
    for group in groups:
        known = [worker for worker in group if worker in found]
        for other in known[1:]:
            first = found[known[0]]
            if found[other] is not first:
                first += found[other]
                found |= dict.fromkeys(found[other], first)
    return [tuple(group) for worker, group in found.items() if group[0] == worker]


class _Occupied:
    """How full the hosts are while Workers are put on them."""

    def __init__(self, draft: Draft) -> None:
        known = draft.cluster.hosts
        self.hosts: Sequence[Host] = [h for h in known if not h.refused] or known[:1]
        threads = draft.threads or 1
        self._most = {h.name: len(h.gpus) or max(1, h.cores // threads) for h in known}
        self._taken: Counter[str] = Counter()
        self._columns: Counter[str] = Counter()
        """Workers that need no device."""

    def take(self, host: str, group: HostGroup) -> str:
        """Put a group on a host; returns the host."""
        self._taken[host] += group.devices
        self._columns[host] += not group.devices
        return host

    def fits(self, group: HostGroup) -> bool:
        """Whether a host has room for it, of those that it would be on."""
        return any(self._room(host) >= group.devices for host in self._alike([group]))

    def filled(self, groups: Sequence[HostGroup]) -> list[str]:
        """A host for each, as few as have room: the one before as long as it has some."""
        hosts = self._alike(groups)
        found: list[Host] = []
        for group in groups:
            roomy = [host for host in hosts if self._room(host) >= group.devices]
            if not (found and found[-1] in roomy):
                found.append(min(roomy or hosts, key=self._full))
            else:
                found.append(found[-1])
            self.take(found[-1].name, group)
        return [host.name for host in found]

    def round(self, groups: Sequence[HostGroup]) -> list[str]:
        """A host for each, by the rule. groups: of one node."""
        computing = any(group.devices for group in groups)
        hosts, full = (self._alike(groups), self._full) if computing else (self.hosts, self._beside)
        found = list[str]()

        def waiting() -> list[tuple[int, float, int]]:
            """A heap of the hosts: Workers of this node, how full, place in the cluster."""
            there = Counter(found)
            return sorted((there[host.name], full(host), i) for i, host in enumerate(hosts))

        heap = waiting()
        for group in groups:
            while group.devices and heap and self._room(hosts[heap[0][2]]) < group.devices:
                heapq.heappop(heap)
            heap = heap or waiting()  # none has room: they share devices
            count, _, place = heap[0]
            found.append(self.take(hosts[place].name, group))
            heapq.heapreplace(heap, (count + 1, full(hosts[place]), place))
        return found

    def _alike(self, groups: Sequence[HostGroup]) -> list[Host]:
        """The hosts of one kind, for groups of one node: with GPUs before without, with room for
        all before others; then the kind with the least full host.
        """
        of_kind: dict[tuple[bool, str], list[Host]] = {}
        for host in self.hosts:
            of_kind.setdefault((not host.gpus, host.kind if host.gpus else ""), []).append(host)
        width = max((group.devices for group in groups), default=0)

        def order(kind: tuple[bool, str]) -> tuple[bool, bool, float]:
            free = sum(max(0, self._room(host) // max(1, width)) for host in of_kind[kind])
            return kind[0], free < len(groups), min(map(self._full, of_kind[kind]))

        return of_kind[min(of_kind, key=order)]

    def _room(self, host: Host) -> int:
        """Devices that are free."""
        return self._most[host.name] - self._taken[host.name]

    def _full(self, host: Host) -> float:
        """The part of its devices that is taken."""
        return self._taken[host.name] / self._most[host.name]

    def _beside(self, host: Host) -> float:
        """How many Workers it has that need no device."""
        return self._columns[host.name]
