"""A cluster file: the machines of a plan that is made without them.

Owns: its tables and keys, and errors that name the line. Does not own: the data (cluster.py), kinds
of devices (engine/plan/cost/catalogue.toml).

    [hosts.a]                 # the first is the one whose Workers are pinned to no host
    cores = 8
    memory_gib = 64

    [hosts.b]
    count = 16                # as many alike: b-0 ... b-15
    cores = 192
    memory_gib = 2048
    devices = "8xH100"        # of a kind that the catalogue knows
    region = "east"
    price = 98.32             # an hour, of each host
    labels = { rack = "7" }   # --pin rollout=gen@rack:7, and @gpu:H100 of devices

    [hosts.c]
    cores = 32
    memory_gib = 512
    gpus = 8                  # of no known kind: their memory has to be said
    gpu_memory_gib = 80

    [[links]]                 # between hosts or regions, or within one: between = ["east", "east"]
    between = ["a", "east"]
    gigabits = 10             # a second and direction, of each host
    delay_ms = 30
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.errors import PlanError, nearest_or_all
from engine.plan.cluster import Cluster, ClusterLink, Host, with_first
from engine.plan.cost.devices import CPU, catalogue
from engine.plan.cost.transfers import NETWORK_DELAY

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_DEVICES = re.compile(r"([1-9][0-9]{0,3})x([A-Za-z0-9_-]+)")
_Fits = Callable[[Any], bool]
"""Whether a value of a key is a possible one."""


def read_cluster(path: Path) -> Cluster:
    """Read the hosts of a cluster file. Raises PlanError for a file that is missing or not TOML,
    and for impossible values.
    """
    file = _ClusterFile(path, _read_text(path))
    document = file.parse()
    file.refuse_unknown("", document, ("hosts", "links"))
    tables = document.get("hosts", {})
    if not isinstance(tables, Mapping):
        raise file.wrong("", "hosts", f"hosts: expected tables, found {tables!r}", "[hosts.a]")
    hosts: list[Host] = []
    for name, keys in tables.items():
        hosts += _read_hosts(file, name, keys)
    _refuse_repeated(file, hosts)
    if not hosts:
        problem = "expected hosts, found none"
        raise PlanError(f"cluster file {path}: {problem}. Fix: {_EXAMPLE}.")
    names = [host.name for host in hosts]
    regions = [host.region for host in hosts if host.region]
    links = _read_links(file, document.get("links", []), [*tables, *names, *regions])
    return with_first(hosts, links=tuple(links))


def _read_hosts(file: _ClusterFile, name: str, keys: Any) -> Iterator[Host]:
    """Read as many hosts as a table stands for."""
    if not _NAME.fullmatch(name) or not isinstance(keys, Mapping):
        problem = f"host {name}: expected a table of that name"
        raise file.wrong("hosts", name, problem, "[hosts.b] with cores and memory_gib")
    table = f"hosts.{name}"
    file.refuse_unknown(table, keys, _OF_HOSTS)
    kind, gpus = _read_gpus(file, table, keys)
    count = int(file.value(table, keys, "count", 1))
    names, shared_table = [name], ""
    if "count" in keys:
        names = [f"{name}-{number}" for number in range(count)]
        shared_table = name
    for host_name in names:
        yield Host(
            name=host_name,
            cores=int(file.value(table, keys, "cores")),
            memory=int(file.value(table, keys, "memory_gib") * 2**30),
            gpus=gpus,
            kind=kind,
            region=file.value(table, keys, "region", ""),
            price=float(file.value(table, keys, "price", 0)),
            labels=_read_labels(file, table, keys, kind),
            table=shared_table,
        )


def _read_labels(
    file: _ClusterFile, table: str, keys: Mapping[str, Any], kind: str
) -> dict[str, str]:
    """Read the labels, which may override that of the GPUs' kind."""
    labels: dict[str, str] = {}
    if kind:
        labels["gpu"] = kind
    labels.update(file.value(table, keys, "labels", {}))
    return labels


