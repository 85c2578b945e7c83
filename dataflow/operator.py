"""Operators: declarations of what a node may be.

Owns: what an operator says of itself (inputs, outputs, rows, scope, States, kernels) and
the wrapper that turns a bad call into one clear error. Does not own: a use of an operator
(node.py), a user's own operators (user.py), nor anything that runs.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, ParamSpec, TypeVar

from dataflow.errors import Fault, GraphError, Origin, nearest
from dataflow.limits import Limit
from dataflow.names import PEER_NAMES
from dataflow.schema import Schema

P = ParamSpec("P")
R = TypeVar("R")

Work = Literal["source", "host", "decode", "forward", "train", "evaluate", "select", "store", "replay", "record"]
"""What a node's kernel does; the planner sizes it and the coordinator schedules it by this."""

Scope = Literal["row", "group", "batch"]
"""The least set of rows that a kernel must see at once."""

Keeps = Literal["rows", "groups", "pairs"]
"""What a selection leaves of a group: any rows, all or none, or two."""


@dataclass(frozen=True, slots=True)
class Same:
    """Output rows are those of an input."""

    of: str


@dataclass(frozen=True, slots=True)
class Expand:
    """Each row of an input becomes n rows; n is the name of a parameter. Expand by 1 keeps the input's rows."""

    of: str
    n: str


@dataclass(frozen=True, slots=True)
class Subset:
    """Some of the input's rows; made by `select` only."""

    of: str


@dataclass(frozen=True, slots=True)
class Fresh:
    """Rows of its own: a source, or a draw from a Buffer. `per` rows stand on each position."""

    per: int = 1


@dataclass(frozen=True, slots=True)
class Nothing:
    """A sink: no rows come out."""


Rows = Same | Expand | Subset | Fresh | Nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A data input of an operator, or of a loss.

    rows: `rows` (the same rows as the first input) or `parent` (an ancestor's rows, looked up by key).
    columns: those that are read; None means all that the schema declares.
    ancestors: columns read from whatever the rows descend from (dataset columns, the prompt); `ancestors_from` names a
    parameter that lists further ones, `*` for all of them, and `required_from` one that lists those of them without
    which the node cannot work.
    """

    name: str
    schema: type[Schema]
    rows: Literal["rows", "parent"] = "rows"
    optional: bool = False
    columns: tuple[str, ...] | None = None
    ancestors: tuple[str, ...] = ()
    ancestors_from: str = ""
    required_from: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A declaration. `path` is module:attribute, where a snapshot finds it again."""

    path: str
    name: str
    work: Work
    rows: Rows
    scope: Scope = "row"
    inputs: tuple[Input, ...] = ()
    variadic: Input | None = None
    """Any number of further inputs of this kind, named `<name>0`, `<name>1`, ..."""
    outputs: tuple[type[Schema], ...] = ()
    reads: tuple[str, ...] = ()
    """State parameters that it reads."""
    writes: tuple[str, ...] = ()
    kernels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Kernel name -> module:Class, in order of preference."""
    keeps: Keeps | None = None
    """Of an operator that says which rows stay: what it promises to leave of a group, which its kernel verifies."""
    schedulable: tuple[str, ...] = ()
    """Parameters that take a schedule of the Step."""
    limits: Mapping[str, Limit] = field(default_factory=lambda: MappingProxyType({}))
    """Parameter -> the values it takes; the check refuses others."""
    data_columns: str = ""
    """Of a source that reads its parameter `data`: module:function of (data, split) that answers the file's columns."""
    data_files: str = ""
    """Likewise: module:function of (data, split) that answers the files behind it, in the order of reading."""
    normalises: Literal["", "group", "batch"] = ""
    """Of an operator on advantages: over which rows it makes them comparable."""
    function: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    """A user operator's own function."""

    def input(self, name: str) -> Input:
        """The declared input of that name (numbered ones are the variadic's)."""
        for known in self.inputs:
            if known.name == name:
                return known
        if self.variadic is None:
            raise KeyError(name)
        return self.variadic


_OURS = (f"{Path(__file__).parent}{os.sep}", f"{Path(__file__).parent.parent / 'operators'}{os.sep}")


def call_site() -> Origin:
    """The nearest frame outside of the language itself and its declarations: the user's line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return Origin(file=frame.f_code.co_filename, line=frame.f_lineno)


def declares(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function of the language: a call that does not bind becomes a GraphError that knows the peers' names."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_unknown(function.__name__, signature, args, kwargs)
        return function(*args, **kwargs)

    return call


def refuse_unknown(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise GraphError where the arguments do not fit the signature."""
    known = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for key, given in kwargs.items():
        if key not in known:
            raise GraphError(_unknown(name, key, given, known))
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        fix = f"{name}({_usage(signature)})"
        fault = Fault(rule="call", where=name, problem=str(error), fix=fix, origin=call_site())
        raise GraphError(fault) from None


def _usage(signature: inspect.Signature) -> str:
    """`model, rows, loss=..., lr=...`: what has no default."""
    needed = [p for p in signature.parameters.values() if p.default is p.empty]
    marks = {inspect.Parameter.KEYWORD_ONLY: "{}=...", inspect.Parameter.VAR_POSITIONAL: "{}, ..."}
    return ", ".join(marks.get(p.kind, "{}").format(p.name) for p in needed if p.kind is not p.VAR_KEYWORD)


def _unknown(name: str, key: str, given: Any, known: list[str]) -> Fault:
    ours, system = PEER_NAMES.get(key, (None, ""))
    if ours in known:
        problem, fix = f"unknown parameter {key!r} ({system}'s name)", f"{ours}={given!r}"
    elif ours is not None and " " in ours:
        problem, fix = f"unknown parameter {key!r} ({system}'s name)", ours
    else:
        near = nearest(key, known)
        problem = f"unknown parameter {key!r}"
        fix = f"{near}={given!r}" if near else f"one of: {', '.join(known)}"
    return Fault(rule="call", where=name, problem=problem, fix=fix, origin=call_site())
