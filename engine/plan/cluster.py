"""The machines that a plan is for: this host, or the hosts of a cluster file.

Owns: detection of one host's cores, memory and GPUs; reading a cluster file. Does not own: what is
done with them, nor asking a host what it has (engine/launch/hosts.py).

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
import math
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dataflow.errors import PlanError, nearest

PORT = 7373
LEASE = 30.0
_LONGEST_LEASE = 86400
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host of several. port: where `dataflow host` answers.

    address: the IP address by which others reach it. cores, memory (bytes), gpus (bytes of each): 0
    while unknown.
    """

    name: str
    address: str
    port: int = PORT
    cores: int = 0
    memory: int = 0
    gpus: tuple[int, ...] = ()

    @property
    def known(self) -> bool:
        """Whether a plan can use it."""
        return bool(self.cores and self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The cores that this process may use, bytes of memory, and bytes of each GPU's memory.

    hosts: those of the cluster file, if any; the other numbers are then the first one's. lease:
    seconds of silence after which hosts give each other up. private: whether rows may travel
    between hosts without encryption. keys: the key file of the hosts.
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
        sizes = ", ".join(f"{size / 2**30:.0f} GiB" for size in self.gpus)
        gpus = f"{len(self.gpus)} GPU ({sizes})" if self.gpus else "no GPU"
        return f"{self.cores} core{'s' * (self.cores != 1)}, {self.memory / 2**30:.1f} GiB, {gpus}"

    def host(self, name: str) -> Host:
        """The host of that name. Raises PlanError where there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        names = [h.name for h in self.hosts]
        found = nearest(name, names) or f"one of {', '.join(names) or 'no hosts'}"
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
    """The hosts of a cluster file; this host supplies what the file leaves out of the first.

    Raises PlanError for a file that is missing or no TOML, and for values that no host has.
    """
    text = _text(path)
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        where = _place_of(path, error)
        raise PlanError(f"{where}: expected TOML: {error}. Fix: {_EXAMPLE}.") from error
    lines = _Lines(path, text)
    _refuse_unknown(lines, "", data, ("keys", "lease", "private", "hosts"))
    hosts = tuple(_host(lines, name, said) for name, said in _table(lines, data, "hosts").items())
    _refuse_shared_addresses(lines, hosts)
    if not hosts:
        problem = "expected hosts, found none"
        raise PlanError(f"cluster file {path}: {problem}. Fix: [hosts.a] with its address.")
    own, first = detect(), hosts[0]
    cores, memory = first.cores or own.cores, first.memory or own.memory
    first = replace(first, cores=cores, memory=memory, gpus=own.gpus)
    settings = {"lease": LEASE, "private": False, "keys": f"{path.stem}.keys"} | data
    for key, (fits, expected, fix) in _SETTINGS.items():
        if not fits(settings[key]):
            problem = f"{key}: expected {expected}, found {settings[key]!r}"
            fix = fix.format(path.stem)
            raise PlanError(f"{lines.at('', key)}: {problem}. Fix: {fix}.")
    return Cluster(
        cores=cores,
        memory=memory,
        gpus=own.gpus,
        private=settings["private"],
        hosts=(first, *hosts[1:]),
        lease=float(settings["lease"]),
        keys=path.parent / settings["keys"],
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_SETTINGS: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "lease": (
        lambda value: _is_number(value) and 1 <= value <= _LONGEST_LEASE,
        f"seconds, 1 to {_LONGEST_LEASE}",
        "lease = 30",
    ),
    "private": (lambda value: isinstance(value, bool), "true or false", "leave it out"),
    "keys": (lambda value: isinstance(value, str) and value != "", "a path", 'keys = "{}.keys"'),
}
"""Key -> whether a value fits, what is expected, and the fix ({}: the name of the file)."""


def _host(lines: _Lines, name: str, said: Any) -> Host:
    where = f"{lines.at('hosts', name)}: host {name}"
    if not _NAME.fullmatch(name) or not isinstance(said, Mapping):
        raise PlanError(f"{where}: expected a table of that name. Fix: [hosts.b] with its address.")
    table = f"hosts.{name}"
    _refuse_unknown(lines, table, said, ("address", "port", "cores", "memory_gib"))
    address = said.get("address")
    try:
        ipaddress.ip_address(address if isinstance(address, str) else "")
    except ValueError as error:
        where = f"{lines.at(table, 'address')}: host {name}"
        problem = f"expected the IP address by which others reach it, found {address!r}"
        raise PlanError(f'{where}: {problem}. Fix: address = "10.0.0.2".') from error
    return Host(
        name=name,
        address=str(address),
        port=int(_number(lines, table, said, "port", PORT)),
        cores=int(_number(lines, table, said, "cores", 0)),
        memory=int(_number(lines, table, said, "memory_gib", 0) * 2**30),
    )


_BOUNDS: Mapping[str, tuple[float, bool, str]] = {
    "port": (65535, True, "a port, 1 to 65535"),
    "cores": (2**16, True, "a number of cores, 1 to 65536"),
    "memory_gib": (2**20, False, "GiB of memory, above 0 to 1048576"),
}
"""Key -> its greatest value, whether it is an integer, and what it is."""


def _number(lines: _Lines, table: str, said: Mapping[str, Any], key: str, default: float) -> float:
    value = said.get(key, default)
    most, whole, what = _BOUNDS[key]
    if key in said and (
        not _is_number(value) or not 0 < value <= most or (whole and value != int(value))
    ):
        where = f"{lines.at(table, key)}: host {table.partition('.')[2]}"
        raise PlanError(f"{where}: {key}: expected {what}, found {value!r}. Fix: leave it out.")
    return value


def _refuse_shared_addresses(lines: _Lines, hosts: Sequence[Host]) -> None:
    seen: dict[tuple[str, int], str] = {}
    for host in hosts:
        other = seen.setdefault((host.address, host.port), host.name)
        if other != host.name:
            where = f"{lines.at(f'hosts.{host.name}', 'address')}: host {host.name}"
            problem = f"expected an address and port of its own, found those of host {other}"
            raise PlanError(f"{where}: {problem}. Fix: another port.")


def _table(lines: _Lines, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = data.get(key, {})
    if not isinstance(found, Mapping):
        where = lines.at("", key)
        raise PlanError(f"{where}: {key}: expected tables, found {found!r}. Fix: [hosts.a].")
    return found


def _refuse_unknown(
    lines: _Lines, table: str, data: Mapping[str, Any], known: tuple[str, ...]
) -> None:
    for key in data:
        if key not in known:
            fix = nearest(key, known) or f"one of {', '.join(known)}"
            raise PlanError(f"{lines.at(table, key)}: unknown key {key!r}. Fix: {fix}.")


_EXAMPLE = 'keys = "cluster.keys", then [hosts.a] with address = "10.0.0.1"'


def _text(path: Path) -> str:
    what = f"cluster file {path}"
    try:
        if not path.is_file() and path.exists():
            raise PlanError(f"{what}: expected a file, found something else. Fix: name the file.")
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"expected UTF-8, found byte {error.start} that is none"
        raise PlanError(f"{what}: {problem}. Fix: save it as UTF-8.") from error
    except OSError as error:
        raise PlanError(f"{what}: cannot be read: {error.strerror}. Fix: {_EXAMPLE}.") from error


def _place_of(path: Path, error: Exception) -> str:
    found = re.search(r"at line (\d+)", str(error))
    return f"cluster file {path}:{found[1]}" if found else f"cluster file {path}"


class _Lines:
    """The line of a key in a cluster file, which tomllib does not tell.

    Just the file for a key that is not written as `key = value` under its table's heading.
    """

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()

    def at(self, table: str, key: str) -> str:
        """`cluster file cluster.toml:7`."""
        inside = ""
        for number, line in enumerate(self._lines, 1):
            words = line.partition("#")[0].strip()
            if words.startswith("["):
                inside = words.strip("[] ")
                if inside == (f"{table}.{key}" if table else key):
                    return f"cluster file {self._path}:{number}"
            elif inside == table and words.partition("=")[0].strip().strip("\"'") == key:
                return f"cluster file {self._path}:{number}"
        return f"cluster file {self._path}"


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
