"""The machines that a plan is for: this host, or the hosts of a cluster file.

Owns: detection of one host's cores, memory and GPUs; reading a cluster file. Does not own: what is
done with them, nor asking a host what it has (engine/launch/hosts.py).

    keys = "cluster.keys"     # `dataflow keys` makes it; a path beside this file
    lease = 30                # seconds without a word after which hosts give each other up
    private = false           # true: nobody else is on this network, and rows and weights are not encrypted

    [hosts.a]                 # the first is the one on which runs are started
    address = "10.0.0.1"

    [hosts.b]
    address = "10.0.0.2"
    port = 7373               # where `dataflow host` answers
    cores = 8                 # what is left out the host says itself
    memory_gib = 64
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.errors import PlanError, nearest

PORT = 7373
LEASE = 30.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host of several. address: where the others reach it, an IP address; port: where `dataflow host` answers.

    cores, memory (bytes), gpus (bytes of each): 0 where it is not known yet.
    """

    name: str
    address: str
    port: int = PORT
    cores: int = 0
    memory: int = 0
    gpus: tuple[int, ...] = ()

    @property
    def known(self) -> bool:
        """Whether it can be planned for."""
        return bool(self.cores and self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """cores: that this process may use. memory: bytes of the host. gpus: bytes of each GPU's memory.

    hosts: of a cluster file, where there is one; these numbers are then the first one's. lease: seconds without a word
    after which hosts give each other up. private: whether rows may travel between hosts without encryption. keys: the
    key file of the hosts.
    """

    cores: int
    memory: int
    gpus: tuple[int, ...] = ()
    hosts: tuple[Host, ...] = ()
    lease: float = LEASE
    private: bool = False
    keys: Path | None = None

    def describe(self) -> str:
        """`2 cores, 23.5 GiB, no GPU`."""
        gpus = (
            f"{len(self.gpus)} GPU ({', '.join(f'{g / 2**30:.0f} GiB' for g in self.gpus)})" if self.gpus else "no GPU"
        )
        return f"{self.cores} core{'s' * (self.cores != 1)}, {self.memory / 2**30:.1f} GiB, {gpus}"

    def host(self, name: str) -> Host:
        """The host of that name. Raises PlanError where there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        names = [h.name for h in self.hosts]
        found = nearest(name, names) or f"one of {', '.join(names) or 'no hosts'}"
        raise PlanError(f"cluster: expected a host of the cluster file, found {name!r}. Fix: {found}.")

    def on(self, name: str) -> Cluster:
        """One host alone; this one where the name is empty."""
        if not name:
            return self
        host = self.host(name)
        return Cluster(cores=host.cores, memory=host.memory, gpus=host.gpus)


def detect() -> Cluster:
    """This host, as the process sees it: its CPU affinity, its cgroup's memory limit, GPUs that nvidia-smi lists."""
    return Cluster(cores=len(os.sched_getaffinity(0)), memory=_memory(), gpus=_gpus())


def read_cluster(path: Path) -> Cluster:
    """The hosts of a cluster file; of the first, what the file leaves out is what this host has.

    Raises PlanError for a file that is not there, no TOML, or says what no host has.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"cluster file {path}: {error}. Fix: see engine/plan/cluster.py for one.") from error
    _refuse_unknown(path, data, ("keys", "lease", "private", "hosts"))
    hosts = tuple(_host(path, name, said) for name, said in _table(path, data, "hosts").items())
    if not hosts:
        raise PlanError(f"cluster file {path}: expected hosts, found none. Fix: [hosts.a] with its address.")
    own = detect()
    first = hosts[0]
    cores, memory = first.cores or own.cores, first.memory or own.memory
    first = Host(name=first.name, address=first.address, port=first.port, cores=cores, memory=memory, gpus=own.gpus)
    lease = data.get("lease", LEASE)
    if isinstance(lease, bool) or not isinstance(lease, int | float) or lease < 1:
        raise PlanError(f"cluster file {path}: lease: expected seconds, at least 1, found {lease!r}. Fix: lease = 30.")
    private = data.get("private", False)
    if not isinstance(private, bool):
        raise PlanError(f"cluster file {path}: private: expected true or false, found {private!r}. Fix: leave it out.")
    return Cluster(
        cores=cores,
        memory=memory,
        gpus=own.gpus,
        private=private,
        hosts=(first, *hosts[1:]),
        lease=float(lease),
        keys=path.parent / str(data.get("keys", f"{path.stem}.keys")),
    )


def _host(path: Path, name: str, said: Any) -> Host:
    where = f"cluster file {path}: host {name}"
    if not _NAME.fullmatch(name) or not isinstance(said, Mapping):
        raise PlanError(f"{where}: expected a table of that name. Fix: [hosts.b] with its address.")
    _refuse_unknown(path, said, ("address", "port", "cores", "memory_gib"))
    address = said.get("address")
    try:
        ipaddress.ip_address(address if isinstance(address, str) else "")
    except ValueError as error:
        raise PlanError(
            f'{where}: expected the IP address by which others reach it, found {address!r}. Fix: address = "10.0.0.2".'
        ) from error
    numbers = {key: said.get(key, default) for key, default in (("port", PORT), ("cores", 0), ("memory_gib", 0))}
    for key, value in numbers.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value < 0
            or (value > 65535 and key == "port")
        ):
            raise PlanError(f"{where}: {key}: expected a number, found {value!r}. Fix: leave it out.")
    return Host(
        name=name,
        address=str(address),
        port=int(numbers["port"]),
        cores=int(numbers["cores"]),
        memory=int(numbers["memory_gib"] * 2**30),
    )


def _table(path: Path, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = data.get(key, {})
    if not isinstance(found, Mapping):
        raise PlanError(f"cluster file {path}: {key}: expected tables, found {found!r}. Fix: [hosts.a].")
    return found


def _refuse_unknown(path: Path, data: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in data:
        if key not in known:
            fix = nearest(key, known) or f"one of {', '.join(known)}"
            raise PlanError(f"cluster file {path}: unknown key {key!r}. Fix: {fix}.")


def _memory() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        return min(total, int(text))
    return total


def _gpus() -> tuple[int, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    return tuple(int(line) * 2**20 for line in found.stdout.split() if line.isdigit()) if found.returncode == 0 else ()
