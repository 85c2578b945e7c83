"""How a node's use reads in code, in a drawing's few letters.

Owns: which parameters of a node are shown, and values in words. Does not own: a node's other facts
(picture.py).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from dataflow.dialect import PARAMETER
from dataflow.json_values import is_own_module
from dataflow.loss import Loss, LossTerm
from dataflow.loss_terms import ROWS, row_sets
from dataflow.model import Buffer, Schedule
from dataflow.node import Node

_LONGEST = 32
"""Letters of a text that is shown whole."""


def call_of(node: Node, dialect: str) -> str:
    """The node's call in code: its States, then every parameter that differs from its default, or
    from its graph's dialect where it follows that.
    """
    operator = node.operator
    defaults = declared_defaults(operator.path, operator.name, operator.function)
    arguments = [s.name for s in node.states.values() if not isinstance(s, Buffer)]
    term_rows = {name: port.label for name, port in row_sets(node).items() if name != ROWS}
    for name, parameter in node.params.items():
        if isinstance(parameter, Loss):
            terms = [_describe_term(term, dialect, term_rows) for term in parameter.terms]
            arguments.append(" + ".join(terms))
        else:
            arguments += _describe_setting(name, parameter, defaults, dialect)
    return f"{operator.name}({', '.join(arguments)})"


def _describe_setting(
    name: str, parameter: Any, defaults: Mapping[str, Any] | None, dialect: str
) -> list[str]:
    """`name=value`, or the value of a parameter that needs no name; nothing where it is the
    default.
    """
    if _holds_functions(parameter):
        return [shown_value(parameter)]
    if defaults is not None:
        if name not in defaults or _equal(defaults[name], parameter):
            return []
        # The graph's dialect, which is said once for all nodes that follow it.
        if name == PARAMETER and parameter == dialect and defaults[name] is None:
            return []
    if name == "data":
        return [shown_value(parameter)]
    return [f"{name}={shown_value(parameter)}"]


def _holds_functions(parameter: Any) -> bool:
    if callable(parameter):
        return True
    return isinstance(parameter, tuple) and bool(parameter) and all(map(callable, parameter))


def _describe_term(term: LossTerm, dialect: str, term_rows: Mapping[str, str]) -> str:
    """`0.1 * clipped_policy_loss(beta=0.1)`. term_rows: the rows that terms have of their own, by
    input.
    """
    function = term.function
    defaults = declared_defaults(function.path, function.name, function.fn)
    settings: list[str] = []
    for name, parameter in term.params:
        settings += _describe_setting(name, parameter, defaults, dialect)
    if term.on in term_rows:
        settings.append(f"rows={term_rows[term.on]}")
    words = function.name
    if settings:
        words += f"({', '.join(settings)})"
    if _equal(term.weight, 1.0):
        return words
    return f"{shown_value(term.weight)} * {words}"


def _equal(default: Any, parameter: Any) -> bool:
    """Whether a parameter is its default; a default of 1 is the same as 1.0."""
    return type(default) in (type(parameter), int) and default == parameter


@functools.cache
def declared_defaults(
    path: str, name: str, function: Callable[..., Any] | None
) -> Mapping[str, Any] | None:
    """The parameters of the function that users call, with their defaults (Parameter.empty if there
    is none).

    This project's functions are next to the declaration, under the operator's name; a user's is the
    declared function itself, so that nothing is imported to draw a graph. None if it is not found:
    then every parameter is shown.
    """
    module = path.partition(":")[0]
    if is_own_module(module):
        function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        return None
    parameters = inspect.signature(function).parameters.values()
    passes_on = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
    # `(*args, **kwargs)` says nothing of what may be given.
    if passes_on and len(parameters) <= 2:
        return None
    return {parameter.name: parameter.default for parameter in parameters}


def shown_value(value: Any) -> str:
    """A parameter's value in a few characters."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-").replace("e+0", "e+")
    if isinstance(value, str):
        text = shorten(value)
        has_space = any(letter.isspace() for letter in value)
        return f'"{text}"' if has_space else text
    if isinstance(value, Schedule):
        return _describe_schedule(value)
    if isinstance(value, (list, tuple)):
        return _describe_sequence(value)
    if callable(value):
        return _describe_function(value)
    return str(value)


def _describe_sequence(members: list[Any] | tuple[Any, ...]) -> str:
    words = ", ".join(map(shown_value, members))
    is_function = len(members) == 1 and callable(members[0])
    if isinstance(members, list) or is_function:
        return words
    return f"({words})"


def _describe_schedule(schedule: Schedule) -> str:
    """`linear 1e-06..0 in 100 after 10 warm-up`."""
    words = start = shown_value(schedule.start)
    if schedule.kind != "constant":
        stop = shown_value(schedule.stop)
        words = f"{schedule.kind} {start}..{stop} in {schedule.steps}"
    if schedule.warmup:
        words += f" after {schedule.warmup} warm-up"
    return words


def _describe_function(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "lambda" if name == "<lambda>" else name


def shorten(text: str) -> str:
    """The end of a long path or text."""
    if len(text) <= _LONGEST:
        return text
    last_part = PurePath(text).name
    if "/" in text and len(last_part) < _LONGEST:
        return f".../{last_part}"
    return f"...{text[-_LONGEST + 3 :]}"
