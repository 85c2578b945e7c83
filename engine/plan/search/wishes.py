"""A placement as wishes, which the rule of placement carries out.

Owns: names of Workers, the hosts of groups, and which Workers take turns. Does not own: what
follows from wishes (engine/plan/passes/place.py).

A group's Workers are those of the rule as far as it has a name for them: `main` is where training
is without a lag, `train` with one; columns and evaluations follow these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from dataflow.kernel import Layout
from engine.plan.cluster import Cluster
from engine.plan.passes.place import MAIN, ROLLOUT, TRAIN
from engine.plan.placement import Placing
from engine.plan.search.asked_places import Workers, join_together
from engine.plan.search.problem import DeviceGroup, Placement, PricedLayout, Problem


def make_wishes(
    placing: Placing,
    problem: Problem,
    placement: Placement,
    cluster: Cluster,
    hosts: Sequence[Sequence[str]],
) -> Placing | None:
    """Make the wishes of a placement. hosts: of each pool, by name. None where the shares of a
    group do not fit into hosts, or its Workers cannot take turns.
    """
    writer = _WishWriter(problem, placement)
    for name, group in writer.name_groups():
        if not writer.write_group(name, group):
            return None
    host_by_worker: dict[str, str] = {}
    if cluster.hosts:
        rooms = _Rooms(cluster, hosts)
        for group in sorted(writer.shares, key=lambda group: -group.devices):
            for share in writer.shares[group]:
                host = rooms.take(group.pool, share.devices)
                if not host:
                    return None
                host_by_worker |= dict.fromkeys(share.workers, host)
    return replace(
        placing,
        search="off",
        pin={**placing.pin, **writer.pin},
        together=join_together(placing, list(writer.pin)),
        tensor={**placing.tensor, **writer.tensor},
        microbatch={**placing.microbatch, **writer.microbatch},
        slots={**placing.slots, **writer.slots},
        turns=tuple(writer.turns),
        sharded=tuple(writer.sharded),
        hosts=host_by_worker,
    )


@dataclass(frozen=True, slots=True)
class _Share:
    """Workers that have to be on one host, and their devices there."""

    workers: tuple[str, ...]
    devices: int


class _WishWriter:
    """Writes wishes group by group."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._problem, self._placement = problem, placement
        self.pin: dict[str, tuple[str, ...]] = {}
        self.tensor: dict[str, int] = {}
        self.turns: list[tuple[str, ...]] = []
        self.microbatch: dict[str, int] = {}
        self.slots: dict[str, int] = {}
        self.sharded: list[str] = []
        self.shares: dict[DeviceGroup, list[_Share]] = {}

    def name_groups(self) -> Iterator[tuple[str, DeviceGroup]]:
        """Yield each group with the name of its Workers."""
        nodes = self._problem.nodes
        names = set(chain.from_iterable(node.pinned for node in nodes))
        trained = TRAIN if self._problem.lag else MAIN
        for group in sorted(self._placement.groups, key=lambda group: -group.members[-1]):
            members = [nodes[member] for member in group.members]
            first = members[0].name
            candidates = [first, f"{first}-group"]
            if any(node.trains for node in members):
                candidates = [trained, members[-1].name, *candidates]
            elif self._problem.lag and not members[0].parents:
                candidates = [ROLLOUT, *candidates]
            name = next(name for name in candidates if name not in names)
            names.add(name)
            yield name, group

    def write_group(self, name: str, group: DeviceGroup) -> bool:
        """Write the wishes of a group; False where its Workers cannot take turns."""
        nodes, layouts = self._problem.nodes, self._placement.layouts
        plain = [m for m in group.members if not nodes[m].is_alone]
        alone = [m for m in group.members if nodes[m].is_alone]
        if plain and any(layouts[member].layout.inner > 1 for member in alone):
            return False
        workers = self._pin_members(plain, name)
        engines: Workers = ()
        if alone:
            engine_name = f"{nodes[alone[0]].name}-engine" if plain else name
            engines = self._pin_members(alone, engine_name)
        width = max((layouts[member].layout.inner for member in alone), default=1)
        shares: list[tuple[str, ...]] = [(worker,) for worker in workers]
        if engines and workers:
            self.turns += list(zip(engines, workers, strict=False))
        for index, worker in enumerate(engines):
            if index < len(shares):
                shares[index] = (*shares[index], worker)
            else:
                shares.append((worker,))
        self.shares[group] = list(self._join_shares(shares, plain, width))
        return True

    def _pin_members(self, members: Sequence[int], name: str) -> Workers:
        """Pin nodes that use the same Workers; returns all of these."""
        most: Workers = ()
        pinned = max((self._problem.nodes[member].pinned for member in members), key=len)
        for member in members:
            node, priced = self._problem.nodes[member], self._placement.layouts[member]
            layout = priced.layout
            count = layout.replicas * layout.data * layout.tensor
            workers = _name_workers(name, pinned, count)
            self.pin[node.name] = workers
            tensor = layout.tensor * layout.inner
            if tensor > 1:
                self.tensor[node.name] = tensor
            if layout.tokens != Layout().tokens:
                self.microbatch[node.name] = layout.tokens
            if layout.slots != Layout().slots:
                self.slots[node.name] = layout.slots
            if layout.shard:
                self.sharded.append(node.name)
            most = max(most, workers, key=len)
        return most

    def _join_shares(
        self, workers: Sequence[tuple[str, ...]], members: Sequence[int], width: int
    ) -> Iterator[_Share]:
        """Workers that have to be on one host: those of a share of the widest node."""
        widest = max((_tensor_of(self._placement.layouts[m]) for m in members), default=1)
        for first in range(0, len(workers), widest):
            names: list[str] = []
            for together in workers[first : first + widest]:
                names += together
            count = min(widest, len(workers) - first)
            yield _Share(tuple(names), count * width)


def _name_workers(name: str, pinned: Workers, count: int) -> Workers:
    """So many Workers of a group: those that it was asked to have, then others by its name."""
    if not pinned:
        pinned = (name,)
    more = (f"{name}-{index}" for index in range(len(pinned), count))
    return (*pinned, *more)[:count]


def _tensor_of(priced: PricedLayout) -> int:
    return priced.layout.tensor


class _Rooms:
    """Devices of hosts that nobody has."""

    def __init__(self, cluster: Cluster, hosts: Sequence[Sequence[str]]) -> None:
        self._free: list[dict[str, int]] = []
        for names in hosts:
            free: Mapping[str, int] = {
                name: len(cluster.host(name).gpus) or cluster.host(name).cores for name in names
            }
            self._free.append(dict(free))

    def take(self, pool: int, devices: int) -> str:
        """Take devices of a host, the first that has room; its name, empty without one."""
        for name, free in self._free[pool].items():
            if free >= devices:
                self._free[pool][name] -= devices
                return name
        return ""
