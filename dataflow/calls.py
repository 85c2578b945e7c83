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
from dataflow.peer_parameters import Known, peer_name

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")

_LANGUAGE = Path(__file__).parent
_OURS = (f"{_LANGUAGE}{os.sep}", f"{_LANGUAGE.parent / 'operators'}{os.sep}")


def call_site() -> Origin:
    """Find the user's line: the nearest frame outside the language and its declarations."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_code):
        frame = frame.f_back
    return Origin(file=frame.f_code.co_filename, line=frame.f_lineno)


def _is_ours(code: CodeType) -> bool:
    """Whether a frame is the language's own."""
    if code.co_filename.startswith(_OURS):
        return True
    # A constructor written by `dataclass` has no file.
    return code.co_filename == "<string>" and code.co_name == "__init__"


def declares(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function of the language: a call that does not bind becomes a GraphError, which knows
    other systems' names.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_unknown(function.__name__, signature, args, kwargs)
        return function(*args, **kwargs)

    return call


def constructs(kind: type[C]) -> type[C]:
    """Do the same for a dataclass of the language: for `Model(trainabel=True)`, the error names the
    nearest field.
    """
    signature, construct = inspect.signature(kind), kind.__init__

    @functools.wraps(construct)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(kind.__name__, signature, args, kwargs)
        construct(self, *args, **kwargs)

    kind.__init__ = call  # type: ignore[method-assign]
    return kind


def call_error(where: str, problem: str, fix: str) -> GraphError:
    """Make the GraphError for a call that makes no sense, at the user's line."""
    return GraphError(Fault(rule="call", where=where, problem=problem, fix=fix, origin=call_site()))


def require(
    where: str, name: str, argument: object, *, fits: bool, expected: str, fix: str
) -> None:
    """Raise GraphError if an argument does not fit: `expected <name> to be <expected>, found
    <argument>`.
    """
    if not fits:
        raise call_error(where, f"expected {name} to be {expected}, found {argument!r:.60}", fix)


def refuse_unknown(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise GraphError if the arguments do not fit the signature."""
    parameters = signature.parameters.values()
    known_names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    for keyword, argument in kwargs.items():
        if keyword not in known_names:
            raise _unknown_parameter(name, keyword, argument, known_names)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        # Python 3.12 and later say the kind of a missing argument, too.
        problem = str(error).replace("required keyword-only argument", "required argument")
        raise call_error(name, problem, f"{name}({_usage(signature)})") from None


def signature_of(fn: Any, what: str, like: str) -> inspect.Signature:
    """Read the signature of a user's function, annotations evaluated. like: an example of one.

    Raises GraphError for anything but a function, for an annotation that is not found, and for
    `*args` and `**kwargs`, whose content is unknown.
    """
    name = getattr(fn, "__name__", repr(fn))
    if not callable(fn) or not hasattr(fn, "__qualname__") or isinstance(fn, type):
        raise call_error(what, f"expected a function, found {type(fn).__name__} {fn!r:.60}", like)
    where = f"{what} {name}"
    try:
        signature = inspect.signature(fn, eval_str=True)
    except NameError as error:
        problem = f"its annotations name {error.name!r}, which is not found"
        fix = f"import {error.name} in the file of {name}, or define it above"
        raise call_error(where, problem, fix) from None
    except (TypeError, ValueError, SyntaxError) as error:
        raise call_error(where, f"its signature cannot be read: {error}", like) from None
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            problem = f"expected parameters that have a name each, found {parameter}"
            raise call_error(where, problem, like)
    return signature


_USAGES = {
    inspect.Parameter.KEYWORD_ONLY: "{}=...",
    inspect.Parameter.VAR_POSITIONAL: "{}, ...",
}
"""How a message writes a parameter; others by their name alone."""


def _usage(signature: inspect.Signature) -> str:
    """`model, rows, loss=..., lr=...`: the parameters without a default."""
    usages: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            usages.append(_USAGES.get(parameter.kind, "{}").format(parameter.name))
    return ", ".join(usages)


def _unknown_parameter(
    name: str, keyword: str, argument: Any, known_names: list[str]
) -> GraphError:
    # A run's options have peer names of their own.
    if name == "RunOptions":
        known = Known(options=known_names)
    else:
        known = Known(parameters=known_names)
    problem = f"unknown parameter {keyword!r}"
    if (peer := peer_name(keyword, known)) is not None:
        fix = peer.write_fix(known, argument, flag=False)
        return call_error(name, f"{problem} ({peer.system}'s name)", fix)
    near = nearest(keyword, known_names)
    fix = f"{near}={argument!r}" if near else f"one of: {', '.join(known_names)}"
    return call_error(name, problem, fix)
