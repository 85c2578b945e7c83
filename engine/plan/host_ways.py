"""The ways between the hosts of a plan, as its Workers and the ranks of a node have them.

Owns: a Worker's share of its host's network, the rate of a ring of ranks. Does not own: the rate
between two hosts (cluster.py), ways within a host (costs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.plan.cluster import Cluster
from engine.plan.cost.devices import Device, Link
from engine.plan.plan import Decisions


class HostWays:
    """Of one plan."""

    def __init__(self, decided: Decisions, cluster: Cluster) -> None:
        self._decided, self._cluster = decided, cluster

    def between(self, one: str, other: str, *, beside: int = 1) -> Link:
        """The way from a Worker to one of another host, for so many of each host that use it
        together.
        """
        way = self._cluster.way(self._decided.host_of(one), self._decided.host_of(other))
        share = min(self._share_of_network(one), self._share_of_network(other))
        return replace(way, rate=way.rate * min(1.0, share * beside))

    def ring_rate(self, workers: Sequence[str], device: Device) -> float:
        """Bytes a second that each of these ranks sends to the next one; 0 on one host.

        What they sum or gather goes round a ring, which enters and leaves each host once: by the
        network cards of all of its ranks together, where that is slower than the devices' link.
        """
        workers_by_host: dict[str, list[str]] = {}
        for worker in workers:
            workers_by_host.setdefault(self._decided.host_of(worker), []).append(worker)
        home, *far = workers_by_host.values()
        rates: list[float] = []
        for others in far:
            beside = min(len(home), len(others))
            rates.append(self.between(home[0], others[0], beside=beside).rate)
        return min(device.link, *rates) if rates else 0.0

    def _share_of_network(self, worker: str) -> float:
        """A Worker's share of its host's network cards, one a GPU."""
        gpus = self._decided.devices.get(worker)
        host_gpus = len(self._cluster.on(self._decided.host_of(worker)).gpus)
        if not gpus or not host_gpus:
            return 1.0
        return len(gpus) / host_gpus
