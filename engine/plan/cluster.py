"""The machines that a plan is for: this host, those of a Ray cluster, or those of a cluster file.

Owns: the data, and detecting cores, memory and GPUs of this host. Does not own: cluster files
(cluster_file.py), what a Ray cluster has (engine/run/hosts/ray.py), rates (engine/plan/cost).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dataflow.errors import PlanError, nearest_or_all
from engine.plan.cost.devices import CPU, Link, catalogue, device, kind_of
from engine.plan.cost.transfers import NETWORK_DELAY

LEASE = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host of several: cores, bytes of memory, bytes of each GPU's memory."""

    name: str
    cores: int
    memory: int
    gpus: tuple[int, ...] = ()
    kind: str = ""
    """Of its GPUs, as the catalogue or they themselves name it; empty where it is not known."""
    region: str = ""
    price: float = 0.0
    """An hour; 0 where nobody has said."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """By which a pin may name it, `gpu:H200`."""
    table: str = ""
    """Of a cluster file, if it stands for several hosts alike."""
    label: tuple[str, str] | None = None
    """The one by which a pin did."""
    node: str = field(default="", compare=False)
    """Which node of a Ray cluster it is."""
    refused: str = ""
    """Why a run cannot use it; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLink:
    """Between two hosts or regions, or within one if both are the same: bytes a second and
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
    """Of the GPUs, as the catalogue or they themselves name it; empty where it is not known."""
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
        each = [f"{size / 2**30:.0f} GiB" for size in self.gpus]
        alike = len(each) > 1 and len(set(each)) == 1
        sizes = f"{each[0]} each" if alike else ", ".join(each)
        kind = f"{self.kind} " if self.kind else ""
        gpus = f"{len(self.gpus)} {kind}GPU ({sizes})" if self.gpus else "no GPU"
        return f"{self.cores} core{'s' * (self.cores != 1)}, {self.memory / 2**30:.1f} GiB, {gpus}"

    def host(self, name: str) -> Host:
        """The host of that name. Raises PlanError where there is none."""
        if name in self._by_name:
            return self._by_name[name]
        names = [h.name for h in self.hosts]
        found = nearest_or_all(name, names or ["no hosts"])
        problem = f"expected a host of the cluster, found {name!r}"
        raise PlanError(f"cluster: {problem}. Fix: {found}.")

    def on(self, name: str) -> Cluster:
        """One host alone; the whole cluster for an empty name."""
        if not name:
            return self
        host = self.host(name)
        return Cluster(cores=host.cores, memory=host.memory, gpus=host.gpus, kind=host.kind)

    def way(self, one: str, other: str) -> Link:
        """Between two hosts: as the cluster file says of them or of their regions, else at the rate
        of the slower one's network cards.
        """
        ends = [(name, *self._groups(name)) for name in (one, other)]
        for pair in ((a, b) for a in ends[0] for b in ends[1]):
            if found := self._ways.get(frozenset(pair)):
                return found
        return Link(rate=min(map(self._network, (one, other))), delay=NETWORK_DELAY)

    def _groups(self, name: str) -> Iterable[str]:
        """By which a link may name a host, too: the table of several alike, its region."""
        host = self._by_name.get(name)
        return () if host is None else tuple(filter(None, (host.table, host.region)))

    def _network(self, name: str) -> float:
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
    def _ways(self) -> Mapping[frozenset[str], Link]:
        ways = ((link.between, Link(rate=link.rate, delay=link.delay)) for link in self.links)
        return {frozenset(ends): link for ends, link in ways}


def detect() -> Cluster:
    """What this process has: its CPU affinity, its cgroup's memory limit, nvidia-smi's GPUs."""
    gpus, kind = _gpus()
    cores = len(os.sched_getaffinity(0))
    return Cluster(cores=cores, memory=_memory(), gpus=gpus, kind=kind)


def with_first(hosts: Sequence[Host], **more: Any) -> Cluster:
    """A cluster of these hosts, whose numbers are those of the first."""
    first = hosts[0]
    names = ("cores", "memory", "gpus", "kind")
    own: dict[str, Any] = {name: getattr(first, name) for name in names}
    return Cluster(**own, hosts=tuple(hosts), **more)


def _memory() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        return min(total, int(text))
    return total


def _gpus() -> tuple[tuple[int, ...], str]:
    """Bytes of memory of each, and their kind if it is the same of all: as the catalogue names it,
    else by their own name, as a profile of them does.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return (), ""
    query = [tool, "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    if found.returncode != 0:
        return (), ""
    said = [line.partition(",") for line in found.stdout.splitlines()]
    said = [(size.strip(), name.strip()) for size, _, name in said if size.strip().isdigit()]
    kinds = {kind_of(name) or name for _, name in said}
    kind = kinds.pop() if len(kinds) == 1 else ""
    return tuple(int(size) * 2**20 for size, _ in said), kind
