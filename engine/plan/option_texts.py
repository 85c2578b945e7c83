"""An option of a run as one text: `threads=8`, `tensor.rollout=4`, `replicas.rollout=2`.

Owns: setting one. Does not own: the options (options.py), who writes such texts (`--what-if`,
`--relayout`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from dataflow.errors import PlanError
from engine.plan.options import PLANNED, RunOptions

_GROUPS = ("together", "turns")
CHANGEABLE = tuple(name for name in PLANNED if name not in _GROUPS)
"""Options that one value of a text gives."""


def set_option(options: RunOptions, key: str, text: str, *, where: str) -> RunOptions:
    """Set an option of the run, `threads`, or a node's of one that is a table, `tensor.rollout`.
    where: the flag, for errors. Raises PlanError for a KEY or a value that means nothing.
    """
    name, dot, node = key.partition(".")
    name = name.replace("-", "_")
    hint = get_type_hints(RunOptions)[name]
    is_table = _is_table(hint)
    if is_table != bool(dot):
        like = f"{name}.NODE" if is_table else name
        problem = f"{key}: expected {like}"
        raise PlanError(f"{where}: {problem}, found {key}={text}. Fix: {like}={text}.")
    unparsed: Any = text
    if is_table:
        unparsed = {**getattr(options, name), node: text}
    try:
        parsed = msgspec.convert(unparsed, hint, strict=False)
    except msgspec.ValidationError as error:
        expected, fix = _describe_values(hint)
        problem = f"{key}: expected {expected}, found {text!r}"
        raise PlanError(f"{where}: {problem}. Fix: {key}={fix}.") from error
    return replace(options, **{name: parsed})


def _is_table(hint: Any) -> bool:
    """Whether an option has a value for each node."""
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _describe_values(hint: Any) -> tuple[str, str]:
    """What an option takes, or one value of a table, and values of it."""
    if _is_table(hint):
        hint = get_args(hint)[1]
    literals = [literal for literal in get_args(hint) if isinstance(literal, str)]
    if literals:
        return f"one of {', '.join(literals)}", ",".join(literals[:2])
    if hint is bool:
        return "true or false", "true,false"
    return "a whole number", "1,2,4"
