"""What a parameter takes, and the value that a text means for it.

Owns: reading a text as a Python literal, a call of a constructor of values, or plain text, and
which of these a parameter accepts. Does not own: limits (limits.py), which parameters there are
(set_expressions.py).

No text is evaluated as Python: a call must be of one of the constructors known here, with literals
as its arguments.
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

from dataflow.calls import call_error
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
class AcceptedValues:
    """The values that one parameter takes. limit: those that its declaration takes. hint: its
    annotation, which counts where there is no limit. schedulable: also a schedule of the Step.
    """

    limit: Limit | None = None
    hint: Any = Any
    schedulable: bool = False

    def accepts(self, candidate: Any) -> bool:
        """Whether the parameter takes this value."""
        # A limit knows schedules, and accepts one whose values it accepts. Without a limit, the
        # annotation says nothing of them.
        if _has_schedule(candidate) and not (self.schedulable and self.limit):
            return self.schedulable and isinstance(candidate, Schedule)
        if candidate is None and self.hint is not Any:
            return _fits(None, self.hint)
        if self.limit:
            return self.limit.accepts(candidate)
        return _fits(candidate, self.hint)

    @property
    def description(self) -> str:
        """`a number >= 0`, as in "expected a number >= 0"."""
        if self.limit:
            words = self._describe_limit(self.limit)
        else:
            words = _describe_hint(self.hint)
        return f"{words}, or a schedule" if self.schedulable else words

    def _describe_limit(self, limit: Limit) -> str:
        words = limit.describe()
        if limit.of:
            words = f"{_find_constructor(limit.of).__name__}(...)"
        if self._allows_none and not words.endswith("None"):
            words += " or None"
        if limit.kind == "texts":
            # The limit speaks of Python's values; here a user writes text.
            words = words.replace("a string or several", "text or a list of texts")
        return words

    @property
    def _allows_none(self) -> bool:
        """Whether the annotation says so: `str | None`."""
        return get_origin(self.hint) in _UNIONS and types.NoneType in get_args(self.hint)

    def read(self, text: str) -> Any:
        """Return the value that this text means here. Raises ValueError if it is none that the
        parameter takes, GraphError if a constructor refuses its arguments.
        """
        precision = ""
        for reading in self._readings(text):
            reading = self._as_declared(reading)
            if self.accepts(reading):
                return reading
            precision = precision or self._lacking_precision(reading)
        expected = f"{self.description}{precision}"
        raise ValueError(f"expected {expected}, found {_literal_or_text(text)!r:.60}")

    def _lacking_precision(self, reading: Any) -> str:
        """What the limit says of this value besides what it says of all: `, of 64 bits`."""
        if self.limit is None:
            return ""
        return self.limit.describe(reading).removeprefix(self.limit.describe())

    def fix(self, text: str) -> str:
        """Suggest a value that is accepted, as text; empty if none is known."""
        if name := _called_name(text):
            near = nearest(name, self.constructors)
            if not near or near == name:
                return ""
            arguments = text.strip()[len(name) :]
            return f"{near}{arguments}"
        if self.limit is None:
            return ""
        suggestion = self.limit.suggestion(text)
        if suggestion is None:
            return ""
        return suggestion if isinstance(suggestion, str) else repr(suggestion)

    @property
    def constructors(self) -> dict[str, Callable[..., Any]]:
        """Name -> the constructors of values that this parameter takes."""
        constructors: dict[str, Callable[..., Any]] = {}
        if self.schedulable:
            constructors.update(_SCHEDULES)
        kinds = _find_dataclasses(self.hint)
        if self.limit and self.limit.of:
            kinds = [self.limit.of]
        for kind in kinds:
            constructor = _find_constructor(kind)
            constructors[constructor.__name__] = constructor
        return constructors

    def _readings(self, text: str) -> Iterator[Any]:
        """What the text may mean, the likeliest first."""
        try:
            yield self._evaluate(ast.parse(text.strip(), mode="eval").body)
        except GraphError:  # it is a ValueError, but of a constructor
            raise
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass  # then it is plain text
        yield text

    def _evaluate(self, node: ast.AST) -> Any:
        """Return the value of a literal, or of a call of a constructor. Raises ValueError for
        anything else.
        """
        if isinstance(node, ast.Name) and node.id.lower() in _WORDS:
            return _WORDS[node.id.lower()]
        if isinstance(node, ast.List):
            return [self._evaluate(part) for part in node.elts]
        if isinstance(node, ast.Tuple):
            return tuple(self._evaluate(part) for part in node.elts)
        if isinstance(node, ast.Call):
            return self._call_constructor(node)
        return ast.literal_eval(node)

    def _call_constructor(self, node: ast.Call) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in self.constructors:
            raise ValueError(name)
        positional = [self._evaluate_argument(name, argument) for argument in node.args]
        return self.constructors[name](*positional, **self._keyword_arguments(name, node))

    def _keyword_arguments(self, name: str, node: ast.Call) -> dict[str, Any]:
        by_name = {k.arg: self._evaluate_argument(name, k.value) for k in node.keywords if k.arg}
        # Fewer where one is `**`, which has no name, or where two have the same name.
        if len(by_name) < len(node.keywords):
            raise call_error(name, "expected arguments by name, found **", f"{name}(...)")
        return by_name

    def _evaluate_argument(self, name: str, node: ast.AST) -> Any:
        try:
            return self._evaluate(node)
        except GraphError:
            raise
        except ValueError:
            source = ast.unparse(node)
            problem = f"expected literals as arguments, found {source:.60}"
            raise call_error(name, problem, f"{source!r:.60}, if it is text") from None

    def _as_declared(self, reading: Any) -> Any:
        """Whole numbers as float where numbers are meant, a list as the pair or the texts it is."""
        kind = self.limit.kind if self.limit else ""
        if kind == "texts" and reading is None:
            return ()
        if kind == "texts" and isinstance(reading, str):
            return (reading,)
        is_tuple = self.limit is not None and (self.limit.pair or kind == "texts")
        if is_tuple and isinstance(reading, list):
            reading = tuple(reading)
        return _to_floats(reading) if self._means_floats else reading

    @property
    def _means_floats(self) -> bool:
        if self.limit is not None:
            return self.limit.kind == "number"
        return "float" in str(self.hint) and "int" not in str(self.hint)


_UNIONS = (Union, types.UnionType)


def _to_floats(reading: Any) -> Any:
    """Whole numbers as float, also those in a tuple or list; everything else as it is."""
    if isinstance(reading, (tuple, list)):
        return type(reading)(map(_to_floats, reading))
    if isinstance(reading, bool) or not isinstance(reading, int):
        return reading
    # A float has 53 bits: a larger number would change before its limit refuses it.
    return float(reading) if abs(reading) < 2**53 else reading


def _literal_or_text(text: str) -> Any:
    """What a text is, for a message: the literal, else the text itself."""
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def _called_name(text: str) -> str:
    """The name of the constructor that a text calls; empty if it calls none."""
    call = text.strip()
    name, parenthesis, _ = call.partition("(")
    if parenthesis and name.isidentifier() and call.endswith(")"):
        return name
    return ""


def _has_schedule(candidate: Any) -> bool:
    if isinstance(candidate, (tuple, list)):
        return any(isinstance(part, Schedule) for part in candidate)
    return isinstance(candidate, Schedule)


def _fits(candidate: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type; what is unknown fits."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return any(_fits(candidate, part) for part in inside)
    if origin is Literal:
        # With its type: True == 1.
        return any(type(candidate) is type(known) and candidate == known for known in inside)
    if origin in _LISTS or hint in _LISTS:
        return _fits_list(candidate, inside)
    if hint is Any:
        return True
    if hint is None or hint is types.NoneType:
        return candidate is None
    if hint in (int, float):
        # A bool is an int to Python, but not to a user.
        return isinstance(candidate, (int, hint)) and not isinstance(candidate, bool)
    kind = origin or hint
    return not isinstance(kind, type) or isinstance(candidate, kind)


def _fits_list(candidate: Any, inside: tuple[Any, ...]) -> bool:
    if not isinstance(candidate, (list, tuple)):
        return False
    return not inside or all(_fits(part, inside[0]) for part in candidate)


def _describe_hint(hint: Any) -> str:
    """An annotation in the words of messages."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        # A schedule is named apart (AcceptedValues.description).
        descriptions = [_describe_hint(part) for part in inside if part is not Schedule]
        return " or ".join(dict.fromkeys(descriptions))
    if origin is Literal:
        return " or ".join(map(repr, inside))
    if origin in _LISTS or hint in _LISTS:
        return f"a list of {_MANY.get(inside[0], 'values')}" if inside else "a list"
    if hint is None or hint is types.NoneType:
        return "None"
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return f"{_find_constructor(hint).__name__}(...)"
    if hint is Any:
        return "a value"
    return _PLAIN.get(hint) or getattr(hint, "__name__", str(hint))


def _find_dataclasses(hint: Any) -> list[type[Any]]:
    """The dataclasses in an annotation, which can be written as a call."""
    parts = get_args(hint) or (hint,)
    classes = [part for part in parts if isinstance(part, type) and part is not Schedule]
    return [kind for kind in classes if dataclasses.is_dataclass(kind)]


def _find_constructor(kind: type[Any]) -> Callable[..., Any]:
    """What users call to make one: the function of its module that returns it, else the class."""
    function = getattr(sys.modules.get(kind.__module__), kind.__name__.lower(), None)
    if inspect.isfunction(function) and get_type_hints(function).get("return") is kind:
        return function
    return kind
