"""Which tests reach the line of each fault: recorded once, and the tests that a fault is tried on.

Owns: the run with probes, reached.json, and the choice. Does not own: the trial (trials.py).

Several records add up: a test that ran again replaces what it was before. A test that did not pass
in the copy is left out, as it would seem to catch everything.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutants.code_faults import CodeFault
from tests.mutants.line_probes import with_probes
from tests.mutants.pytest_records import RECORDS
from tests.mutants.tree_copies import TreeCopy

REACHED = Path(__file__).parent / "reached.json"
BUDGET = 20.0
"""Seconds of the tests that a fault is tried on."""
QUICK, QUICK_IN_ALL, MOST_QUICK = 0.5, 8.0, 80
"""A quick test takes at most so many seconds; all quick ones of a fault so many, and so many are
taken: the rest of the budget is for tests with processes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """seconds: of each test that is kept. tests: by fault, in the order in which they run."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    tests: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_reach(path: Path = REACHED) -> Reach:
    """Read what was recorded; nothing if there is no such file."""
    if not path.is_file():
        return Reach()
    record = json.loads(path.read_text(encoding="utf-8"))
    names = [name for name, _ in record["tests"]]
    tests = {fault: tuple(names[n] for n in numbers) for fault, numbers in record["reach"].items()}
    return Reach(seconds=dict(record["tests"]), tests=tests)


def write_reach(reach: Reach, path: Path = REACHED) -> None:
    """Write it with a line for each test and each fault; tests of faults by number."""
    names = sorted({test for tests in reach.tests.values() for test in tests})
    number = {name: place for place, name in enumerate(names)}
    tests = [json.dumps([name, reach.seconds[name]]) for name in names]
    faults = [
        f"{json.dumps(fault)}: {json.dumps([number[test] for test in reach.tests[fault]])}"
        for fault in sorted(reach.tests)
    ]
    shown_tests, shown_faults = ",\n".join(tests), ",\n".join(faults)
    text = f'{{"tests": [\n{shown_tests}\n],\n"reach": {{\n{shown_faults}\n}}}}\n'
    path.write_text(text, encoding="ascii")


def record(faults: Sequence[CodeFault], pytest_arguments: Sequence[str]) -> tuple[Reach, int]:
    """Run these tests in a copy with probes. Returns what they reach and pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        copy = TreeCopy(folder / "tree")
        notes, outcomes = folder / "notes", folder / "outcomes"
        notes.touch()
        outcomes.touch()
        insert_probes(copy, faults, notes)
        command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.pytest_records"]
        command += ["-p", "no:cacheprovider", *pytest_arguments]
        environment = copy.environment(**{RECORDS: str(outcomes)})
        status = subprocess.call(command, cwd=copy.folder, env=environment)
        return reach_of(outcomes.read_text(), notes.read_text(errors="replace")), status


def insert_probes(copy: TreeCopy, faults: Iterable[CodeFault], notes: Path) -> None:
    """Write probes into each file that has faults."""
    by_file: dict[str, list[CodeFault]] = defaultdict(list)
    for fault in faults:
        by_file[fault.file].append(fault)
    for file, here in by_file.items():
        copy.write(file, with_probes(copy.read(file), here, notes))


def reach_of(outcomes: str, notes: str) -> Reach:
    """What a run has recorded. outcomes: lines of pytest_records.py; notes: of line_probes.py."""
    ended = [json.loads(line) for line in outcomes.splitlines()]
    failed = {each["test"] for each in ended if not each["passed"]}
    seconds = {each["test"]: each["seconds"] for each in ended if each["test"] not in failed}
    tests: dict[str, dict[str, None]] = defaultdict(dict)
    for line in notes.splitlines():
        fault, _, test = line.partition("\t")
        if test in seconds:
            tests[fault][test] = None
    return Reach(seconds=seconds, tests={fault: tuple(names) for fault, names in tests.items()})


def added_up(
    before: Reach, new: Reach, faults: Iterable[CodeFault], caught: Mapping[str, str]
) -> Reach:
    """Join two records. Faults that are no longer in the list are left out. caught: by which test
    each fault was caught before.
    """
    seconds = {**before.seconds, **new.seconds}
    tests: dict[str, tuple[str, ...]] = {}
    for fault in faults:
        stay = [t for t in before.tests.get(fault.name, ()) if t not in new.seconds]
        names = dict.fromkeys([*stay, *new.tests.get(fault.name, ())])
        if names:
            tests[fault.name] = choose(names, seconds, caught.get(fault.name, ""))
    return Reach(seconds=seconds, tests=tests)


def choose(
    tests: Iterable[str], seconds: Mapping[str, float], caught_by: str = ""
) -> tuple[str, ...]:
    """Choose tests that reach a line, for BUDGET seconds as recorded, so that a busy machine tries
    no others: first quick ones, then longer ones, in turn from each file; and in any case the one
    that caught the fault before. The quickest runs first.
    """
    turns = _in_turn(tests, seconds)
    quick = [test for test in turns if seconds[test] <= QUICK]
    others = [test for test in turns if seconds[test] > QUICK]
    chosen = _within(quick, seconds, QUICK_IN_ALL)[:MOST_QUICK]
    left = BUDGET - sum(seconds[test] for test in chosen)
    chosen += _within(others, seconds, left)
    # One that takes longer than the budget is better than none.
    chosen = chosen or turns[:1]
    if caught_by in turns and caught_by not in chosen:
        chosen.append(caught_by)
    return tuple(sorted(chosen, key=lambda test: (seconds[test], test)))


def _in_turn(tests: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
    """The quickest test of each file, then the second of each; a function comes once before it
    comes with further parameters.
    """
    by_file: dict[str, list[tuple[int, float, str]]] = defaultdict(list)
    times: dict[str, int] = defaultdict(int)
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        function = test.partition("[")[0]
        by_file[test.partition("::")[0]].append((times[function], seconds[test], test))
        times[function] += 1
    turns: list[tuple[int, float, str]] = []
    for entries in by_file.values():
        for turn, (_, duration, test) in enumerate(sorted(entries)):
            turns.append((turn, duration, test))
    return [test for _, _, test in sorted(turns)]


def _within(tests: Iterable[str], seconds: Mapping[str, float], most: float) -> list[str]:
    """Those that fit into so many seconds, the earlier ones first."""
    chosen: list[str] = []
    for test in tests:
        if seconds[test] <= most:
            most -= seconds[test]
            chosen.append(test)
    return chosen
