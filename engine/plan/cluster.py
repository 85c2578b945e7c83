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
    """One host of several. address: where the others reach it, an IP address; port: where `dataflow
    host` answers.

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
    """cores: that this process may use. memory: bytes of the host. gpus: bytes of each GPU's
    memory.

    hosts: of a cluster file, where there is one; these numbers are then the first one's. lease:
    seconds without a word after which hosts give each other up. private: whether rows may travel
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
        gpus = (
            f"{len(self.gpus)} GPU ({', '.join(f'{g / 2**30:.0f} GiB' for g in self.gpus)})"
            if self.gpus
            else "no GPU"
        )
        return f"{self.cores} core{'s' * (self.cores != 1)}, {self.memory / 2**30:.1f} GiB, {gpus}"

    def host(self, name: str) -> Host:
        """The host of that name. Raises PlanError where there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        names = [h.name for h in self.hosts]
        found = nearest(name, names) or f"one of {', '.join(names) or 'no hosts'}"
        raise PlanError(
            f"cluster: expected a host of the cluster file, found {name!r}. Fix: {found}."
        )

    def on(self, name: str) -> Cluster:
        """One host alone; this one where the name is empty."""
        if not name:
            return self
        host = self.host(name)
        return Cluster(cores=host.cores, memory=host.memory, gpus=host.gpus)


def detect() -> Cluster:
    """This host, as the process sees it: its CPU affinity, its cgroup's memory limit, GPUs that
    nvidia-smi lists.
    """
    return Cluster(cores=len(os.sched_getaffinity(0)), memory=_memory(), gpus=_gpus())


def read_cluster(path: Path) -> Cluster:
    """The hosts of a cluster file; of the first, what the file leaves out is what this host has.

    Raises PlanError for a file that is not there, no TOML, or says what no host has.
    """
    text = _text(path)
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PlanError(
            f"{_place_of(path, error)}: expected TOML: {error}. Fix: {_EXAMPLE}."
        ) from error
    lines = _Lines(path, text)
    _refuse_unknown(lines, "", data, ("keys", "lease", "private", "hosts"))
    hosts = tuple(_host(lines, name, said) for name, said in _table(lines, data, "hosts").items())
    _refuse_shared_addresses(lines, hosts)
    if not hosts:
        raise PlanError(
            f"cluster file {path}: expected hosts, found none. Fix: [hosts.a] with its address."
        )
    own = detect()
    first = hosts[0]
    first = replace(
        first, cores=first.cores or own.cores, memory=first.memory or own.memory, gpus=own.gpus
    )
    lease = _setting(
        lines,
        data,
        "lease",
        LEASE,
        fits=lambda v: _is_number(v) and 1 <= v <= _LONGEST_LEASE,
        expected=f"seconds, 1 to {_LONGEST_LEASE}",
        fix="lease = 30",
    )
    private = _setting(
        lines,
        data,
        "private",
        False,
        fits=lambda v: isinstance(v, bool),
        expected="true or false",
        fix="leave it out",
    )
    default = f"{path.stem}.keys"
    keys = _setting(
        lines,
        data,
        "keys",
        default,
        fits=lambda v: isinstance(v, str) and bool(v),
        expected="a path",
        fix=f'keys = "{default}"',
    )
    return Cluster(
        cores=first.cores,
        memory=first.memory,
        gpus=own.gpus,
        private=private,
        hosts=(first, *hosts[1:]),
        lease=float(lease),
        keys=path.parent / keys,
    )


def _setting(
    lines: _Lines,
    data: Mapping[str, Any],
    key: str,
    default: Any,
    *,
    fits: Callable[[Any], bool],
    expected: str,
    fix: str,
) -> Any:
    """The value of a key. Raises PlanError for one that does not fit."""
    value = data.get(key, default)
    if not fits(value):
        where = f"{lines.at('', key)}: {key}"
        raise PlanError(f"{where}: expected {expected}, found {value!r}. Fix: {fix}.")
    return value


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
        raise PlanError(
            f"{where}: expected the IP address by which others reach it, found {address!r}. Fix:"
            ' address = "10.0.0.2".'
        ) from error
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
"""Key -> its greatest value, whether it is whole, and what it is."""


def _number(lines: _Lines, table: str, said: Mapping[str, Any], key: str, default: float) -> float:
    value = said.get(key, default)
    most, whole, what = _BOUNDS[key]
    if key in said and (
        not _is_number(value) or not 0 < value <= most or (whole and value != int(value))
    ):
        where = f"{lines.at(table, key)}: host {table.partition('.')[2]}"
        raise PlanError(f"{where}: {key}: expected {what}, found {value!r}. Fix: leave it out.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse_shared_addresses(lines: _Lines, hosts: Sequence[Host]) -> None:
    seen: dict[tuple[str, int], str] = {}
    for host in hosts:
        other = seen.setdefault((host.address, host.port), host.name)
        if other != host.name:
            where = f"{lines.at(f'hosts.{host.name}', 'address')}: host {host.name}"
            found = f"those of host {other}"
            raise PlanError(
                f"{where}: expected an address and port of its own, found {found}. Fix: another"
                " port."
            )


def _table(lines: _Lines, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = data.get(key, {})
    if not isinstance(found, Mapping):
        raise PlanError(
            f"{lines.at('', key)}: {key}: expected tables, found {found!r}. Fix: [hosts.a]."
        )
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
        fix = "save it as UTF-8"
        raise PlanError(
            f"{what}: expected UTF-8, found byte {error.start} that is none. Fix: {fix}."
        ) from error
    except OSError as error:
        raise PlanError(f"{what}: cannot be read: {error.strerror}. Fix: {_EXAMPLE}.") from error


def _place_of(path: Path, error: Exception) -> str:
    found = re.search(r"at line (\d+)", str(error))
    return f"cluster file {path}:{found[1]}" if found else f"cluster file {path}"


class _Lines:
    """Where in a cluster file a key stands, which tomllib does not say; only the file, where it is
    not written as `key = value` under its table's heading.
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
    return (
        tuple(int(line) * 2**20 for line in found.stdout.split() if line.isdigit())
        if found.returncode == 0
        else ()
    )
