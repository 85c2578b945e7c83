"""A cluster with more or fewer devices of the same kinds.

Owns: how many hosts of each kind there are then, and their names. Does not own: which Workers are
on them (engine/predict/option_scaling.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd

from dataflow.errors import PlanError
from engine.plan.cluster import Cluster, Host, with_first

MOST = 1 << 20
"""Devices of a cluster."""


def device_count(cluster: Cluster) -> int:
    """GPUs of all hosts."""
    return sum(len(host.gpus) for host in cluster.hosts)


def scaled(cluster: Cluster, devices: int) -> Cluster:
    """With so many GPUs in all: of each table of its file as many times more, or fewer, hosts. Less
    than one host is a part of it, with as large a part of its cores, memory and price. Hosts
    without GPUs stay as they are. Raises PlanError where that comes to no whole hosts.
    """
    there = device_count(cluster)
    if not there:
        problem = "expected a cluster file with GPUs, found none in it"
        raise PlanError(f'devices: {problem}. Fix: devices = "8xH100" of a host.')
    if not 1 <= devices <= MOST:
        problem = f"expected a number of devices, 1 to {MOST}, found {devices}"
        raise PlanError(f"devices: {problem}. Fix: --devices {there}.")
    factor = Fraction(devices, there)
    groups: dict[str, list[Host]] = {}
    for host in cluster.hosts:
        groups.setdefault(host.table or host.name, []).append(host)
    wanted = {name: factor * sum(len(h.gpus) for h in group) for name, group in groups.items()}
    if not all(_whole(wanted[name], group) for name, group in groups.items()):
        fit = _near(groups.values(), there, devices)
        told = ", ".join(f"{len(g) * factor} x {name}" for name, g in groups.items() if g[0].gpus)
        problem = f"expected whole hosts, found {told} for {devices} devices"
        raise PlanError(f"devices: {problem}. Fix: --devices {fit}.")
    hosts = [h for name, group in groups.items() for h in _hosts(name, group, int(wanted[name]))]
    return with_first(hosts, links=cluster.links, lease=cluster.lease, private=cluster.private)


def _whole(gpus: Fraction, group: Sequence[Host]) -> bool:
    """Whether so many GPUs are whole hosts alike, or a part of one."""
    each = len(group[0].gpus)
    return not each or (gpus.denominator == 1 and (gpus < each or gpus % each == 0))


def _hosts(name: str, group: Sequence[Host], gpus: int) -> Iterator[Host]:
    """As many as the GPUs need, alike; the first have the names that were there."""
    first, each = group[0], len(group[0].gpus)
    if not each:
        yield from group
        return
    if gpus < each:
        part = Fraction(gpus, each)
        yield replace(
            first,
            cores=max(1, int(first.cores * part)),
            memory=int(first.memory * part),
            price=first.price * float(part),
            gpus=first.gpus[:gpus],
        )
        return
    yield from group[: gpus // each]
    for number in range(len(group), gpus // each):
        yield replace(first, name=f"{name}-{number}", table=name)


def _near(groups: Collection[Sequence[Host]], there: int, devices: int) -> int:
    """The least number of devices from this one on that makes whole hosts of every table."""
    least = there // gcd(*(len(group) for group in groups if group[0].gpus))
    return -(-devices // least) * least
