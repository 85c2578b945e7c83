"""A cluster with more or fewer devices of the same kinds.

Owns: how many hosts of each kind there are then, and their names. Does not own: which Workers are
on them (engine/predict/option_scaling.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd

from dataflow.errors import PlanError
from engine.plan.cluster import Cluster, Host, with_first

MOST = 1 << 20
"""Devices of a cluster."""


def count_devices(cluster: Cluster) -> int:
    """Count the GPUs of all hosts."""
    return sum(len(host.gpus) for host in cluster.hosts)


def scale_cluster(cluster: Cluster, devices: int) -> Cluster:
    """Scale the hosts of each table of a cluster file by the growth in GPUs, so that there are so
    many in all. Less than one host is a part of it, with as large a part of its cores, memory and
    price. Hosts without GPUs stay as they are. Raises PlanError where that comes to no whole hosts.
    """
    before = count_devices(cluster)
    if not before:
        problem = "expected a cluster file with GPUs, found none in it"
        raise PlanError(f'devices: {problem}. Fix: devices = "8xH100" of a host.')
    if not 1 <= devices <= MOST:
        problem = f"expected a number of devices, 1 to {MOST}, found {devices}"
        raise PlanError(f"devices: {problem}. Fix: --devices {before}.")
    factor = Fraction(devices, before)
    hosts_by_table = group_by_table(cluster)
    gpus_by_table: dict[str, Fraction] = {}
    for table, hosts in hosts_by_table.items():
        gpus_by_table[table] = factor * sum(len(host.gpus) for host in hosts)
    if not all(_is_whole(gpus_by_table[table], hosts) for table, hosts in hosts_by_table.items()):
        raise PlanError(_describe_parts(hosts_by_table, before, devices))
    scaled_hosts: list[Host] = []
    for table, hosts in hosts_by_table.items():
        scaled_hosts += _scale_hosts(table, hosts, int(gpus_by_table[table]))
    return with_first(
        scaled_hosts, links=cluster.links, lease=cluster.lease, private=cluster.private
    )


def group_by_table(cluster: Cluster) -> dict[str, list[Host]]:
    """The hosts of each table of the cluster's file, which are alike; a single host is its own."""
    hosts_by_table: dict[str, list[Host]] = {}
    for host in cluster.hosts:
        hosts_by_table.setdefault(host.table or host.name, []).append(host)
    return hosts_by_table


def _is_whole(gpus: Fraction, hosts: Sequence[Host]) -> bool:
    """Whether so many GPUs are whole hosts alike, or a part of one."""
    per_host = len(hosts[0].gpus)
    if not per_host:
        return True
    return gpus.denominator == 1 and (gpus < per_host or gpus % per_host == 0)


def _describe_parts(hosts_by_table: Mapping[str, Sequence[Host]], before: int, devices: int) -> str:
    """Why a number of devices makes no whole hosts, and the nearest one that does."""
    factor = Fraction(devices, before)
    parts: list[str] = []
    for table, hosts in hosts_by_table.items():
        if hosts[0].gpus:
            parts.append(f"{len(hosts) * factor} x {table}")
    nearest = _nearest_whole(hosts_by_table.values(), before, devices)
    problem = f"expected whole hosts, found {', '.join(parts)} for {devices} devices"
    return f"devices: {problem}. Fix: --devices {nearest}."


def _scale_hosts(table: str, hosts: Sequence[Host], gpus: int) -> Iterator[Host]:
    """As many as the GPUs need, alike; the first have the names that were there."""
    first, per_host = hosts[0], len(hosts[0].gpus)
    if not per_host:
        yield from hosts
        return
    if gpus < per_host:
        part = Fraction(gpus, per_host)
        yield replace(
            first,
            cores=max(1, int(first.cores * part)),
            memory=int(first.memory * part),
            price=first.price * float(part),
            gpus=first.gpus[:gpus],
        )
        return
    yield from hosts[: gpus // per_host]
    for number in range(len(hosts), gpus // per_host):
        yield replace(first, name=f"{table}-{number}", table=table)


def _nearest_whole(groups: Iterable[Sequence[Host]], before: int, devices: int) -> int:
    """The least number of devices from this one on that makes whole hosts of every table."""
    host_counts = [len(hosts) for hosts in groups if hosts[0].gpus]
    # Divided by what all numbers of hosts have in common, each table still has whole ones.
    least = before // gcd(*host_counts)
    return -(-devices // least) * least
