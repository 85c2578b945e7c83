"""Flags whose value is a table or a list of groups: `--replicas rollout=3 score=2`, `--together
rollout,score`.

Owns: how their text is read and shown. Does not own: any flag (engine/options.py), nor what its
values mean (the planner). Each may be given several times, which adds to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

Groups = tuple[tuple[str, ...], ...]


def registry() -> ConstructorRegistry:
    """What tyro is to know of these types."""
    made = ConstructorRegistry()
    made.primitive_rule(_rule)
    return made


def _rule(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if kind.type == Groups:
        return _groups()
    inside = get_args(kind.type)
    known = kind.type_origin is Mapping and inside[0] is str and inside[1] in (str, int)
    return _table(inside[1]) if known else None


def _table(value: type[str] | type[int]) -> PrimitiveConstructorSpec[Any]:
    metavar, like = ("NAME=INT", "2") if value is int else ("NAME=NAME", "gen")

    def read(words: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for word in words:
            name, equals, text = word.partition("=")
            if not (name and equals and text) or (value is int and not text.isdigit()):
                raise ValueError(
                    f"expected {metavar}, found {word!r}. Fix: {name or 'rollout'}={like}"
                )
            if name in found:
                raise ValueError(f"{name} is given twice. Fix: leave one out")
            found[name] = value(text)
        return found

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{metavar} ...",
        instance_from_str=read,
        is_instance=lambda found: isinstance(found, Mapping),
        str_from_instance=lambda found: [f"{name}={text}" for name, text in found.items()],
    )


def _groups() -> PrimitiveConstructorSpec[Any]:
    def read(words: list[str]) -> Groups:
        groups = [tuple(name.strip() for name in word.split(",")) for word in words]
        for word, group in zip(words, groups, strict=True):
            if len(group) < 2 or not all(group):
                raise ValueError(
                    f"expected two names or more, found {word!r}. Fix: {word.strip(', ')},score"
                )
        return tuple(groups)

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME,NAME ...",
        instance_from_str=read,
        is_instance=lambda found: isinstance(found, tuple),
        str_from_instance=lambda found: [",".join(group) for group in found],
    )


def gathered(arguments: Sequence[str], options: Sequence[type[Any]]) -> list[str]:
    """The arguments with all values of a repeated table or list behind its first flag."""
    flags = {f"--{name.replace('_', '-')}" for kind in options for name in _several(kind)}
    found: list[str] = []
    values: dict[str, list[str]] = {}
    at = ""
    for word in arguments:
        flag, equals, text = word.partition("=")
        flag = flag.replace("_", "-")
        if word.startswith("--") and flag in flags:
            at = flag
            if flag not in values:
                found.append(flag)
            values.setdefault(flag, []).extend([text] if equals else [])
        elif at and not word.startswith("-"):
            values[at].append(word)
        else:
            at = ""
            found.append(word)
    return [part for word in found for part in (word, *values.get(word, ()))]


def _several(kind: type[Any]) -> list[str]:
    """Fields of an option class that are a table or groups."""
    hints = get_type_hints(kind)
    return [name for name, hint in hints.items() if hint == Groups or get_origin(hint) is Mapping]
