"""What a Step costs, by the prices of the hosts that a plan uses.

Owns: the sum. Does not own: prices (a cluster file's), seconds of a Step.

A GPU costs its share of its host, whether others of the host are used or not; a host without GPUs
costs all of its price.
"""

from __future__ import annotations

from engine.plan.cluster import Cluster
from engine.plan.plan import Plan


def step_cost(plan: Plan, seconds: float) -> float | None:
    """Cost of a Step of so many seconds, in the unit of the prices; None where the price of a host
    that the plan uses is not known.
    """
    assert plan.cluster is not None
    if not plan.cluster.hosts:
        return None
    cost = 0.0
    for host, used in _count_devices(plan, plan.cluster.hosts[0].name).items():
        price = plan.cluster.host(host).price
        if not price:
            return None
        gpus = len(plan.cluster.host(host).gpus)
        cost += price * (used / gpus if gpus else 1.0)
    return cost * seconds / 3600.0


def _count_devices(plan: Plan, first: str) -> dict[str, int]:
    """GPUs of each host that the plan's Workers have. first: the host of those that have none."""
    gpus: dict[str, set[int]] = {}
    for worker in plan.workers:
        host = plan.host_of(worker) or first
        gpus.setdefault(host, set()).update(plan.devices.get(worker, ()))
    return {host: len(numbers) for host, numbers in gpus.items()}


def why_no_prices(cluster: Cluster) -> str:
    """Why a Step's cost is not known on a cluster; empty if it is."""
    if not cluster.hosts:
        return "no hosts with prices are known"
    free = [host.name for host in cluster.hosts if not host.price and not host.refused]
    return f"the price of {free[0]} is not known" if free else ""