def _refuse_repeated(file: _ClusterFile, hosts: Sequence[Host]) -> None:
    """Raise PlanError for a name that two hosts have, or a host and a region."""
    tables: dict[str, str] = {}
    for host in hosts:
        table = host.table or host.name
        other = tables.setdefault(host.name, table)
        if other != table:
            single = host.name if host.name in (other, table) else table
            problem = f"expected each host once, found {host.name} in hosts.{other}, too"
            raise file.wrong(f"hosts.{single}", "cores", problem, f"[hosts.{single}-own]")
    for host in hosts:
        if host.region in tables:
            problem = f"region: expected another name than that of a host, found {host.region!r}"
            table = f"hosts.{host.table or host.name}"
            raise file.wrong(table, "region", problem, f'region = "{host.region}-region"')


def _read_gpus(
    file: _ClusterFile, table: str, keys: Mapping[str, Any]
) -> tuple[str, tuple[int, ...]]:
    """Read the GPUs' kind and the memory of each. Raises PlanError for an unknown kind, unless its
    memory is stated: then a profile may know its rates.
    """
    if "devices" not in keys:
        count = int(file.value(table, keys, "gpus", 0))
        if not count:
            return "", ()
        memory = file.value(table, keys, "gpu_memory_gib")
        return "", (int(memory * 2**30),) * count
    if "gpus" in keys:
        problem = "expected devices or gpus, found both"
        raise file.wrong(table, "gpus", problem, "devices alone, which says how many")
    words = _DEVICES.fullmatch(file.value(table, keys, "devices"))
    assert words is not None, "the value fits"
    count, kind = int(words[1]), words[2]
    if "gpu_memory_gib" in keys:
        memory = file.value(table, keys, "gpu_memory_gib")
        return kind, (int(memory * 2**30),) * count
    devices = catalogue().devices.items()
    memory_by_kind = {name: device.memory for name, device in devices if name != CPU}
    if kind not in memory_by_kind:
        problem = f"devices: expected a kind of the catalogue, found {kind!r}"
        near = nearest_or_all(kind, list(memory_by_kind))
        fix = f"{near}, or gpu_memory_gib and a profile of it: dataflow profile GRAPH there"
        raise file.wrong(table, "devices", problem, fix)
    return kind, (memory_by_kind[kind],) * count


def _read_links(file: _ClusterFile, tables: Any, known: Iterable[str]) -> Iterator[ClusterLink]:
    """Read each link. known: what it may join, which are names of hosts, tables and regions."""
    if not isinstance(tables, list):
        problem = f"links: expected tables, found {tables!r}"
        raise file.wrong("", "links", problem, '[[links]] with between = ["a", "b"]')
    names = list(dict.fromkeys(known))
    for keys in tables:
        if not isinstance(keys, Mapping):
            problem = f"links: expected tables, found {keys!r}"
            raise file.wrong("", "links", problem, '[[links]] with between = ["a", "b"]')
        file.refuse_unknown("links", keys, _OF_LINKS)
        one, other = file.value("links", keys, "between")
        for name in (one, other):
            if name not in names:
                problem = f"between: expected hosts or regions of this file, found {name!r}"
                raise file.wrong("links", "between", problem, nearest_or_all(name, names))
        yield ClusterLink(
            between=(one, other),
            rate=file.value("links", keys, "gigabits") * 1e9 / 8,
            delay=file.value("links", keys, "delay_ms", NETWORK_DELAY * 1e3) / 1e3,
        )


def _is_positive(number: Any, most: int) -> bool:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return 0 < number <= most  # nan compares as false


def _positive_up_to(most: int) -> _Fits:
    return lambda number: _is_positive(number, most)


def _whole_up_to(most: int) -> _Fits:
    return lambda number: _is_positive(number, most) and number == int(number)


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and bool(_NAME.fullmatch(text))


def _is_devices(text: Any) -> bool:
    return isinstance(text, str) and bool(_DEVICES.fullmatch(text))


def _is_pair(ends: Any) -> bool:
    if not isinstance(ends, list) or len(ends) != 2:
        return False
    return all(isinstance(end, str) for end in ends)


def _are_texts(table: Any) -> bool:
    if not isinstance(table, dict):
        return False
    return all(isinstance(text, str) for text in table.values())


