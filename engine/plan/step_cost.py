"""What a Step costs: the price of the hosts that a plan uses, for as long as the Step takes.

Owns: which hosts count, the sum. Does not own: how long a Step takes (step_price.py,
engine/simulation), prices (cluster_file.py).

A host counts whole as soon as one Worker is on it, also where it has more devices than the plan
uses: whoever rents it pays for all of it, and nobody else computes there meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.plan.cluster import Cluster, Host
from engine.plan.plan import Decisions

HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What the hosts of a plan cost: an hour, and a Step. hosts: how many have Workers. unpriced:
    those of them of which nobody said a price; then nothing is known.
    """

    hosts: int
    hour: float
    step: float
    unpriced: tuple[str, ...]


def step_cost(decided: Decisions, cluster: Cluster | None, seconds: float) -> StepCost:
    """Sum up the hosts that have Workers, for so many seconds, in the unit of their prices."""
    hosts = list(_list_used_hosts(decided, cluster))
    unpriced = tuple(host.name for host in hosts if not host.price)
    if not hosts:
        unpriced = ("this machine",)
    # The sum without one host's price would look like what all of them cost.
    hour = 0.0 if unpriced else sum(host.price for host in hosts)
    return StepCost(hosts=len(hosts), hour=hour, step=hour * seconds / HOUR, unpriced=unpriced)


def why_no_prices(cluster: Cluster) -> str:
    """Why a Step's cost is not known on a cluster; empty if it is."""
    if not cluster.hosts:
        return "no hosts with prices are known"
    free = [host.name for host in cluster.hosts if not host.price and not host.refused]
    return f"the price of {free[0]} is not known" if free else ""


def _list_used_hosts(decided: Decisions, cluster: Cluster | None) -> Iterator[Host]:
    """List those with Workers; without hosts in the plan all are on the first."""
    if cluster is None or not cluster.hosts:
        return
    names = dict.fromkeys(decided.hosts.values()) or [cluster.hosts[0].name]
    for name in names:
        yield cluster.host(name)
