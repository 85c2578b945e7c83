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


def read_cluster(path: Path) -> Cluster:
    """The hosts of a cluster file. Raises PlanError for a file that is missing or not TOML, and for
    impossible values.
    """
    file = _ClusterFile(path, _text(path))
    data = file.tables()
    file.refuse_unknown("", data, ("hosts", "links"))
    tables = data.get("hosts", {})
    if not isinstance(tables, Mapping):
        raise file.wrong("", "hosts", f"hosts: expected tables, found {tables!r}", "[hosts.a]")
    hosts = [host for name, said in tables.items() for host in _hosts(file, name, said)]
    _refuse_repeated(file, hosts)
    if not hosts:
        problem = "expected hosts, found none"
        raise PlanError(f"cluster file {path}: {problem}. Fix: {_EXAMPLE}.")
    known = [*tables, *(host.name for host in hosts), *(h.region for h in hosts if h.region)]
    return with_first(hosts, links=tuple(_links(file, data.get("links", []), known)))


def _hosts(file: _ClusterFile, name: str, said: Any) -> Iterator[Host]:
    """As many as the table stands for."""
    if not _NAME.fullmatch(name) or not isinstance(said, Mapping):
        problem = f"host {name}: expected a table of that name"
        raise file.wrong("hosts", name, problem, "[hosts.b] with cores and memory_gib")
    table = f"hosts.{name}"
    file.refuse_unknown(table, said, _OF_HOSTS)
    kind, gpus = _gpus(file, table, said)
    count = int(file.value(table, said, "count", 1))
    for number in range(count):
        yield Host(
            name=name if "count" not in said else f"{name}-{number}",
            cores=int(file.value(table, said, "cores")),
            memory=int(file.value(table, said, "memory_gib") * 2**30),
            gpus=gpus,
            kind=kind,
            region=file.value(table, said, "region", ""),
            price=float(file.value(table, said, "price", 0)),
            labels=({"gpu": kind} if kind else {}) | dict(file.value(table, said, "labels", {})),
            table=name if "count" in said else "",
        )


def _refuse_repeated(file: _ClusterFile, hosts: Sequence[Host]) -> None:
    """Raises PlanError for a name that two hosts have, or a host and a region."""
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


def _gpus(file: _ClusterFile, table: str, said: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Their kind and the memory of each. Raises PlanError for an unknown kind, unless its memory is
    said: then a profile may know its rates.
    """
    if "devices" not in said:
        count = int(file.value(table, said, "gpus", 0))
        size = file.value(table, said, "gpu_memory_gib") if count else 0
        return "", (int(size * 2**30),) * count
    if "gpus" in said:
        problem = "expected devices or gpus, found both"
        raise file.wrong(table, "gpus", problem, "devices alone, which says how many")
    found = _DEVICES.fullmatch(file.value(table, said, "devices"))
    assert found is not None, "the value fits"
    count, kind = int(found[1]), found[2]
    known = {name: d.memory for name, d in catalogue().devices.items() if name != CPU}
    if "gpu_memory_gib" in said:
        return kind, (int(file.value(table, said, "gpu_memory_gib") * 2**30),) * count
    if kind not in known:
        problem = f"devices: expected a kind of the catalogue, found {kind!r}"
        fix = f"{nearest_or_all(kind, list(known))}, or gpu_memory_gib and a profile of it"
        raise file.wrong(table, "devices", problem, f"{fix}: dataflow profile GRAPH there")
    return kind, (known[kind],) * count


def _links(file: _ClusterFile, tables: Any, known: Iterable[str]) -> Iterator[ClusterLink]:
    if not isinstance(tables, list):
        problem = f"links: expected tables, found {tables!r}"
        raise file.wrong("", "links", problem, '[[links]] with between = ["a", "b"]')
    names = list(dict.fromkeys(known))
    for said in tables:
        if not isinstance(said, Mapping):
            problem = f"links: expected tables, found {said!r}"
            raise file.wrong("", "links", problem, '[[links]] with between = ["a", "b"]')
        file.refuse_unknown("links", said, _OF_LINKS)
        one, other = file.value("links", said, "between")
        for name in (one, other):
            if name not in names:
                problem = f"between: expected hosts or regions of this file, found {name!r}"
                raise file.wrong("links", "between", problem, nearest_or_all(name, names))
        yield ClusterLink(
            between=(one, other),
            rate=file.value("links", said, "gigabits") * 1e9 / 8,
            delay=file.value("links", said, "delay_ms", NETWORK_DELAY * 1e3) / 1e3,
        )


def _positive(value: Any, most: int) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= most  # nan is none of these


def _whole(value: Any, most: int) -> bool:
    return _positive(value, most) and value == int(value)


def _text_of(value: Any) -> bool:
    return isinstance(value, str) and bool(_NAME.fullmatch(value))


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value)


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


_MOST_GIB = 2**20
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "count": (lambda v: _whole(v, 65536), "a number of hosts, 1 to 65536", "count = 16"),
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
    "devices": (
        lambda v: isinstance(v, str) and bool(_DEVICES.fullmatch(v)),
        "a number and a kind of GPU",
        'devices = "8xH100"',
    ),
    "region": (_text_of, "a name", 'region = "east"'),
    "price": (lambda v: _positive(v, 10**6), "a price an hour, above 0", "price = 98.32"),
    "labels": (_texts, "texts by name", 'labels = { gpu = "H100" }'),
    "between": (_pair, "two hosts or regions", 'between = ["a", "b"]'),
    "gigabits": (lambda v: _positive(v, 10**6), "Gb a second, above 0", "gigabits = 400"),
    "delay_ms": (lambda v: _positive(v, 10**5), "milliseconds, above 0", "delay_ms = 30"),
}
"""Key -> whether a value fits, what is expected, and the fix."""

_OF_LINKS = ("between", "gigabits", "delay_ms")
_OF_HOSTS = tuple(key for key in _VALUES if key not in _OF_LINKS)


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
