"""In which region each host of a plan is: between regions the way is slow, within one it is not.

Owns: who is in one region. Does not own: the ways between hosts (cluster.py), who takes what across
(engine/coordinator/weight_tree.py).

A host that a cluster file or a label of its node puts into a region is in that. The others are with
the first host of which no slow link parts them: one that has less than half of the rate that both
have to the hosts beside them.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.plan.cluster import Cluster

_SLOW = 0.5
"""A link with less than this share of the rate of both ends' own networks parts regions."""


def list_regions(hosts: Iterable[str], cluster: Cluster | None) -> dict[str, str]:
    """Map each host to its region: the name that the cluster has for it, else that of its first
    host.
    """
    regions: dict[str, str] = {}
    if cluster is None:
        return dict.fromkeys(hosts, "")
    firsts: dict[str, str] = {}
    """Region -> its first host."""
    # Those that are named first: the others may be with one of them.
    named = {host: _named_region(host, cluster) for host in dict.fromkeys(hosts)}
    for host in sorted(named, key=lambda host: not named[host]):
        region = named[host] or _find_near(host, firsts, cluster) or f"beside {host}"
        regions[host] = region
        firsts.setdefault(region, host)
    return regions


def _named_region(host: str, cluster: Cluster) -> str:
    if not cluster.hosts:
        return ""
    return cluster.host(host).region


def _find_near(host: str, firsts: dict[str, str], cluster: Cluster) -> str:
    """Find the region that no slow link parts from a host; empty if there is none."""
    for region, first in firsts.items():
        if not cluster.links or not _is_slow(host, first, cluster):
            return region
    return ""


def _is_slow(one: str, other: str, cluster: Cluster) -> bool:
    own_rate = min(cluster.way(one, one).rate, cluster.way(other, other).rate)
    return cluster.way(one, other).rate < _SLOW * own_rate
