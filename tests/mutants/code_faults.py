"""The list of faults: small changes of one line, each of which some test should notice.

Owns: reading the list, finding the line of each, writing it into the text of its file. Does not
own: copies of the tree (tree_copies.py), nor which tests reach a line (line_probes.py, reach.py).
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "faults"
KINDS = frozenset({"bound", "cleanup", "comparison", "hash", "key", "message", "order", "wait"})
"""A bound off by one, something left behind, a comparison turned, a hash not compared, another
number or name, a message dropped, another order, a wait left out.
"""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class FaultListError(Exception):
    """The list and the code do not fit together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFault:
    """line, becomes: without indentation. within: the function that has the line, as NAME or
    CLASS.NAME; empty if the line occurs once in the file. lost: what no longer holds, in words.
    """

    name: str
    file: str
    line: str
    becomes: str
    kind: str
    lost: str
    within: str = ""


def read_faults(folder: Path = FOLDER) -> list[CodeFault]:
    """Read the whole list. Raises FaultListError if two have one name, or a kind is unknown."""
    faults: list[CodeFault] = []
    for path in sorted(folder.glob("*.toml")):
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
        faults += [CodeFault(**entry) for entry in entries]
    names = [fault.name for fault in faults]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise FaultListError(f"expected one fault of each name, found more: {', '.join(repeated)}")
    unknown = sorted(fault.name for fault in faults if fault.kind not in KINDS)
    if unknown:
        kinds = ", ".join(sorted(KINDS))
        raise FaultListError(f"expected a kind of {kinds}; another has: {', '.join(unknown)}")
    return faults


def line_number(fault: CodeFault, text: str) -> int:
    """Find the line in the text of its file: its number, from 1 on. Raises FaultListError, which
    names the fault, if it is not there exactly once.
    """
    spans = [(1, len(text.splitlines()))]
    if fault.within:
        spans = [span for name, span in function_spans(text) if _is_named(name, fault.within)]
    numbers = [
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() == fault.line and any(first <= number <= last for first, last in spans)
    ]
    if len(set(numbers)) != 1:
        place = f"{fault.file}, {fault.within}" if fault.within else fault.file
        problem = f"expected its line once in {place}, found it {len(set(numbers))} times"
        fix = "Fix: write the line as it is now, or leave the fault out."
        raise FaultListError(f"fault {fault.name}: {problem}: {fault.line}. {fix}")
    return numbers[0]


def with_fault(fault: CodeFault, text: str) -> str:
    """Write the fault into the text of its file."""
    number = line_number(fault, text)
    lines = text.splitlines(keepends=True)
    line = lines[number - 1]
    indentation = line[: len(line) - len(line.lstrip())]
    lines[number - 1] = f"{indentation}{fault.becomes}\n"
    return "".join(lines)


@lru_cache(maxsize=256)
def parsed(text: str) -> ast.Module:
    """Parse the text of a file, once for all faults in it."""
    return ast.parse(text)


@lru_cache(maxsize=256)
def function_spans(text: str) -> list[tuple[str, tuple[int, int]]]:
    """The functions of a file: its name with that of its class, first and last line."""
    return list(_spans_below(parsed(text), ""))


def _spans_below(node: ast.AST, prefix: str) -> Iterator[tuple[str, tuple[int, int]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}.{child.name}" if prefix else child.name
            if isinstance(child, Function):
                yield name, (child.lineno, child.end_lineno or child.lineno)
            yield from _spans_below(child, name)
        else:
            yield from _spans_below(child, prefix)


def _is_named(qualified: str, name: str) -> bool:
    return qualified == name or qualified.endswith(f".{name}")
