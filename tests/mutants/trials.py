"""The trial of one fault: it is written into a copy of the tree, and the tests that reach it run.

Owns: the copy while the trial lasts, the limits, and ending all that the tests leave. Does not own:
which tests these are (reach.py), nor what was caught before (verdicts.py).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.kit.processes import ended, kill, new_mark, of_session
from tests.mutants.code_faults import CodeFault, with_fault
from tests.mutants.pytest_records import RECORDS, SECONDS
from tests.mutants.tree_copies import TreeCopy
from tests.mutants.verdicts import TrialVerdict

LATEST = 60.0
"""After so many seconds no other test begins: they were chosen to take a third of that
(reach.py).
"""
SLOWER = 4.0
"""A test may take so many times as long as it took when it was recorded, as two trials share the
machine; a fault that makes it take longer is caught by that.
"""
LEAST_LIMIT = 20.0
"""Seconds that each test may take in any case."""
START = 40.0
"""Seconds for pytest to start and to end, beyond what its tests may take."""
MARK = "DATAFLOW_MUTANT"
"""A variable in the environment of a trial. tests/kit/processes.py has one that tests themselves
set.
"""
_COLLECTION_FAILED = (2, 3, 4)
_TEXT = 2_000


def try_fault(
    fault: CodeFault, tests: Sequence[str], seconds: Mapping[str, float], copy: TreeCopy
) -> TrialVerdict:
    """Run these tests with the fault. The copy is afterwards as it was."""
    if not tests:
        return TrialVerdict(fault=fault.name, outcome="not reached")
    before = copy.read(fault.file)
    copy.write(fault.file, with_fault(fault, before))
    try:
        return _tried(fault, tests, seconds, copy)
    finally:
        copy.write(fault.file, before)


def _tried(
    fault: CodeFault, tests: Sequence[str], seconds: Mapping[str, float], copy: TreeCopy
) -> TrialVerdict:
    recorded = [seconds[test] for test in tests]
    limit, in_all = max(LEAST_LIMIT, SLOWER * max(recorded)), sum(recorded)
    scratch = copy.folder.parent / f"{copy.folder.name}-scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    records = scratch / "records"
    records.touch()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", f"--timeout={limit:g}"]
    command += ["-p", "no:cacheprovider", "-p", "tests.mutants.pytest_records"]
    command += [f"--basetemp={scratch / 'tests'}", *tests]
    mark = new_mark()
    chosen = {RECORDS: str(records), SECONDS: f"{LATEST:g}", MARK: mark}
    begin = time.monotonic()
    with (scratch / "output").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=copy.folder,
            env=copy.environment(**chosen),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(START + max(limit, SLOWER * in_all))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_all(process, mark)
    took = round(time.monotonic() - begin, 1)
    text = (scratch / "output").read_text(errors="replace")
    verdict = _judge(fault, status, read_records(records), text, took)
    shutil.rmtree(scratch, ignore_errors=True)
    return verdict


def _judge(
    fault: CodeFault,
    status: int | None,
    outcomes: Sequence[Mapping[str, Any]],
    text: str,
    took: float,
) -> TrialVerdict:
    """What a run of pytest says of a fault. status: None if it was killed."""
    failed = next((each["test"] for each in outcomes if each["failed"]), "")
    ran = len(outcomes)
    if failed:
        return TrialVerdict(fault=fault.name, outcome="caught", by=failed, seconds=took, ran=ran)
    if status is None:
        return TrialVerdict(fault=fault.name, outcome="hung", seconds=took, ran=ran)
    if status < 0:  # a signal: a fault that lets the interpreter read beyond its memory
        by = f"pytest was ended by signal {-status}"
        return TrialVerdict(fault=fault.name, outcome="caught", by=by, seconds=took, ran=ran)
    if status in _COLLECTION_FAILED:  # the others go on: all of them take half an hour
        fix = "Record anew, if tests were renamed; or write a fault that can be imported."
        print(f"fault {fault.name}: its tests cannot be run. Fix: {fix}\n{text[-_TEXT:]}")
        return TrialVerdict(fault=fault.name, outcome="not run", seconds=took)
    if status != 0:
        by = f"pytest ended with exit status {status}"
        return TrialVerdict(fault=fault.name, outcome="caught", by=by, seconds=took, ran=ran)
    return TrialVerdict(fault=fault.name, outcome="survived", seconds=took, ran=ran)


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def end_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill all processes of a trial, until none is left: one that dies may just have forked."""
    end = time.monotonic() + START
    while time.monotonic() < end:
        left = {*of_session(process.pid), *_with_mark(mark)}
        if process.poll() is None:
            left.add(process.pid)
        if not left:
            break
        kill(left)
        for pid in left - {process.pid}:
            ended(pid, 1.0)
        process.poll()  # else it would stay as one that nobody has waited for
    process.wait()


def _with_mark(mark: str) -> list[int]:
    """Processes that inherited the mark of a trial and have not ended."""
    wanted = f"{MARK}={mark}".encode()
    pids: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and wanted in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
    return pids
