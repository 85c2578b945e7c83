"""Text of a file in which the lines of faults say which test reaches them.

Owns: where a call can stand, and the function that is called. Does not own: who runs the tests, and
what is made of the answers (reach.py).

The function stands in each file itself, and needs nothing but `os`: processes with a path of their
own (`python -I -S`) run some of these files. pytest names the test in the environment, which
processes that the test starts inherit.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tests.mutants.code_faults import CodeFault, line_number, parsed

VARIABLE = "PYTEST_CURRENT_TEST"
_CALL = "_note_that_a_test_is_here"
_FUNCTION = f'''
def {_CALL}(fault, noted=set()):
    """Append the fault and the test to a file, once in a process."""
    import os
    test = os.environ.get("{VARIABLE}", "").rpartition(" (")[0]
    if not test or (fault, test) in noted:
        return
    noted.add((fault, test))
    try:
        file = os.open(%r, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, (fault + "\\t" + test + "\\n").encode())
        finally:
            os.close(file)
    except OSError:  # no descriptor is left, or no room: the test is about that
        pass
'''


def with_probes(text: str, faults: Iterable[CodeFault], notes: Path) -> str:
    """Add a call before the statement of each fault. notes: the file to which the calls append."""
    lines = text.splitlines(keepends=True)
    calls = [(statement_line(line_number(fault, text), text), fault.name) for fault in faults]
    for number, name in sorted(calls, reverse=True):  # from below, so that the numbers stay true
        line = lines[number - 1]
        indentation = line[: len(line) - len(line.lstrip())]
        lines.insert(number - 1, f"{indentation}{_CALL}({name!r})\n")
    lines.insert(_first_free_line(text) - 1, _FUNCTION % str(notes))
    return "".join(lines)


def statement_line(number: int, text: str) -> int:
    """Find where the statement begins that has this line. For a branch that is the whole `if`,
    `try` or `match`, before which something can stand.
    """
    return max(first for first, last in _statement_spans(text) if first <= number <= last)


@lru_cache(maxsize=256)
def _statement_spans(text: str) -> list[tuple[int, int]]:
    """The first and last line of each statement before which something can stand."""
    lines = text.splitlines()
    statements = [node for node in ast.walk(parsed(text)) if isinstance(node, ast.stmt)]
    spans = [(_first(node), node.end_lineno or node.lineno) for node in statements]
    # An `elif` is an `if` in the `else` of another.
    return [span for span in spans if not lines[span[0] - 1].lstrip().startswith("elif ")]


def _first(node: ast.stmt) -> int:
    """Its first line, decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def _first_free_line(text: str) -> int:
    """The line after the module's docstring and its imports from `__future__`."""
    body = parsed(text).body
    number = 1
    for node in body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")):
            break
        number = (node.end_lineno or node.lineno) + 1
    return number
