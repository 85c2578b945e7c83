"""What each test costs: seconds, CPU seconds of its own process and of all that it started.

Owns: measuring, and one line of JSON for each test in a file. Does not own: adding up and printing
(scripts/ci-times). Active where TEST_COSTS names a file; each test process appends to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

VARIABLE = "TEST_COSTS"
_TICKS = os.sysconf("SC_CLK_TCK")
_PARENT, _USER, _CHILDREN_END = 1, 11, 15
"""Fields of /proc/PID/stat after the name: the parent; then user, system, and both of the children
that were waited for.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestCost:
    """suite: what this run of pytest is called. All in seconds. children: CPU of processes that the
    test started, and of theirs.
    """

    __test__ = False  # or pytest would collect it
    suite: str
    test: str
    wall: float
    own: float
    children: float


@dataclass(frozen=True, slots=True)
class _Moment:
    wall: float
    own: float
    children: float


def _stat(pid: str) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def children_seconds(pid: int) -> float:
    """CPU seconds of all that a process has started, whether it still runs or was waited for.

    A process that was waited for is counted in its parent's fields, so the sum over all that still
    run loses nothing but orphans that have ended.
    """
    stats: dict[int, list[str]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stats[int(entry)] = _stat(entry)
    offspring: dict[int, list[int]] = {}
    for each, fields in stats.items():
        offspring.setdefault(int(fields[_PARENT]), []).append(each)
    ticks = sum(map(int, stats[pid][_USER + 2 : _CHILDREN_END]))
    waiting = list(offspring.get(pid, ()))
    while waiting:
        each = waiting.pop()
        ticks += sum(map(int, stats[each][_USER:_CHILDREN_END]))
        waiting += offspring.get(each, ())
    return ticks / _TICKS


def _now() -> _Moment:
    return _Moment(time.perf_counter(), time.process_time(), children_seconds(os.getpid()))


class CostRecords:
    """A pytest plugin."""

    def __init__(self, path: Path, suite: str) -> None:
        self._path = path
        self._suite = suite
        self._last = _now()

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Collecting is a line of its own."""
        if session.items:
            self._append("(collecting)", _Moment(self._last.wall, 0.0, 0.0))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Fixtures of a module or session count to the first test that needs them."""
        begin = _now()
        try:
            return (yield)
        finally:
            self._append(item.nodeid, begin)

    @pytest.hookimpl
    def pytest_sessionfinish(self) -> None:
        self._append("(ending)", self._last)

    def _append(self, test: str, begin: _Moment) -> None:
        self._last = end = _now()
        cost = TestCost(
            suite=self._suite,
            test=test,
            wall=round(end.wall - begin.wall, 4),
            own=round(end.own - begin.own, 4),
            children=round(end.children - begin.children, 2),
        )
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(cost)) + "\n")


def cost_records(suite: str) -> CostRecords | None:
    """The plugin, where the environment asks for it."""
    named = os.environ.get(VARIABLE)
    return CostRecords(Path(named), suite) if named else None
