"""What a parameter takes, and the value that a text means for it.

Owns: reading a text as a Python literal, a call of a constructor of values, or plain text, and
which of these a parameter accepts. Does not own: limits (limits.py), which parameters there are
(set_expressions.py). Nothing is evaluated: a call is one of the constructors given here, of
literals.
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dataflow.calls import refused
from dataflow.errors import GraphError, nearest
from dataflow.limits import Limit
from dataflow.schedule import Schedule, cosine, linear, warmup

_SCHEDULES: Mapping[str, Callable[..., Any]] = {
    "linear": linear,
    "cosine": cosine,
    "warmup": warmup,
}
_WORDS = {"true": True, "false": False, "none": None}
_PLAIN = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
_MANY = {int: "whole numbers", float: "numbers", bool: "True and False", str: "texts"}
_LISTS = (list, tuple, collections.abc.Sequence)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The values of one parameter. limit: those that its declaration takes; hint: its annotation,
    which counts where there is no limit; schedulable: also a schedule of the Step.
    """

    limit: Limit | None = None
    hint: Any = Any
    schedulable: bool = False

    def accepts(self, value: Any) -> bool:
        """Whether the parameter takes this value."""
        if _scheduled(value) and not (self.schedulable and self.limit):
            return self.schedulable and isinstance(value, Schedule)
        if value is None and self.hint is not Any:
            return _fits(None, self.hint)
        return self.limit.accepts(value) if self.limit else _fits(value, self.hint)

    @property
    def expected(self) -> str:
        """`a number >= 0`, as in "expected a number >= 0"."""
        words = self.limit.expected() if self.limit else _words(self.hint)
        if self.limit and self.limit.of:
            words = f"{_constructor(self.limit.of).__name__}(...)"
        if self.limit and None in self._parts and not words.endswith("None"):
            words += " or None"
        if self.limit and self.limit.kind == "texts":
            words = words.replace("a string or several", "text or a list of texts")
        return f"{words}, or a schedule" if self.schedulable else words

    @property
    def _parts(self) -> tuple[Any, ...]:
        parts = get_args(self.hint) if get_origin(self.hint) in _UNIONS else ()
        return tuple(None if part is types.NoneType else part for part in parts)

    def read(self, text: str) -> Any:
        """The value that this text means here. Raises ValueError if it is none that the parameter
        takes, GraphError if a constructor refuses its arguments.
        """
        more = ""
        for value in self._readings(text):
            value = self._as_declared(value)
            if self.accepts(value):
                return value
            more = more or self._more(value)
        raise ValueError(f"expected {self.expected}{more}, found {_found(text)!r:.60}")

    def _more(self, value: Any) -> str:
        """What the limit says of this value besides what it says of all: its precision."""
        if self.limit is None:
            return ""
        return self.limit.expected(value).removeprefix(self.limit.expected())

    def fix(self, text: str) -> str:
        """A value that is accepted, as text; empty if none is known."""
        if name := _called(text):
            near = nearest(name, self.constructors)
            return f"{near}{text.strip()[len(name) :]}" if near and near != name else ""
        like = self.limit.suggestion(text) if self.limit else None
        return "" if like is None else like if isinstance(like, str) else repr(like)

    @property
    def constructors(self) -> dict[str, Callable[..., Any]]:
        """Name -> the constructors of values that this parameter takes."""
        found = dict(_SCHEDULES) if self.schedulable else {}
        classes = [self.limit.of] if self.limit and self.limit.of else list(_classes(self.hint))
        for kind in classes:
            constructor = _constructor(kind)
            found[constructor.__name__] = constructor
        return found

    def _readings(self, text: str) -> Iterator[Any]:
        try:
            yield self._value(ast.parse(text.strip(), mode="eval").body)
        except GraphError:  # it is a ValueError, but of a constructor
            raise
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass  # then it is plain text
        yield text

    def _value(self, node: ast.AST) -> Any:
        """Raises ValueError for what is neither a literal nor a call of a constructor."""
        if isinstance(node, ast.Name) and node.id.lower() in _WORDS:
            return _WORDS[node.id.lower()]
        if isinstance(node, (ast.Tuple, ast.List)):
            items = [self._value(item) for item in node.elts]
            return tuple(items) if isinstance(node, ast.Tuple) else items
        if not isinstance(node, ast.Call):
            return ast.literal_eval(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in self.constructors:
            raise ValueError(name)
        positional = [self._argument(name, argument) for argument in node.args]
        named = {k.arg: self._argument(name, k.value) for k in node.keywords if k.arg}
        if len(named) < len(node.keywords):
            raise refused(name, "expected arguments by name, found **", f"{name}(...)")
        return self.constructors[name](*positional, **named)

    def _argument(self, name: str, node: ast.AST) -> Any:
        try:
            return self._value(node)
        except GraphError:
            raise
        except ValueError:
            found = ast.unparse(node)
            problem = f"expected literals as arguments, found {found:.60}"
            raise refused(name, problem, f"{found!r:.60}, if it is text") from None

    def _as_declared(self, value: Any) -> Any:
        """Whole numbers as float where numbers are meant, a list as the pair or the texts it is."""
        kind = self.limit.kind if self.limit else ""
        if kind == "texts" and (value is None or isinstance(value, str)):
            return () if value is None else (value,)
        several = self.limit is not None and (self.limit.pair or kind == "texts")
        value = tuple(value) if several and isinstance(value, list) else value
        return _floated(value) if self._number else value

    @property
    def _number(self) -> bool:
        if self.limit is not None:
            return self.limit.kind == "number"
        return "float" in str(self.hint) and "int" not in str(self.hint)


_UNIONS = (Union, types.UnionType)


def _floated(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_floated, value))
    small = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
    return float(value) if small else value


