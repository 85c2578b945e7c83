"""On which of several hosts each Worker is that no pin puts on one: by one rule, in one pass.

Owns: the rule. Does not own: which Workers there are (place.py), the hosts of spare ones
(spare.py), which GPUs they have (devices.py). It searches nothing, and whether memory is enough, a
check says.

Train nodes come first, then the others that compute with a Model, then rewards and columns. Workers
that have to be on one host go together: those that take turns, tensor ranks of one share or
replica, writers and readers of device columns; and all ranks of a train node where a host has room
for them, else they fill host by host. Each goes, of the hosts that have room, to the one with
fewest Workers of the same node, then to the least full one, then to the first. All Workers of a
node are on hosts of one kind, with GPUs if there are any.

Where a pin names the host of some of these, the others are on the first host.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dataflow.device import declared_device_columns
from engine.plan.cluster import Host
from engine.plan.draft import Draft
from engine.plan.passes.devices import count_inner_ranks
from engine.plan.plan import PlannedNode
from engine.plan.planned_input import list_fetches

HostKind = tuple[bool, str]
"""Whether a host has no GPUs, and their kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Workers that are on one host."""

    workers: tuple[str, ...]
    devices: int
    """The devices that they need together, or how many of them compute on cores; 0 for rewards and
    columns.
    """


def spread_workers(draft: Draft) -> dict[str, str]:
    """Choose the host of each Worker; of spare ones that no pin names, the first. draft: with
    Workers.
    """
    groups = _HostGroups(draft)
    occupancy = _Occupancy(draft)
    first = occupancy.hosts[0].name
    hosts: dict[str, str] = {}
    for worker in draft.workers:
        if groups.is_pinned(worker):
            hosts[worker] = draft.placing.hosts.get(worker, first)
    present = [worker for worker in hosts if worker not in draft.spare]
    for group in dict.fromkeys(groups.of(worker) for worker in present):
        occupancy.take(hosts[group.workers[0]], group)
    # Trainers first, then other Models, then columns; each of these in running order.
    nodes = sorted(draft.nodes, key=lambda n: (n.work != "train", not n.traits.computes))
    for node in nodes:
        free = [w for w in node.workers if w not in hosts and w not in draft.spare]
        hosts |= _spread_node(occupancy, groups, node, free)
    remaining = [worker for worker in draft.workers if worker not in hosts]
    return hosts | dict.fromkeys(remaining, first)


def describe_spread(hosts: Mapping[str, str], pinned: Collection[str]) -> Iterator[str]:
    """Say by which rule Workers are spread, where those that no pin names are on several hosts."""
    free = sum(worker not in pinned for worker in hosts)
    if len(set(hosts.values())) > 1 and free:
        workers = f"{free} Worker{'s' * (free != 1)} without a pin"
        rule = "ranks of a train node together, replicas round the hosts with free devices"
        yield f"{workers}, spread over the hosts: {rule}"


def _spread_node(
    occupancy: _Occupancy, groups: _HostGroups, node: PlannedNode, free: Sequence[str]
) -> dict[str, str]:
    """The hosts of these Workers of a node, and of those that take turns with them."""
    node_groups = list(dict.fromkeys(groups.of(worker) for worker in free))
    if node.work == "train" and node_groups:
        all_ranks = groups.join(node_groups)
        if occupancy.fits(all_ranks):
            node_groups = [all_ranks]
        else:
            node_groups = groups.join_shares(node, free)
        hosts = occupancy.fill(node_groups)
    else:
        hosts = occupancy.spread(node_groups)
    host_by_worker: dict[str, str] = {}
    for group, host in zip(node_groups, hosts, strict=True):
        host_by_worker |= dict.fromkeys(group.workers, host)
    return host_by_worker


class _HostGroups:
    """Which Workers go together, and how many devices they need."""

    def __init__(self, draft: Draft) -> None:
        self._ranks = count_inner_ranks(draft)
        self._turns = draft.turns_by_worker
        bound = [*draft.turns, *_find_device_column_groups(draft), *_find_replicas(draft)]
        self._groups: dict[str, tuple[str, ...]] = {}
        for group in _link_groups(draft.workers, bound):
            self._groups |= dict.fromkeys(group, group)
        # A pin of one rank settles where all ranks of its train node are.
        trains = [node.workers for node in draft.nodes if node.work == "train"]
        pinned_names = draft.placing.hosts.keys()
        self._pinned: set[str] = set()
        for group in _link_groups(draft.workers, [*bound, *trains]):
            if not pinned_names.isdisjoint(group):
                self._pinned.update(group)

    def is_pinned(self, worker: str) -> bool:
        """Whether a pin names the host of it, or of another that goes together with it."""
        return worker in self._pinned

    def of(self, worker: str) -> HostGroup:
        """The Worker, with those that have to be on its host."""
        group = self._groups[worker]
        return HostGroup(workers=group, devices=self.count_devices(group))

    def join(self, groups: Iterable[HostGroup]) -> HostGroup:
        """All of them as one."""
        workers: dict[str, None] = {}
        for group in groups:
            workers |= dict.fromkeys(group.workers)
        return HostGroup(workers=tuple(workers), devices=self.count_devices(workers))

    def join_shares(self, node: PlannedNode, free: Sequence[str]) -> list[HostGroup]:
        """The ranks of a train node, those of one share together."""
        free_workers = frozenset(free)
        joined_groups: list[HostGroup] = []
        for share in node.shares:
            groups = [self.of(worker) for worker in share if worker in free_workers]
            if groups:
                joined_groups.append(self.join(groups))
        return joined_groups

    def count_devices(self, workers: Iterable[str]) -> int:
        """Count the devices that these need; Workers that take turns have theirs together."""
        most: dict[tuple[str, ...], int] = {}
        for worker in workers:
            group = self._turns.get(worker, (worker,))
            most[group] = max(most.get(group, 0), self._ranks.get(worker, 0))
        return sum(most.values())


def _find_replicas(draft: Draft) -> Iterator[tuple[str, ...]]:
    """The Workers of each replica that has several."""
    for node in draft.nodes:
        if node.work != "train" and node.ranks > 1:
            yield from node.shares


def _find_device_column_groups(draft: Draft) -> Iterator[tuple[str, ...]]:
    """Workers that make device columns, with those that read them, and the recorder."""
    device_columns = {
        node.name: declared_device_columns(node.schemas).keys() for node in draft.graph.nodes
    }
    for node in draft.nodes:
        for fetch in list_fetches(node.inputs):
            if device_columns[fetch.producer].isdisjoint(fetch.columns):
                continue
            producer = draft.node(fetch.producer)
            workers = (*producer.workers, *node.workers)
            if producer.region == "stream":
                workers += (draft.recorder,)  # it checkpoints rows that wait
            yield workers


def _link_groups(workers: Sequence[str], groups: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """The Workers, those together that share a group, directly or not."""
    members: dict[str, list[str]] = {worker: [worker] for worker in workers}
    for group in groups:
        known = [worker for worker in group if worker in members]
        for other in known[1:]:
            first = members[known[0]]
            if members[other] is not first:
                first += members[other]
                members |= dict.fromkeys(members[other], first)
    # A group stands once, where its first Worker does.
    return [tuple(group) for worker, group in members.items() if group[0] == worker]


def _kind_of(host: Host) -> HostKind:
    return not host.gpus, host.kind if host.gpus else ""


class _Occupancy:
    """How full the hosts are while Workers are put on them."""

    def __init__(self, draft: Draft) -> None:
        known = draft.cluster.hosts
        self.hosts: Sequence[Host] = [h for h in known if not h.refused] or known[:1]
        threads = draft.threads or 1
        self._most: dict[str, int] = {}
        """The GPUs of each host, or as many kernels as its cores are enough for."""
        for host in known:
            self._most[host.name] = len(host.gpus) or max(1, host.cores // threads)
        self._taken: Counter[str] = Counter()
        self._hosts_by_kind: dict[HostKind, list[Host]] = {}
        for host in self.hosts:
            self._hosts_by_kind.setdefault(_kind_of(host), []).append(host)
        self._alike: dict[HostKind, Counter[tuple[int, int]]] = {}
        """Of each kind of host, how many have so many devices taken of so many."""
        for kind, hosts in self._hosts_by_kind.items():
            self._alike[kind] = Counter((0, self._most[host.name]) for host in hosts)
        self._kinds = {host.name: _kind_of(host) for host in self.hosts}
        self._columns: Counter[str] = Counter()
        """Workers that need no device."""

    def take(self, host: str, group: HostGroup) -> str:
        """Put a group on a host; returns the host."""
        if host in self._kinds:
            alike, most = self._alike[self._kinds[host]], self._most[host]
            alike[self._taken[host], most] -= 1
            alike[self._taken[host] + group.devices, most] += 1
        self._taken[host] += group.devices
        self._columns[host] += not group.devices
        return host

    def fits(self, group: HostGroup) -> bool:
        """Whether a host has room for it, of those that it would be on."""
        hosts = self._choose_kind([group])
        return any(self._free(host) >= group.devices for host in hosts)

    def fill(self, groups: Sequence[HostGroup]) -> list[str]:
        """Choose a host for each, as few as have room: the one before as long as it has some."""
        hosts = self._choose_kind(groups)
        chosen: list[Host] = []
        for group in groups:
            roomy = [host for host in hosts if self._free(host) >= group.devices]
            if chosen and chosen[-1] in roomy:
                chosen.append(chosen[-1])
            else:
                chosen.append(min(roomy or hosts, key=self._fullness))
            self.take(chosen[-1].name, group)
        return [host.name for host in chosen]

    def spread(self, groups: Sequence[HostGroup]) -> list[str]:
        """Choose a host for each, by the rule. groups: of one node."""
        if any(group.devices for group in groups):
            hosts, fullness = self._choose_kind(groups), self._fullness
        else:
            hosts, fullness = self.hosts, self._count_columns
        chosen: list[str] = []

        def make_heap() -> list[tuple[int, float, int]]:
            """(Workers of this node, how full, place among `hosts`) of each host."""
            counts = Counter(chosen)
            rows = ((counts[host.name], fullness(host), i) for i, host in enumerate(hosts))
            return sorted(rows)

        heap = make_heap()
        for group in groups:
            # A host without room is left out until no host has any; rooms only shrink.
            while group.devices and heap and self._free(hosts[heap[0][2]]) < group.devices:
                heapq.heappop(heap)
            heap = heap or make_heap()  # none has room: they share devices
            count, _, place = heap[0]
            host = hosts[place]
            chosen.append(self.take(host.name, group))
            heapq.heapreplace(heap, (count + 1, fullness(host), place))
        return chosen

    def _choose_kind(self, groups: Sequence[HostGroup]) -> list[Host]:
        """The hosts of one kind, for groups of one node: with GPUs before without, with room for
        all before others; then the kind with the least full host.
        """
        width = max((group.devices for group in groups), default=0)

        def order(kind: HostKind) -> tuple[bool, bool, float]:
            free = 0
            fullness: list[float] = []
            for (taken, most), number in self._alike[kind].items():
                if number:
                    free += number * max(0, (most - taken) // max(1, width))
                    fullness.append(taken / most)
            return kind[0], free < len(groups), min(fullness)

        return self._hosts_by_kind[min(self._hosts_by_kind, key=order)]

    def _free(self, host: Host) -> int:
        """Devices that are free."""
        return self._most[host.name] - self._taken[host.name]

    def _fullness(self, host: Host) -> float:
        """The part of its devices that is taken."""
        return self._taken[host.name] / self._most[host.name]

    def _count_columns(self, host: Host) -> float:
        """How many Workers it has that need no device."""
        return self._columns[host.name]
