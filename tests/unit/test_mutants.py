"""The list of faults (scripts/mutants) fits the code, and each can be written and reached."""

from __future__ import annotations

import ast
import textwrap
from collections import defaultdict
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
from tests.mutants.line_probes import with_probes

FAULTS = read_faults()
LEAST = 80


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_there_are_enough_faults_in_all_rooms() -> None:
    files = {fault.file for fault in FAULTS}
    assert len(FAULTS) >= LEAST
    for room in ("coordinator", "launch", "launched", "run", "channels", "weights", "checkpoint"):
        assert any(file.startswith(f"engine/{room}/") for file in files), room


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


def test_each_file_takes_its_probes() -> None:
    by_file: dict[str, list[CodeFault]] = defaultdict(list)
    for fault in FAULTS:
        by_file[fault.file].append(fault)
    for file, faults in by_file.items():
        ast.parse(with_probes(text_of(file), faults, Path("notes")))


def test_a_line_that_is_gone_or_there_twice_names_its_fault() -> None:
    fault = CodeFault(
        name="one", file="f.py", line="x = 1", becomes="x = 2", kind="key", lost="x", within="f"
    )
    with pytest.raises(FaultListError, match=r"fault one: .* found it 0 times"):
        line_number(fault, "def g():\n    x = 1\n")
    with pytest.raises(FaultListError, match=r"fault one: .* found it 2 times"):
        line_number(fault, "def f():\n    x = 1\n    x = 1\n")
    assert with_fault(fault, "x = 1\ndef f():\n    x = 1\n") == "x = 1\ndef f():\n    x = 2\n"