def _found(text: str) -> Any:
    """What a text is, for a message: the literal, else the text itself."""
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def _called(text: str) -> str:
    """The name of the constructor that a text calls; empty if it calls none."""
    name, mark, _ = text.strip().partition("(")
    return name if mark and name.isidentifier() and text.strip().endswith(")") else ""


def _scheduled(value: Any) -> bool:
    several = isinstance(value, (tuple, list)) and any(isinstance(v, Schedule) for v in value)
    return isinstance(value, Schedule) or several


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type; what is unknown fits."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return any(_fits(value, part) for part in inside)
    if origin is Literal:
        return any(type(value) is type(known) and value == known for known in inside)
    if origin in _LISTS or hint in _LISTS:
        return isinstance(value, (list, tuple)) and all(
            _fits(item, inside[0]) for item in value if inside
        )
    if hint is Any:
        return True
    if hint is None or hint is types.NoneType:
        return value is None
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, origin or hint) if isinstance(origin or hint, type) else True


def _words(hint: Any) -> str:
    """An annotation in the words of messages."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return " or ".join(dict.fromkeys(_words(p) for p in inside if p is not Schedule))
    if origin is Literal:
        return " or ".join(map(repr, inside))
    if origin in _LISTS or hint in _LISTS:
        return f"a list of {_MANY.get(inside[0], 'values')}" if inside else "a list"
    if hint is None or hint is types.NoneType:
        return "None"
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return f"{_constructor(hint).__name__}(...)"
    return _PLAIN.get(hint, "a value" if hint is Any else getattr(hint, "__name__", str(hint)))


def _classes(hint: Any) -> Iterator[type[Any]]:
    """The dataclasses in an annotation, which can be written as a call."""
    for part in get_args(hint) or (hint,):
        known = isinstance(part, type) and dataclasses.is_dataclass(part)
        if known and part is not Schedule:
            yield part


def _constructor(kind: type[Any]) -> Callable[..., Any]:
    """What users call to make one: the function of its module that returns it, else the class."""
    name = kind.__name__.lower()
    found = getattr(sys.modules.get(kind.__module__), name, None)
    if inspect.isfunction(found) and get_type_hints(found).get("return") is kind:
        return found
    return kind
