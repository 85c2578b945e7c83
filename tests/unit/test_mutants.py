"""The list of faults (scripts/mutants) fits the code, and each can be written and reached."""

from __future__ import annotations

import ast
import json
import textwrap
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.code_faults import (
    ROOT,
    CodeFault,
    FaultListError,
    function_spans,
    line_number,
    read_faults,
    with_fault,
)
from tests.mutants.line_probes import statement_line, with_probes
from tests.mutants.reach import BUDGET, Reach, added_up, choose, reach_of, read_reach, write_reach
from tests.mutants.verdicts import TrialVerdict, no_longer_caught, read_caught, write_caught

FAULTS = read_faults()
LEAST = 80
ROOMS = (
    "coordinator",
    "run/launch",
    "run/worker_process",
    "run/loop",
    "channels",
    "weights",
    "keep/checkpoint",
)


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text()


def test_there_are_enough_faults_in_all_rooms() -> None:
    files = {fault.file for fault in FAULTS}
    assert len(FAULTS) >= LEAST
    for room in ROOMS:
        assert any(file.startswith(f"engine/{room}/") for file in files), room


@pytest.mark.long
def test_each_fault_applies_and_is_python() -> None:
    """Only the function around it is parsed: 250 whole files take seconds."""
    for fault in FAULTS:
        text = text_of(fault.file)
        number = line_number(fault, text)
        around = [span for _, span in function_spans(text) if span[0] <= number <= span[1]]
        first, last = max(around)
        before, after = (
            ast.dump(ast.parse(textwrap.dedent("".join(each.splitlines(True)[first - 1 : last]))))
            for each in (text, with_fault(fault, text))
        )
        assert before != after, fault.name


FAULT = CodeFault(name="one", file="f.py", line="x = 1", becomes="x = 2", kind="key", lost="x")


def test_a_line_that_is_gone_or_there_twice_names_its_fault() -> None:
    fault = replace(FAULT, within="f")
    with pytest.raises(FaultListError, match=r"fault one: .* found it 0 times"):
        line_number(fault, "def g():\n    x = 1\n")
    with pytest.raises(FaultListError, match=r"fault one: .* found it 2 times"):
        line_number(fault, "def f():\n    x = 1\n    x = 1\n")
    assert with_fault(fault, "x = 1\ndef f():\n    x = 1\n") == "x = 1\ndef f():\n    x = 2\n"


PLACES = """\
@wraps(
    other,
)
def f():
    if b:
        pass
    elif c:
        a = [
            2,
        ]
    else:
        pass
    match a:
        case 1:
            pass
"""


@pytest.mark.parametrize(
    ("number", "first"), [(2, 1), (4, 1), (5, 5), (6, 6), (7, 5), (9, 8), (11, 5), (14, 13)]
)
def test_a_probe_stands_before_the_whole_statement(number: int, first: int) -> None:
    assert statement_line(number, PLACES) == first


def test_a_probe_notes_each_test_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "notes"
    text = with_probes(
        '"""Of it."""\n\nfrom __future__ import annotations\nx = 1\n', [FAULT], notes
    )
    names: dict[str, object] = {}
    exec(text.replace("\nx = 1", "\nx = 1\n" + "_note_that_a_test_is_here('one')\n"), names)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/a.py::b (c) (teardown)")
    names["_note_that_a_test_is_here"]("one")  # type: ignore[operator]
    tests = [line.split("\t")[1] for line in notes.read_text().splitlines()]
    here = "tests/unit/test_mutants.py::test_a_probe_notes_each_test_once"
    assert tests == [here, "tests/a.py::b (c)"]
    assert names["x"] == 1


def test_records_add_up_and_tests_that_failed_are_left_out() -> None:
    fault = FAULTS[0]
    lines = [
        {"test": "a.py::x", "passed": True, "failed": False, "seconds": 2.0},
        {"test": "a.py::y", "passed": False, "failed": True, "seconds": 1.0},
        {"test": "b.py::z", "passed": True, "failed": False, "seconds": 0.1},
    ]
    notes = "".join(f"{fault.name}\t{line['test']}\n" for line in lines)
    new = reach_of("".join(json.dumps(line) + "\n" for line in lines), notes)
    assert new.tests == {fault.name: ("a.py::x", "b.py::z")}
    before = Reach(
        seconds={"a.py::x": 9.0, "c.py::w": 1.0, "d.py::v": 1.0},
        tests={fault.name: ("a.py::x", "c.py::w"), "gone": ("d.py::v",)},
    )
    together = added_up(before, new, [fault], {})
    assert together.tests == {fault.name: ("b.py::z", "c.py::w", "a.py::x")}
    assert together.seconds["a.py::x"] == 2.0


def test_every_file_and_function_has_its_turn() -> None:
    many = {f"a.py::x[{number}]": 0.1 + number / 1e4 for number in range(200)}
    seconds = many | {"a.py::y": 1.0, "b.py::z": 5.0, "c.py::w": 19.0}
    chosen = choose(seconds, seconds)
    assert {"a.py::x[0]", "a.py::y", "b.py::z"} <= set(chosen)
    assert chosen[-1] == "b.py::z", "another 19 seconds would be too many"
    assert choose(seconds, seconds, "c.py::w") == (*chosen, "c.py::w"), "it caught the fault before"
    assert sum(seconds[test] for test in chosen) <= BUDGET
    assert choose(["d.py::v"], {"d.py::v": 50.0}) == ("d.py::v",)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    reach = Reach(
        seconds={"a::x": 0.5, "b::y": 1.0}, tests={"one": ("b::y", "a::x"), "two": ("a::x",)}
    )
    write_reach(reach, tmp_path / "reached.json")
    assert read_reach(tmp_path / "reached.json") == reach


def test_only_what_was_caught_before_can_be_lost(tmp_path: Path) -> None:
    path = tmp_path / "caught.json"
    hung = TrialVerdict(fault="two", outcome="hung")
    write_caught([TrialVerdict(fault="one", outcome="caught", by="a::x"), hung], path)
    write_caught([TrialVerdict(fault="three", outcome="survived")], path)
    before = read_caught(path)
    assert before == {"one": "a::x", "two": "a time-out"}
    now = [
        TrialVerdict(fault="one", outcome="not reached"),
        TrialVerdict(fault="two", outcome="caught", by="a::y"),
        TrialVerdict(fault="three", outcome="survived"),
    ]
    assert no_longer_caught(now, before) == now[:1]
