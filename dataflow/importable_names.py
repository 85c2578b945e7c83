"""Whether a name, `module:qualname`, leads to the function or class that has it.

Owns: that question, for all that is written by its name. Does not own: the written form
(json_values.py), what a script's names become (scripts.py).

A name alone says little. A decorator with functools.wraps copies the name of what it wraps; a
method bound to an object has that of the plain one, an inherited classmethod that of its base's;
and a name can be given to something else later. Another process that imported it would get
something else, without a word.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from dataflow import standins

MAIN = "__main__"


class Declaration:
    """What takes the place of a decorated function in its module. fn: that function."""

    fn: Any


def can_have_name(thing: Any) -> bool:
    """Whether module:qualname can be a name in other processes: one at the top level of a module.
    That is all that a decorator can ask, as what it decorates has its name only afterwards.
    """
    module = getattr(thing, "__module__", None)
    qualname = getattr(thing, "__qualname__", "<>")
    # Python writes `<locals>` and `<lambda>` where no name leads.
    return "<" not in qualname and module not in (None, MAIN)


def declared_path(function: Callable[..., Any]) -> str:
    """The path of what a decorator declares: module:qualname, with the identity added where that
    can be no name.
    """
    path = f"{function.__module__}:{function.__qualname__}"
    if can_have_name(function):
        return path
    return f"{path}@{id(function):x}"


def is_importable_by_name(thing: Any) -> bool:
    """Whether an import of module:qualname in another process gives this very function or class.
    Of a stand-in: whether it did for the original.
    """
    original_has_name = standins.has_name(thing)
    if original_has_name is not None:
        return original_has_name
    return can_have_name(thing) and is_where_named(thing)


def is_where_named(thing: Any) -> bool:
    """Whether the name leads to it in this process, where a script's own names count, too."""
    named = find_at_name(thing.__module__, thing.__qualname__)
    if isinstance(named, Declaration) and not isinstance(thing, Declaration):
        named = named.fn
    return _is_same(named, thing)


def find_at_name(module: str, qualname: str) -> Any:
    """Look up what an imported module has at a name; None if nothing. Imports nothing."""
    place: Any = sys.modules.get(module)
    for part in qualname.split("."):
        place = getattr(place, part, None)
    return place


def _is_same(named: Any, thing: Any) -> bool:
    if named is thing:
        return True
    # A classmethod is bound anew whenever it is looked up: compare the class and the function.
    owner = getattr(thing, "__self__", None)
    if not isinstance(owner, type) or getattr(named, "__self__", None) is not owner:
        return False
    return getattr(named, "__func__", None) is getattr(thing, "__func__", thing)
