"""The machines that a plan is for: this host, those of a Ray cluster, or those of a cluster file.

Owns: the data, and detecting cores, memory and GPUs of this host. Does not own: cluster files
(cluster_file.py), what a Ray cluster has (engine/run/hosts/ray.py), rates (engine/plan/cost).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path

from dataflow.errors import PlanError, nearest_or_all
from engine.plan.cost.devices import CPU, Link, catalogue, device, kind_of
from engine.plan.cost.transfers import NETWORK_DELAY

LEASE = 30.0
"""Seconds; the default of --lease, which a Cluster that nobody runs on has, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host of several: cores, bytes of memory, bytes of each GPU's memory."""

    name: str
    cores: int
    memory: int
    gpus: tuple[int, ...] = ()
    kind: str = ""
    """The kind of its GPUs, as the catalogue or they themselves name it; empty if unknown."""
    region: str = ""
    price: float = 0.0
    """Price an hour; 0 if unknown."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What a pin may name it by: `gpu:H200`."""
    table: str = ""
    """The table of a cluster file that stands for it and others alike; empty if it is alone."""
    label: tuple[str, str] | None = None
    """The label that a pin named it by."""
    node: str = field(default="", compare=False)
    """The id of its node in a Ray cluster."""
    refused: str = ""
    """Why a run cannot use it; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLink:
    """A link between two hosts or regions, or within one if both are the same: bytes a second and
    direction of each host, and seconds before the first byte arrives.
    """

    between: tuple[str, str]
    rate: float
    delay: float = NETWORK_DELAY


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The cores that this process may use, bytes of memory, and bytes of each GPU's memory."""

    cores: int
    memory: int
    gpus: tuple[int, ...] = ()
    kind: str = ""
    """The kind of the GPUs, as the catalogue or they themselves name it; empty if unknown."""
    links: tuple[ClusterLink, ...] = ()
    """What is known of the ways between hosts; the others go at the rate of their network cards."""
    hosts: tuple[Host, ...] = ()
    """Those of a Ray cluster, or of a cluster file; the numbers above are those of the first."""
    lease: float = LEASE
    """Seconds of silence after which the run and a host give each other up."""
    private: bool = False
    """Whether rows may travel between hosts without encryption."""

    @property
    def live(self) -> bool:
        """Whether these are nodes of a Ray cluster, on which every Worker has a host."""
        return any(host.node for host in self.hosts)

    def describe(self) -> str:
        """`2 cores, 23.5 GiB, no GPU`."""
        cores = f"{self.cores} core{'s' * (self.cores != 1)}"
        return f"{cores}, {self.memory / 2**30:.1f} GiB, {self._describe_gpus()}"

    def _describe_gpus(self) -> str:
        """`8 H100 GPU (80 GiB each)`."""
        if not self.gpus:
            return "no GPU"
        sizes = [f"{size / 2**30:.0f} GiB" for size in self.gpus]
        if len(sizes) > 1 and len(set(sizes)) == 1:
            sizes = [f"{sizes[0]} each"]
        kind = f"{self.kind} " if self.kind else ""
        return f"{len(self.gpus)} {kind}GPU ({', '.join(sizes)})"

    def host(self, name: str) -> Host:
        """The host of that name. Raises PlanError where there is none."""
        if name in self._by_name:
            return self._by_name[name]
        names = [h.name for h in self.hosts]
        fix = nearest_or_all(name, names or ["no hosts"])
        problem = f"expected a host of the cluster, found {name!r}"
        raise PlanError(f"cluster: {problem}. Fix: {fix}.")

    def on(self, name: str) -> Cluster:
        """One host alone; the whole cluster for an empty name."""
        if not name:
            return self
        host = self.host(name)
        return Cluster(cores=host.cores, memory=host.memory, gpus=host.gpus, kind=host.kind)

    def way(self, one: str, other: str) -> Link:
        """Find the link between two hosts: as the cluster file has it for them or for their
        regions, else at the rate of the slower one's network cards.
        """
        # A link that names the hosts themselves counts before those of their tables or regions.
        for pair in product(self._link_names(one), self._link_names(other)):
            link = self._link_by_ends.get(frozenset(pair))
            if link is not None:
                return link
        rate = min(self._network_rate(one), self._network_rate(other))
        return Link(rate=rate, delay=NETWORK_DELAY)

    def _link_names(self, name: str) -> Sequence[str]:
        """What a link may name a host by: its own name, the table of several alike, its region."""
        host = self._by_name.get(name)
        if host is None:
            return (name,)
        return (name, *filter(None, (host.table, host.region)))

    def _network_rate(self, name: str) -> float:
        """Bytes a second of a host's network cards, one a GPU."""
        here = self.on(name)
        known = catalogue().devices
        if here.gpus and here.kind in known:
            return known[here.kind].network * len(here.gpus)
        return device(CPU).network

    @cached_property
    def _by_name(self) -> Mapping[str, Host]:
        return {host.name: host for host in self.hosts}

    @cached_property
    def _link_by_ends(self) -> Mapping[frozenset[str], Link]:
        """Link by the names of its ends; of several between the same ends, the last."""
        return {frozenset(c.between): Link(rate=c.rate, delay=c.delay) for c in self.links}


def detect() -> Cluster:
    """Detect what this process has: its CPU affinity, its cgroup's memory limit, nvidia-smi's
    GPUs.
    """
    gpus, kind = _detect_gpus()
    cores = len(os.sched_getaffinity(0))
    return Cluster(cores=cores, memory=_detect_memory(), gpus=gpus, kind=kind)


def with_first(
    hosts: Sequence[Host],
    *,
    links: tuple[ClusterLink, ...] = (),
    lease: float = LEASE,
    private: bool = False,
) -> Cluster:
    """Make a cluster of these hosts, whose numbers are those of the first."""
    first = hosts[0]
    return Cluster(
        cores=first.cores,
        memory=first.memory,
        gpus=first.gpus,
        kind=first.kind,
        links=links,
        hosts=tuple(hosts),
        lease=lease,
        private=private,
    )


def _detect_memory() -> int:
    """Bytes of the machine, or of the cgroup's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        return min(total, int(text))
    return total


def _detect_gpus() -> tuple[tuple[int, ...], str]:
    """Ask nvidia-smi for the bytes of memory of each GPU, and for their kind if all have the same:
    as the catalogue names it, else by their own name, as a profile of them does. None where
    nvidia-smi is missing or fails.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return (), ""
    query = [tool, "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    if answer.returncode != 0:
        return (), ""
    sizes: list[int] = []
    kinds: set[str] = set()
    for line in answer.stdout.splitlines():
        mebibytes, _, name = (word.strip() for word in line.partition(","))
        if mebibytes.isdigit():
            sizes.append(int(mebibytes) * 2**20)
            kinds.add(kind_of(name) or name)
    kind = kinds.pop() if len(kinds) == 1 else ""
    return tuple(sizes), kind
