"""The machines that a plan is for: this host, those of a Ray cluster, or those of a cluster file.

Owns: detecting cores, memory and GPUs of this host; reading a cluster file, for a plan without the
machines. Does not own: what a Ray cluster has (engine/launch/ray.py).

    [hosts.a]                 # the first is the one whose Workers are pinned to no host
    cores = 8
    memory_gib = 64

    [hosts.b]
    cores = 32
    memory_gib = 512
    gpus = 8
    gpu_memory_gib = 80
    labels = { gpu = "H100" } # --pin rollout=gen@gpu:H100
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.errors import PlanError, nearest_or_all

LEASE = 30.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host of several: cores, bytes of memory, bytes of each GPU's memory."""

    name: str
    cores: int
    memory: int
    gpus: tuple[int, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    """By which a pin may name it, `gpu:H200`."""
    label: tuple[str, str] | None = None
    """The one by which a pin did."""
    node: str = field(default="", compare=False)
    """Which node of a Ray cluster it is."""
    refused: str = ""
    """Why a run cannot use it; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The cores that this process may use, bytes of memory, and bytes of each GPU's memory."""

    cores: int
    memory: int
    gpus: tuple[int, ...] = ()
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
        problem = f"expected a host of the cluster, found {name!r}"
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


def with_first(hosts: Sequence[Host], **more: Any) -> Cluster:
    """A cluster of these hosts, whose numbers are those of the first."""
    first = hosts[0]
    own = {"cores": first.cores, "memory": first.memory, "gpus": first.gpus}
    return Cluster(**own, hosts=tuple(hosts), **more)


def read_cluster(path: Path) -> Cluster:
    """The hosts of a cluster file. Raises PlanError for a file that is missing or not TOML, and for
    impossible values.
    """
    file = _ClusterFile(path, _text(path))
    data = file.tables()
    file.refuse_unknown("", data, ("hosts",))
    tables = data.get("hosts", {})
    if not isinstance(tables, Mapping):
        raise file.wrong("", "hosts", f"hosts: expected tables, found {tables!r}", "[hosts.a]")
    hosts = [_host(file, name, said) for name, said in tables.items()]
    if not hosts:
        problem = "expected hosts, found none"
        raise PlanError(f"cluster file {path}: {problem}. Fix: {_EXAMPLE}.")
    return with_first(hosts)


def _host(file: _ClusterFile, name: str, said: Any) -> Host:
    if not _NAME.fullmatch(name) or not isinstance(said, Mapping):
        problem = f"host {name}: expected a table of that name"
        raise file.wrong("hosts", name, problem, "[hosts.b] with cores and memory_gib")
    table = f"hosts.{name}"
    file.refuse_unknown(table, said, _VALUES)
    count, size = int(file.value(table, said, "gpus", 0)), 0
    if count:
        size = int(file.value(table, said, "gpu_memory_gib") * 2**30)
    return Host(
        name=name,
        cores=int(file.value(table, said, "cores")),
        memory=int(file.value(table, said, "memory_gib") * 2**30),
        gpus=(size,) * count,
        labels=dict(file.value(table, said, "labels", {})),
    )


def _positive(value: Any, most: int) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= most  # nan is none of these


def _whole(value: Any, most: int) -> bool:
    return _positive(value, most) and value == int(value)


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


_MOST_GIB = 2**20
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "cores": (lambda v: _whole(v, 65536), "a number of cores, 1 to 65536", "cores = 8"),
    "memory_gib": (
        lambda v: _positive(v, _MOST_GIB),
        "GiB of memory, above 0 to 1048576",
        "memory_gib = 64",
    ),
    "gpus": (lambda v: _whole(v, 1024), "a number of GPUs, 1 to 1024", "gpus = 8"),
    "gpu_memory_gib": (
        lambda v: _positive(v, _MOST_GIB),
        "GiB of memory of each GPU, above 0 to 1048576",
        "gpu_memory_gib = 80",
    ),
    "labels": (_texts, "texts by name", 'labels = { gpu = "H100" }'),
}
"""Key -> whether a value fits, what is expected, and the fix."""


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

    def value(self, table: str, said: Mapping[str, Any], key: str, default: Any = None) -> Any:
        """The value of a key. Raises PlanError for one that does not fit, or that is missing and
        has no default.
        """
        fits, expected, fix = _VALUES[key]
        found = said.get(key, default)
        if (key in said or default is None) and not fits(found):
            problem = f"{key}: expected {expected}, found {found!r}"
            raise self.wrong(table, key, problem, fix)
        return found

    def refuse_unknown(self, table: str, said: Mapping[str, Any], known: Iterable[str]) -> None:
        """Raises PlanError for a key of a table that means nothing."""
        for key in said:
            if key not in known:
                fix = nearest_or_all(key, list(known))
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


_EXAMPLE = "[hosts.a] with cores = 8 and memory_gib = 64"


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