_MOST_GIB = 2**20
_KEYS: Mapping[str, tuple[_Fits, str, str]] = {
    "count": (
        _whole_up_to(65536),
        "a number of hosts, 1 to 65536",
        "count = 16",
    ),
    "cores": (
        _whole_up_to(65536),
        "a number of cores, 1 to 65536",
        "cores = 8",
    ),
    "memory_gib": (
        _positive_up_to(_MOST_GIB),
        "GiB of memory, above 0 to 1048576",
        "memory_gib = 64",
    ),
    "gpus": (_whole_up_to(1024), "a number of GPUs, 1 to 1024", "gpus = 8"),
    "gpu_memory_gib": (
        _positive_up_to(_MOST_GIB),
        "GiB of memory of each GPU, above 0 to 1048576",
        "gpu_memory_gib = 80",
    ),
    "devices": (
        _is_devices,
        "a number and a kind of GPU",
        'devices = "8xH100"',
    ),
    "region": (_is_name, "a name", 'region = "east"'),
    "price": (
        _positive_up_to(10**6),
        "a price an hour, above 0",
        "price = 98.32",
    ),
    "labels": (_are_texts, "texts by name", 'labels = { gpu = "H100" }'),
    "between": (_is_pair, "two hosts or regions", 'between = ["a", "b"]'),
    "gigabits": (
        _positive_up_to(10**6),
        "Gb a second, above 0",
        "gigabits = 400",
    ),
    "delay_ms": (
        _positive_up_to(10**5),
        "milliseconds, above 0",
        "delay_ms = 30",
    ),
}
"""Key -> whether a value fits, what is expected, and the fix."""

_OF_LINKS = ("between", "gigabits", "delay_ms")
_OF_HOSTS = tuple(key for key in _KEYS if key not in _OF_LINKS)


class _ClusterFile:
    """A cluster file, and the lines of its keys, which tomllib does not tell."""

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text = path, text

    def parse(self) -> dict[str, Any]:
        """Parse the file as TOML. Raises PlanError, which names the line where TOML does."""
        try:
            return tomllib.loads(self._text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            where = f"cluster file {self._path}"
            if line := re.search(r"at line (\d+)", str(error)):
                where += f":{line[1]}"
            raise PlanError(f"{where}: expected TOML: {error}. Fix: {_EXAMPLE}.") from error

    def value(self, table: str, keys: Mapping[str, Any], key: str, default: Any = None) -> Any:
        """The value of a key of a table. Raises PlanError for one that does not fit, or that is
        missing and has no default.
        """
        fits, expected, fix = _KEYS[key]
        setting = keys.get(key, default)
        if (key in keys or default is None) and not fits(setting):
            problem = f"{key}: expected {expected}, found {setting!r}"
            raise self.wrong(table, key, problem, fix)
        return setting

    def refuse_unknown(self, table: str, keys: Mapping[str, Any], known: Iterable[str]) -> None:
        """Raise PlanError for a key of a table that means nothing."""
        for key in keys:
            if key not in known:
                fix = nearest_or_all(key, list(known))
                raise PlanError(f"{self._at(table, key)}: unknown key {key!r}. Fix: {fix}.")

    def wrong(self, table: str, key: str, problem: str, fix: str) -> PlanError:
        """Make an error that names the line of a key, and the host whose table it is in."""
        _, _, host = table.partition(".")
        if host:
            problem = f"host {host}: {problem}"
        return PlanError(f"{self._at(table, key)}: {problem}. Fix: {fix}.")

    def _at(self, table: str, key: str) -> str:
        """`cluster file cluster.toml:7`; no line for a key not written as `key =` in its table."""
        heading = f"{table}.{key}" if table else key
        inside = ""
        for number, line in enumerate(self._text.splitlines(), 1):
            words = line.partition("#")[0].strip()
            if words.startswith("["):
                inside = words.strip("[] ")
                if inside == heading:
                    return f"cluster file {self._path}:{number}"
            elif inside == table and words.partition("=")[0].strip().strip("\"'") == key:
                return f"cluster file {self._path}:{number}"
        return f"cluster file {self._path}"


_EXAMPLE = "[hosts.a] with cores = 8 and memory_gib = 64"


def _read_text(path: Path) -> str:
    """The file's text. Raises PlanError for what is no file of UTF-8 text."""
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
