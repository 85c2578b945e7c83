"""Tests on several processes, which are forked once all tests are collected.

    process    waits for                                        unblocked by
    first      reports, a request for the next test             a test process; its end
    others     the number of the next test                      the first

Owns: which process runs which test, and bringing reports back. Does not own: running a test, and
printing (pytest). Active with TEST_WORKERS=2 or more; pytest-xdist collects in each process anew,
which takes each of them half a minute of a core.

Tests are dealt in as many runs of neighbours as there are processes, so that the fixtures of a
module are made once; whoever has none left takes the last ones of the longest run. A process that
ends fails the test that it was at, and another one goes on.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest

from engine.run.control import lifeline
from tests.kit import forked

WORKERS = "TEST_WORKERS"
NUMBER = "TEST_WORKER"
"""In the environment of a test process: its number."""
_END = -1
"""In the place of a test's number: there is none left."""


@dataclass(slots=True, eq=False)
class _TestProcess:
    """As the first process sees it. tests: still to be told. running: told, and not ended."""

    number: int
    tests: deque[int]
    pid: int = 0
    pipe: Connection = field(init=False)
    running: deque[int] = field(default_factory=deque)


class ParallelTests:
    """A pytest plugin."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._processes: list[_TestProcess] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests; None leaves them to pytest, where one process is enough."""
        count = len(session.items)
        if session.config.option.collectonly or session.testsfailed or count < 2:
            return None
        _prepare(session)
        self._processes = [
            _TestProcess(number, deque(tests))
            for number, tests in enumerate(_dealt(count, min(self._workers, count)))
        ]
        try:
            for process in self._processes:
                self._start(process, session)
            self._run(session)
        finally:
            self._end()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _start(self, process: _TestProcess, session: pytest.Session) -> None:
        mine, theirs = Pipe()
        parent = os.getpid()
        process.pid = os.fork()
        if not process.pid:
            mine.close()
            _run_tests(session, theirs, process.number, parent)
        theirs.close()
        process.pipe = mine

    def _run(self, session: pytest.Session) -> None:
        under_way = {process.pipe: process for process in self._processes}
        while under_way:
            for pipe in wait(list(under_way)):
                process = under_way[pipe]  # type: ignore[index]
                try:
                    kind, value = process.pipe.recv()
                except EOFError:
                    del under_way[process.pipe]
                    if self._has_died(process, session):
                        self._start(process, session)
                        under_way[process.pipe] = process
                    continue
                if kind == "next":
                    process.pipe.send(self._next(process, session))
                else:
                    self._take(process, value, session)

    def _next(self, process: _TestProcess, session: pytest.Session) -> int:
        if session.shouldstop or session.shouldfail:
            return _END
        if not process.tests:
            longest = max(self._processes, key=lambda each: len(each.tests))
            if not longest.tests:
                return _END
            # Half of it, so that modules stay together.
            stolen = [longest.tests.pop() for _ in range((len(longest.tests) + 1) // 2)]
            process.tests.extend(reversed(stolen))
        test = process.tests.popleft()
        process.running.append(test)
        return test

    def _take(self, process: _TestProcess, data: dict[str, Any], session: pytest.Session) -> None:
        hook = session.config.hook
        report = hook.pytest_report_from_serializable(config=session.config, data=data)
        hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            process.running.popleft()
            hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)

    def _has_died(self, process: _TestProcess, session: pytest.Session) -> bool:
        """Whether it ended before its time; its test has then failed."""
        status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        process.pid = 0
        process.pipe.close()
        if not process.running:
            return False
        test = session.items[process.running.popleft()]
        process.tests.extendleft(reversed(process.running))
        process.running.clear()
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        report = pytest.TestReport(
            nodeid=test.nodeid,
            location=test.location,
            keywords={},
            outcome="failed",
            longrepr=f"its process ended with {how}",
            when="call",
        )
        session.config.hook.pytest_runtest_logreport(report=report)
        return True

    def _end(self) -> None:
        for process in self._processes:
            if process.pid:
                os.kill(process.pid, signal.SIGKILL)
                os.waitpid(process.pid, 0)
                process.pipe.close()


def _prepare(session: pytest.Session) -> None:
    """What all have in common is made before they are forked."""
    folders: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
    folders.getbasetemp()
    reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter.showfspath = False  # tests of two files come by turns


def _dealt(count: int, workers: int) -> Iterator[range]:
    for number in range(workers):
        yield range(count * number // workers, count * (number + 1) // workers)


def _run_tests(session: pytest.Session, pipe: Connection, number: int, parent: int) -> NoReturn:
    """In a test process: run the tests that it is given, to the end."""
    code = 1
    try:
        lifeline.die_with(parent)
        _become(session, number)
        session.config.pluginmanager.register(_Reporter(session, pipe), "reporter of tests")
        test = _asked(pipe)
        while test != _END:
            following = _asked(pipe)
            item = session.items[test]
            item.config.hook.pytest_runtest_protocol(
                item=item, nextitem=None if following == _END else session.items[following]
            )
            test = following
        code = 0
    finally:
        os._exit(code)


def _become(session: pytest.Session, number: int) -> None:
    """Let this process print nothing, and have a folder and captured output of its own."""
    forked.install()
    plugins, config = session.config.pluginmanager, session.config
    plugins.unregister(plugins.getplugin("terminalreporter"))
    captures: Any = plugins.getplugin("capturemanager")
    if captures is not None:
        captures.suspend_global_capture()
        captures.stop_global_capturing()
        captures.start_global_capturing()
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"p{number}"
    folders._basetemp.mkdir(mode=0o700, exist_ok=True)
    os.environ[NUMBER] = str(number)


def _asked(pipe: Connection) -> int:
    pipe.send(("next", None))
    return pipe.recv()


class _Reporter:
    """Sends what a test came to."""

    def __init__(self, session: pytest.Session, pipe: Connection) -> None:
        self._session = session
        self._pipe = pipe

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._pipe.send(("report", data))


def parallel_tests() -> ParallelTests | None:
    """The plugin, where the environment asks for it."""
    workers = int(os.environ.get(WORKERS) or 0)
    return ParallelTests(workers) if workers > 1 else None
