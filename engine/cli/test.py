"""`dataflow test TARGET`: what an operator or a loss promises, tested on generated rows.

Owns: the command's own flags, and the lines on the screen. Does not own: promises
(dataflow/testing.py names who does).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from dataflow.testing import EXAMPLES, contract
from engine.cli.flag_values import registry
from engine.cli.screen import read_flags, say
from engine.cli.target import load_function


@dataclass(frozen=True, slots=True, kw_only=True)
class TestOptions:
    """Test what an operator on columns, or a loss, promises; one line for each promise.

    TARGET is module:function or file.py:function. A promise that is broken is shown with the
    smallest rows that break it.
    """

    __test__ = False
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    set: Mapping[str, str] = field(default_factory=dict)
    """Values of its parameters (weight=0.5)."""
    examples: int = EXAMPLES
    """Generated batches for each promise."""


def main(arguments: Sequence[str]) -> int:
    """Test all; 1 if a promise is broken."""
    options = read_flags(
        TestOptions,
        args=arguments,
        prog="dataflow test",
        about=inspect.getdoc(TestOptions) or "",
        registry=registry(),
    )
    function = load_function(options.target, "TARGET")
    parameters = {name: _value_of(text) for name, text in options.set.items()}
    suite = contract(function, examples=options.examples, **parameters)
    broken = 0
    wide = max(map(len, suite.promises))
    for verdict in suite.verdicts():
        if verdict.outcome == "broken":
            broken += 1
            say(verdict.text)
            continue
        line = f"{verdict.promise:<{wide}}  {verdict.outcome}"
        if verdict.outcome == "kept":
            line += f": {verdict.says}"
        elif verdict.outcome in ("not promised", "not judged"):
            line += f": {verdict.text}"
        say(line)
    return 1 if broken else 0


def _value_of(text: str) -> Any:
    """Read a number, True, None, a tuple of them; anything else is text."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
