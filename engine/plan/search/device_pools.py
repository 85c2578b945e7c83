"""The devices of a cluster, by kind and region, as pools of the search.

Owns: the pools, their hosts, and the ways between them. Does not own: what a cluster has
(engine/plan/cluster.py), rates (engine/plan/rates.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.plan.cluster import Host
from engine.plan.cost.devices import CPU, Link
from engine.plan.draft import Draft
from engine.plan.rates import Rates
from engine.plan.search.problem import DevicePool


class DevicePools:
    """The devices of a cluster, by kind."""

    def __init__(self, draft: Draft) -> None:
        cluster = draft.cluster
        self._draft = draft
        self.hosts: list[list[Host]] = []
        usable = [host for host in cluster.hosts if not host.refused]
        if not cluster.hosts:
            here = Host(
                name="",
                cores=cluster.cores,
                memory=cluster.memory,
                gpus=cluster.gpus,
                kind=cluster.kind,
            )
            usable = [here]
        with_gpus = [host for host in usable if host.gpus]
        by_kind: dict[tuple[str, str], list[Host]] = {}
        for host in with_gpus or usable:
            kind = host.kind if host.gpus else CPU
            by_kind.setdefault((kind, host.region), []).append(host)
        self.hosts = list(by_kind.values())
        self.pools = tuple(map(_make_pool, self.hosts))
        self._links: dict[tuple[int, int], Link] = {}

    @property
    def host_names(self) -> tuple[tuple[str, ...], ...]:
        """The hosts of each pool."""
        return tuple(map(_list_names, self.hosts))

    def why_none(self) -> str:
        """Why there is nothing to choose; empty if there is."""
        rates = Rates(self._draft.profile)
        devices = sum(pool.devices for pool in self.pools)
        if devices < 2:
            return "there is one device"
        for pool in self.pools:
            if pool.is_gpu:
                why = rates.why_unknown(pool.kind)
            elif self._draft.threads:
                why = "--threads says how cores are divided"
            elif len(self.hosts[0]) > 1 or len(self.pools) > 1:
                why = "several hosts without GPUs"
            elif rates.measured_device(CPU) is None:
                why = "on CPUs a profile of this machine says what layouts cost (dataflow profile)"
            else:
                why = ""
            if why:
                return why
        return ""

    def way(self, writer: int, reader: int, size: int) -> float:
        """Seconds of so many bytes from a pool to another, or within one."""
        if (writer, reader) not in self._links:
            self._links[writer, reader] = self._find_link(writer, reader)
        link = self._links[writer, reader]
        return size / link.rate + link.delay

    def _find_link(self, writer: int, reader: int) -> Link:
        one, other = self.hosts[writer][0].name, self.hosts[reader][-1].name
        if one != other:
            return self._draft.cluster.way(one, other)
        kind = self.pools[writer].kind
        return Link(rate=Rates(self._draft.profile).find_device(kind, is_measured=False).link)


def _list_names(hosts: Sequence[Host]) -> tuple[str, ...]:
    return tuple(host.name for host in hosts)


def _make_pool(hosts: Sequence[Host]) -> DevicePool:
    """The pool of hosts with devices of one kind."""
    first = hosts[0]
    if first.gpus:
        counts = [len(host.gpus) for host in hosts]
        memories = [min(host.gpus) for host in hosts]
        devices = sum(counts)
        return DevicePool(
            kind=first.kind,
            devices=devices,
            per_host=min(counts),
            memory=min(memories),
            host_memory=sum(host.memory for host in hosts) // devices,
            price=sum(host.price for host in hosts) / devices,
        )
    return DevicePool(
        kind=CPU,
        devices=first.cores,
        per_host=first.cores,
        memory=first.memory // first.cores,
        price=first.price / first.cores,
        is_gpu=False,
    )
