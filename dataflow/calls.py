"""Calls of the language: the user's line of a call, and what is refused right there.

Owns: the wrappers that turn a call that does not bind into one clear error, which knows other
systems' names, and the line that messages name. Does not own: what a call means (node.py,
operators), what only the whole graph shows (rules/).
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any, ParamSpec, TypeVar

from dataflow.errors import Fault, GraphError, Origin, nearest
from dataflow.names import Known, peer_name

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")

_OURS = (
    f"{Path(__file__).parent}{os.sep}",
    f"{Path(__file__).parent.parent / 'operators'}{os.sep}",
)


def call_site() -> Origin:
    """The nearest frame outside the language itself and its declarations: the user's line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_code):
        frame = frame.f_back
    return Origin(file=frame.f_code.co_filename, line=frame.f_lineno)


def _is_ours(code: CodeType) -> bool:
    """Whether a frame is the language's own; a constructor written by `dataclass` has no file."""
    return code.co_filename.startswith(_OURS) or (
        code.co_filename == "<string>" and code.co_name == "__init__"
    )


def declares(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function of the language: a call that does not bind becomes a GraphError that knows
    other systems' names.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_unknown(function.__name__, signature, args, kwargs)
        return function(*args, **kwargs)

    return call


def constructs(kind: type[C]) -> type[C]:
    """The same for a dataclass of the language: `Model(trainabel=True)` names the nearest field."""
    signature, construct = inspect.signature(kind), kind.__init__

    @functools.wraps(construct)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(kind.__name__, signature, args, kwargs)
        construct(self, *args, **kwargs)

    kind.__init__ = call  # type: ignore[method-assign]
    return kind


def refused(where: str, problem: str, fix: str) -> GraphError:
    """The GraphError for a call that makes no sense, at the user's line."""
    return GraphError(Fault(rule="call", where=where, problem=problem, fix=fix, origin=call_site()))


def require(where: str, name: str, value: object, *, fits: bool, expected: str, fix: str) -> None:
    """Raise GraphError if an argument does not fit: `expected <name> to be <expected>, found
    <value>`.
    """
    if not fits:
        raise refused(where, f"expected {name} to be {expected}, found {value!r:.60}", fix)


def refuse_unknown(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise GraphError if the arguments do not fit the signature."""
    known = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for key, given in kwargs.items():
        if key not in known:
            raise GraphError(_unknown(name, key, given, known))
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        fix = f"{name}({_usage(signature)})"
        # Python 3.12 and later say the kind of a missing argument, too.
        problem = str(error).replace("required keyword-only argument", "required argument")
        fault = Fault(rule="call", where=name, problem=problem, fix=fix, origin=call_site())
        raise GraphError(fault) from None


def signature_of(fn: Any, what: str, like: str) -> inspect.Signature:
    """The signature of a user's function, annotations evaluated. like: an example of one.

    Raises GraphError for anything but a function, for an annotation that is not found, and for
    `*args` and `**kwargs`, whose content is unknown.
    """
    name = getattr(fn, "__name__", repr(fn))
    if not callable(fn) or not hasattr(fn, "__qualname__") or isinstance(fn, type):
        raise refused(what, f"expected a function, found {type(fn).__name__} {fn!r:.60}", like)
    try:
        signature = inspect.signature(fn, eval_str=True)
    except NameError as error:
        fix = f"import {error.name} in the file of {name}, or define it above"
        raise refused(
            f"{what} {name}", f"its annotations name {error.name!r}, which is not found", fix
        ) from None
    except (TypeError, ValueError, SyntaxError) as error:
        raise refused(f"{what} {name}", f"its signature cannot be read: {error}", like) from None
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise refused(
                f"{what} {name}",
                f"expected parameters that have a name each, found {parameter}",
                like,
            )
    return signature


def _usage(signature: inspect.Signature) -> str:
    """`model, rows, loss=..., lr=...`: the parameters without a default."""
    needed = [p for p in signature.parameters.values() if p.default is p.empty]
    marks = {inspect.Parameter.KEYWORD_ONLY: "{}=...", inspect.Parameter.VAR_POSITIONAL: "{}, ..."}
    return ", ".join(
        marks.get(p.kind, "{}").format(p.name) for p in needed if p.kind is not p.VAR_KEYWORD
    )


def _unknown(name: str, key: str, given: Any, known: list[str]) -> Fault:
    there = Known(options=known) if name == "RunOptions" else Known(parameters=known)
    if (peer := peer_name(key, there)) is not None:
        problem = f"unknown parameter {key!r} ({peer.system}'s name)"
        fix = peer.told(there, given, flag=False)
    else:
        near = nearest(key, known)
        problem = f"unknown parameter {key!r}"
        fix = f"{near}={given!r}" if near else f"one of: {', '.join(known)}"
    return Fault(rule="call", where=name, problem=problem, fix=fix, origin=call_site())
