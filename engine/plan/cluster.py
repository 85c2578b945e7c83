"""The machines that a plan is for: this host, or the hosts of a cluster file.

Owns: detecting cores, memory and GPUs; reading a cluster file. Does not own: asking another host
what it has (engine/launch/hosts.py).

    keys = "cluster.keys"     # `dataflow keys` makes it; a path beside this file
    lease = 30                # seconds without a word after which hosts give each other up
    private = false           # true: nobody else is on this network; nothing is encrypted

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dataflow.errors import PlanError, nearest_or_all

PORT = 7373
LEASE = 30.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host of several. cores, memory (bytes), gpus (bytes of each): 0 while unknown."""

    name: str
    address: str
    """The IP address by which others reach it."""
    port: int = PORT
    """Where `dataflow host` answers."""
    cores: int = 0
    memory: int = 0
    gpus: tuple[int, ...] = ()

    @property
    def known(self) -> bool:
        """Whether a plan can use it."""
        return bool(self.cores and self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The cores that this process may use, bytes of memory, and bytes of each GPU's memory."""

    cores: int
    memory: int
    gpus: tuple[int, ...] = ()
    hosts: tuple[Host, ...] = ()
    """Those of the cluster file, if any; the numbers above are then those of the first."""
    lease: float = LEASE
    """Seconds of silence after which hosts give each other up."""
    private: bool = False
    """Whether rows may travel between hosts without encryption."""
    keys: Path | None = None
    """The key file of the hosts."""

    def describe(self) -> str:
        """`2 cores, 23.5 GiB, no GPU`."""
        sizes = ", ".join(f"{size / 2**30:.0f} GiB" for size in self.gpus)
        gpus = f"{len(self.gpus)} GPU ({sizes})" if self.gpus else "no GPU"
        return f"{self.cores} core{'s' * (self.cores != 1)}, {self.memory / 2**30:.1f} GiB, {gpus}"

    def host(self, name: str) -> Host:
        """The host of that name. Raises PlanError where there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        names = [h.name for h in self.hosts]
        found = nearest_or_all(name, names or ["no hosts"])
        problem = f"expected a host of the cluster file, found {name!r}"
        raise PlanError(f"cluster: {problem}. Fix: {found}.")

    def on(self, name: str) -> Cluster:
        """One host alone; the whole cluster for an empty name."""
        if not name:
            return self
        host = self.host(name)
        return Cluster(cores=host.cores, memory=host.memory, gpus=host.gpus)


def detect() -> Cluster:
    """What this process has: its CPU affinity, its cgroup's memory limit, nvidia-smi's GPUs."""
    return Cluster(cores=len(os.sched_getaffinity(0)), memory=_memory(), gpus=_gpus())


def read_cluster(path: Path) -> Cluster:
    """The hosts of a cluster file; this host supplies what the file leaves out of the first. Raises
    PlanError for a file that is missing or not TOML, and for impossible values.
    """
    file = _ClusterFile(path, _text(path))
    data = file.tables()
    file.refuse_unknown("", data, ("keys", "lease", "private", "hosts"))
    tables = data.get("hosts", {})
    if not isinstance(tables, Mapping):
        raise file.wrong("", "hosts", f"hosts: expected tables, found {tables!r}", "[hosts.a]")
    hosts = tuple(_host(file, name, said) for name, said in tables.items())
    _refuse_shared_addresses(file, hosts)
    if not hosts:
        problem = "expected hosts, found none"
        raise PlanError(f"cluster file {path}: {problem}. Fix: [hosts.a] with its address.")
    own, first = detect(), hosts[0]
    cores, memory = first.cores or own.cores, first.memory or own.memory
    first = replace(first, cores=cores, memory=memory, gpus=own.gpus)
    return Cluster(
        cores=cores,
        memory=memory,
        gpus=own.gpus,
        hosts=(first, *hosts[1:]),
        lease=float(file.value("", data, "lease", LEASE)),
        private=file.value("", data, "private", False),
        keys=path.parent / file.value("", data, "keys", f"{path.stem}.keys"),
    )


def _host(file: _ClusterFile, name: str, said: Any) -> Host:
    if not _NAME.fullmatch(name) or not isinstance(said, Mapping):
        problem = f"host {name}: expected a table of that name"
        raise file.wrong("hosts", name, problem, "[hosts.b] with its address")
    table = f"hosts.{name}"
    file.refuse_unknown(table, said, ("address", "port", "cores", "memory_gib"))
    address = said.get("address")
    try:
        ipaddress.ip_address(address if isinstance(address, str) else "")
    except ValueError as error:
        problem = f"expected the IP address by which others reach it, found {address!r}"
        raise file.wrong(table, "address", problem, 'address = "10.0.0.2"') from error
    return Host(
        name=name,
        address=str(address),
        port=int(file.value(table, said, "port", PORT)),
        cores=int(file.value(table, said, "cores", 0)),
        memory=int(file.value(table, said, "memory_gib", 0) * 2**30),
    )


def _refuse_shared_addresses(file: _ClusterFile, hosts: Sequence[Host]) -> None:
    seen: dict[tuple[str, int], str] = {}
    for host in hosts:
        other = seen.setdefault((host.address, host.port), host.name)
        if other != host.name:
            problem = f"expected an address and port of its own, found those of host {other}"
            raise file.wrong(f"hosts.{host.name}", "address", problem, "another port")


def _positive(value: Any, most: int, least: float = 0.0) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= most and value >= least  # nan is none of these


def _whole(value: Any, most: int) -> bool:
    return _positive(value, most) and value == int(value)


_OMIT = "leave it out"
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "lease": (lambda v: _positive(v, 86400, least=1), "seconds, 1 to 86400", "lease = 30"),
    "private": (lambda v: isinstance(v, bool), "true or false", _OMIT),
    "keys": (lambda v: isinstance(v, str) and v != "", "a path", 'keys = "{}.keys"'),
    "port": (lambda v: _whole(v, 65535), "a port, 1 to 65535", _OMIT),
    "cores": (lambda v: _whole(v, 65536), "a number of cores, 1 to 65536", _OMIT),
    "memory_gib": (lambda v: _positive(v, 2**20), "GiB of memory, above 0 to 1048576", _OMIT),
}
"""Key -> whether a value fits, what is expected, and the fix ({}: the name of the file)."""


class _ClusterFile:
    """A cluster file, and the lines of its keys, which tomllib does not tell."""

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text = path, text

    def tables(self) -> dict[str, Any]:
        """The file as TOML."""
        try:
            return tomllib.loads(self._text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            line = re.search(r"at line (\d+)", str(error))
            where = f"cluster file {self._path}{f':{line[1]}' if line else ''}"
            raise PlanError(f"{where}: expected TOML: {error}. Fix: {_EXAMPLE}.") from error

    def value(self, table: str, said: Mapping[str, Any], key: str, default: Any) -> Any:
        """The value of a key. Raises PlanError for one that does not fit."""
        fits, expected, fix = _VALUES[key]
        if key in said and not fits(said[key]):
            problem = f"{key}: expected {expected}, found {said[key]!r}"
            raise self.wrong(table, key, problem, fix.format(self._path.stem))
        return said.get(key, default)

    def refuse_unknown(self, table: str, said: Mapping[str, Any], known: Sequence[str]) -> None:
        """Raises PlanError for a key of a table that means nothing."""
        for key in said:
            if key not in known:
                fix = nearest_or_all(key, known)
                raise PlanError(f"{self._at(table, key)}: unknown key {key!r}. Fix: {fix}.")

    def wrong(self, table: str, key: str, problem: str, fix: str) -> PlanError:
        """Names the line of a key, and the host whose table it is in."""
        _, _, host = table.partition(".")
        of = f"host {host}: " if host else ""
        return PlanError(f"{self._at(table, key)}: {of}{problem}. Fix: {fix}.")

    def _at(self, table: str, key: str) -> str:
        """`cluster file cluster.toml:7`; no line for a key not written as `key =` in its table."""
        inside = ""
        for number, line in enumerate(self._text.splitlines(), 1):
            words = line.partition("#")[0].strip()
            if words.startswith("["):
                inside = words.strip("[] ")
                if inside == (f"{table}.{key}" if table else key):
                    return f"cluster file {self._path}:{number}"
            elif inside == table and words.partition("=")[0].strip().strip("\"'") == key:
                return f"cluster file {self._path}:{number}"
        return f"cluster file {self._path}"


_EXAMPLE = 'keys = "cluster.keys", then [hosts.a] with address = "10.0.0.1"'


def _text(path: Path) -> str:
    what = f"cluster file {path}"
    try:
        if not path.is_file() and path.exists():
            raise PlanError(f"{what}: expected a file, found something else. Fix: name the file.")
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"expected UTF-8, found another encoding at byte {error.start}"
        raise PlanError(f"{what}: {problem}. Fix: save it as UTF-8.") from error
    except OSError as error:
        raise PlanError(f"{what}: cannot be read: {error.strerror}. Fix: {_EXAMPLE}.") from error


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
    if found.returncode != 0:
        return ()
    return tuple(int(line) * 2**20 for line in found.stdout.split() if line.isdigit())
