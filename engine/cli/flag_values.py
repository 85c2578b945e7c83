"""Flags that take a table, groups, settings or a schedule: `--replicas rollout=3 score=2`,
`--together rollout,score`, `--set rollout.n=4`, `--lr 'cosine(1e-6, 100)'`.

Owns: how their text is read and shown. Does not own: any flag (engine/plan/options.py), nor what
the values mean (the planner). A flag that is given several times adds to its values.
"""

from __future__ import annotations

import collections.abc
import re
import shlex
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import chain
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from dataflow.errors import GraphError
from dataflow.value_parser import AcceptedValues
from engine.plan.options import AUTO, RelayoutWish

Groups = tuple[tuple[str, ...], ...]
FUNCTION = "MODULE:FUNCTION"
"""How a function is named on the command line."""
Settings = tuple[str, ...]
"""Texts NODE.PARAM=VALUE."""
Spreads = Sequence[str]
"""Texts KEY=VALUES, several values of what --set and other flags give one."""


def registry() -> ConstructorRegistry:
    """Make the constructors that tyro needs for these types."""
    constructors = ConstructorRegistry()
    constructors.primitive_rule(_constructor_of)
    return constructors


def _constructor_of(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Choose the constructor of a type; None for one that tyro has its own for."""
    if kind.type == Groups:
        return _groups()
    if kind.type == Settings:
        return _texts("NODE.PARAM=VALUE", "rollout.top_p=0.9")
    if kind.type == Spreads:
        return _texts("KEY=VALUES", "rollout=1..8")
    if kind.type == RelayoutWish:
        return _table_or_word(_TABLE_VALUES[str], AUTO)
    if kind.type_origin is Mapping:
        key_type, value_type = get_args(kind.type)
        if key_type is str and value_type in _TABLE_VALUES:
            return _table(_TABLE_VALUES[value_type])
        if key_type is str and get_origin(value_type) is Literal:
            return _table(_choose_among(get_args(value_type)))
    return None


def _number_or_range(text: str) -> int | str:
    """`2` -> 2; `2..8` stays as it is, for the planner."""
    if text.isdigit():
        return int(text)
    return text


@dataclass(frozen=True, slots=True)
class _TableValue:
    """A value of a table. pattern: of its text. like: an example. read: makes it of its text."""

    metavar: str
    pattern: str
    like: str
    read: Callable[[str], Any]


_TABLE_VALUES: Mapping[Any, _TableValue] = {
    str: _TableValue("NAME=NAME", r".+", "gen", str),
    int: _TableValue("NAME=INT", r"\d+", "2", int),
    float: _TableValue("NAME=FLOAT", r"[0-9.]+(e[+-]?\d+)?", "0.002", float),
    int | str: _TableValue("NAME=INT|INT..INT", r"\d+(\.\.\d+)?", "2..8", _number_or_range),
}


def _choose_among(choices: Sequence[str]) -> _TableValue:
    """A value that is one of some words."""
    words = "|".join(choices)
    return _TableValue(f"NAME={words}", words, choices[-1], str)


def _table(kind: _TableValue) -> PrimitiveConstructorSpec[Any]:
    """Read `NAME=VALUE` texts into a table. Refuses a text of another form, and a name that comes
    twice.
    """
    metavar = kind.metavar

    def read(words: list[str]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for word in words:
            name, equals, text = word.partition("=")
            if not (name and equals and re.fullmatch(kind.pattern, text)):
                fix = f"{name or 'rollout'}={kind.like}"
                raise ValueError(f"expected {metavar}, found {word!r}. Fix: {fix}")
            if name in table:
                raise ValueError(f"{name} is given twice. Fix: leave one out")
            table[name] = kind.read(text)
        return table

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{metavar} ...",
        instance_from_str=read,
        is_instance=lambda table: isinstance(table, Mapping),
        str_from_instance=lambda table: [f"{name}={text}" for name, text in table.items()],
    )


def _table_or_word(kind: _TableValue, word: str) -> PrimitiveConstructorSpec[Any]:
    """Read a table, or this word alone in its place."""
    table = _table(kind)

    def read(words: list[str]) -> Any:
        if words == [word]:
            return word
        if word in words:
            raise ValueError(f"expected {word} alone, or {kind.metavar}. Fix: {word}")
        return table.instance_from_str(words)

    def write(setting: Any) -> list[str]:
        if setting == word:
            return [word]
        return table.str_from_instance(setting)

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{word}|{table.metavar}",
        instance_from_str=read,
        is_instance=lambda setting: setting == word or table.is_instance(setting),
        str_from_instance=write,
    )


def _groups() -> PrimitiveConstructorSpec[Any]:
    """Read `NAME,NAME` texts into groups of two names or more."""

    def read(words: list[str]) -> Groups:
        groups: list[tuple[str, ...]] = []
        for word in words:
            names = tuple(name.strip() for name in word.split(","))
            if len(names) < 2 or not all(names):
                fix = f"{word.strip(', ')},score"
                raise ValueError(f"expected two names or more, found {word!r}. Fix: {fix}")
            groups.append(names)
        return tuple(groups)

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME,NAME ...",
        instance_from_str=read,
        is_instance=lambda groups: isinstance(groups, tuple),
        str_from_instance=lambda groups: [",".join(group) for group in groups],
    )


def _texts(form: str, like: str) -> PrimitiveConstructorSpec[Any]:
    """Take the texts as they are, at least one; whoever applies them reads them."""

    def read(words: list[str]) -> Settings:
        if not words:
            raise ValueError(f"expected {form}, found nothing. Fix: {like}")
        return tuple(words)

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{form} ...",
        instance_from_str=read,
        is_instance=lambda texts: isinstance(texts, tuple),
        str_from_instance=list,
    )


def number_or_schedule(hint: Any) -> PrimitiveConstructorSpec[Any]:
    """Read what a parameter takes that may be a schedule of the Step. hint: its annotation."""
    accepted = AcceptedValues(hint=hint, schedulable=True)
    return _called_value(accepted, "FLOAT|SCHEDULE", "1e-6 or 'cosine(1e-6, 100)'")


def value_by_call(hint: Any) -> PrimitiveConstructorSpec[Any] | None:
    """Read what a parameter takes that is written as a call, as `lora(rank=16)`, or none; None for
    other annotations.
    """
    accepted = AcceptedValues(hint=hint)
    if not accepted.constructors:
        return None
    call = f"{next(iter(accepted.constructors))}()"
    return _called_value(accepted, accepted.description, shlex.quote(call))


def _called_value(
    accepted: AcceptedValues, metavar: str, like: str
) -> PrimitiveConstructorSpec[Any]:
    """Read one text as a value that may be written as a call. like: the fix, if none is nearer."""

    def read(words: list[str]) -> Any:
        try:
            return accepted.read(words[0])
        except GraphError as error:  # of the constructor; no line of a file made it
            lines = [f"{f.where}: {f.problem}. Fix: {f.fix}" for f in error.faults]
            raise ValueError("; ".join(lines)) from error
        except ValueError as error:
            near = accepted.fix(words[0])
            fix = shlex.quote(near) if near else like
            raise ValueError(f"{error}. Fix: {fix}") from error

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=accepted.accepts,
        str_from_instance=lambda instance: [str(instance)],
    )


def takes_function(annotation: Any) -> bool:
    """Whether a parameter takes functions: Callable[...], alone, in a list or beside None."""
    if annotation is Callable or get_origin(annotation) is collections.abc.Callable:
        return True
    origin = get_origin(annotation)
    has_parts = origin in (Union, types.UnionType, list, tuple, collections.abc.Sequence)
    return has_parts and any(map(takes_function, get_args(annotation)))


def dataclasses_in(annotation: Any) -> tuple[type[Any], ...]:
    """List the dataclasses whose instances a parameter takes beside functions: environments."""
    if is_dataclass(annotation) and isinstance(annotation, type):
        return (annotation,)
    if get_origin(annotation) not in (Union, types.UnionType):
        return ()
    parts = map(dataclasses_in, get_args(annotation))
    return tuple(chain.from_iterable(parts))


def gather_values(arguments: Sequence[str], options: Sequence[type[Any]]) -> list[str]:
    """Move all values of a repeated table or list behind its first flag: tyro takes the last flag
    alone.
    """
    lists: dict[str, list[str]] = {flag: [] for flag in _list_flags(options)}
    parts: list[list[str]] = []
    open_list: list[str] | None = None
    for word in arguments:
        flag, *values = word.split("=", 1)
        flag = flag.replace("_", "-")
        if word.startswith("--") and flag in lists:
            open_list = lists[flag]
            if not open_list:
                open_list.append(flag)
                parts.append(open_list)
            open_list += values
        elif open_list is not None and not word.startswith("-"):
            open_list.append(word)
        else:
            open_list = None
            parts.append([word])
    return list(chain.from_iterable(parts))


def _list_flags(options: Sequence[type[Any]]) -> list[str]:
    """List the flags of option classes that take a table, groups or settings."""
    flags: list[str] = []
    for kind in options:
        for name, hint in get_type_hints(kind).items():
            if hint in (Groups, Settings, Spreads, RelayoutWish) or get_origin(hint) is Mapping:
                flags.append(f"--{name.replace('_', '-')}")
    return flags


def name_of_flag(word: str) -> str:
    """`--max-tokens=64` -> `max_tokens`: the name that a flag has in Python."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def option_names(options: Sequence[type[Any]]) -> list[str]:
    """List the names of all fields of option classes."""
    names: list[str] = []
    for kind in options:
        names += kind.__dataclass_fields__
    return names
