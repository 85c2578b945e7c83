"""A user's own module beside a base, as the trained part of a Model.

Owns: what a user says of it, and what is refused for itself. Does not own: the other kinds of
trained parts (adapters.py), the module and its place in the base's (operators/kernels/torch), files
(side_files.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dataflow.calls import call_error, refuse_unknown, require, signature_of

Build = Callable[..., Any]
"""`build(base_config, **params)`, which makes the module."""
_LIKE = "side(make_side, width=64), with def make_side(base_config, width: int)"
_WHERE = "side"
_START = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A module of a user's own beside a base: `side` makes it. params: names and arguments."""

    build: Build
    params: tuple[tuple[str, Any], ...] = ()
    start: str | None = None

    @property
    def path(self) -> str:
        """`module:function` of what makes it."""
        return f"{self.build.__module__}:{self.build.__qualname__}"

    def with_params(self, params: Mapping[str, Any]) -> Side:
        """The same one with these params, `start` among them, in the place of those of their names.
        Raises GraphError as `side`.
        """
        changed_params = dict(self.params) | {_START: self.start}
        changed_params.update(params)
        start = changed_params.pop(_START)
        return _make_side(self.build, start, changed_params)

    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters of the function that it may set, by name. Raises GraphError as `side`."""
        return _list_parameters(self.build)

    def __str__(self) -> str:
        """`side(mine:make_side, width=64)`."""
        arguments = [self.path]
        for name, argument in self.params:
            arguments.append(f"{name}={argument!r}")
        if self.start is not None:
            arguments.append(f"{_START}={self.start!r}")
        return f"side({', '.join(arguments)})"


def side(build: Build, *, start: str | None = None, **params: Any) -> Side:
    """Train a module of one's own beside a base that stays as it is: it reads what every decoder
    layer leaves at a token, and says what the head reads there. Nothing is computed backward below
    it.

    build: a function at the top level of a module, `build(base_config, **params)`, which returns a
    torch module, drawn from the run's seed and the Model's name. The module is called with
    `states`, a tuple of what each layer leaves, and `last`, what the last norm leaves, all of shape
    [1, tokens, hidden] and of the Model's dtype, and returns a tensor of last's shape and dtype. It
    reads each token alone: rows are packed, and decoded a token at a time. All of its parameters
    are trained. start: a folder with a saved one, with which it begins. params: numbers, texts,
    True, False, None, and tuples of these.

    Source: SHERL, arXiv:2407.07523, section 3, whose late route reads the layers' outputs.
    """
    return _make_side(build, start, params)


def _make_side(build: Build, start: str | None, params: Mapping[str, Any]) -> Side:
    known_parameters = _list_parameters(build)
    frozen: list[tuple[str, Any]] = []
    for name, argument in params.items():
        frozen.append((name, _freeze(name, argument)))
    _require_bound(build, known_parameters, params)
    fits = start is None or (isinstance(start, str) and bool(start))
    fix = "start='path/to/side'"
    require(_WHERE, _START, start, fits=fits, expected="text or None", fix=fix)
    return Side(build=build, params=tuple(sorted(frozen)), start=start)


def _list_parameters(build: Any) -> dict[str, inspect.Parameter]:
    signature = signature_of(build, _WHERE, _LIKE)
    if "<" in build.__qualname__:
        problem = (
            f"expected a function at the top level of a module, which other processes import, found"
            f" {build.__qualname__}"
        )
        raise call_error(_WHERE, problem, "a def at the top level of a module")
    known = list(signature.parameters.values())
    if not known or known[0].kind is inspect.Parameter.KEYWORD_ONLY:
        problem = f"expected {build.__name__} to take the base's configuration, found no place"
        raise call_error(_WHERE, problem, _LIKE)
    parameters = {parameter.name: parameter for parameter in known[1:]}
    if _START in parameters:
        problem = f"{build.__name__} has a parameter {_START!r}, which names a saved module here"
        raise call_error(_WHERE, problem, "another name for it")
    return parameters


def _require_bound(build: Build, known: dict[str, inspect.Parameter], params: Any) -> None:
    """Refuse arguments that the function does not take, and such that it lacks."""
    keywords = [each.replace(kind=each.KEYWORD_ONLY) for each in known.values()]
    where = f"{_WHERE} {build.__name__}"
    refuse_unknown(where, inspect.Signature(keywords), (), params)


def _freeze(name: str, argument: Any) -> Any:
    """The argument as what can be written and compared: a list as a tuple. Raises GraphError."""
    if isinstance(argument, (list, tuple)):
        return tuple(_freeze(name, part) for part in argument)
    fits = argument is None or isinstance(argument, (bool, int, float, str))
    expected = "a number, text, True, False, None, or a tuple of these"
    require(_WHERE, name, argument, fits=fits, expected=expected, fix=f"{name}=64")
    return argument
