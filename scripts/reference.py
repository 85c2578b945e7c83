"""Writes docs/reference.md: every operator and loss, from its declaration and its docstring.

    .venv/bin/python scripts/reference.py [FILE]

FILE: where to write, docs/reference.md by default.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import operators  # noqa: E402
from dataflow.limits import Limit  # noqa: E402
from dataflow.loss import LossFunction  # noqa: E402
from dataflow.model import Model, Table, cosine, linear, warmup  # noqa: E402
from dataflow.operator import Operator  # noqa: E402
from dataflow.operator_functions import function_of  # noqa: E402
from dataflow.side_module import side  # noqa: E402
from operators.environment_kinds import (  # noqa: E402
    gymnasium_environment,
    mcp_tools,
    openenv_environment,
    skyrl_environment,
    textarena_environment,
    trl_environment,
)
from operators.environments import Turn, environments_by, isolated, tools  # noqa: E402
from operators.importance import importance  # noqa: E402
from operators.optimizers import AdamW  # noqa: E402
from operators.rewards import verl_reward  # noqa: E402

WIDTH = 118
FENCE = "```python"

HEAD = """# Operators and losses

What a graph is made of, from the declarations and docstrings in [operators/](../operators).
`scripts/reference.py` writes this page. On the command line, `--set NODE.PARAM=VALUE` sets a node's
parameter, and `--set NODE.LOSS.PARAM=VALUE` a loss's. One that may be a schedule of the Step takes
also `'linear(...)'`, `'cosine(...)'` and `'warmup(...)'`. An operator and a loss of your own:
[user_operator.py](../examples/user_operator.py), [user_loss.py](../examples/user_loss.py).

"""

COLUMNS = "Rewards, advantages and other columns"
KINDS = {
    "Sources": ("source", "tokenise"),
    "Models": ("decode", "forward"),
    COLUMNS: ("host", "select"),
    "Training and evaluation": ("train", "evaluate", "record"),
}
"""Heading -> the kinds of work of its operators."""

_SCOPES = {
    "row": "Works on single rows.",
    "group": "Works on whole groups.",
    "batch": "Works on a whole Step.",
}

ENVIRONMENTS = (
    Turn,
    tools,
    trl_environment,
    gymnasium_environment,
    textarena_environment,
    skyrl_environment,
    openenv_environment,
    mcp_tools,
    environments_by,
    isolated,
)
VALUES = (Model, Table, linear, cosine, warmup, AdamW, importance, verl_reward, side)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageEntry:
    """A thing with a heading of its own. module: where it is imported from."""

    name: str
    function: Callable[..., Any]
    module: str
    limits: Mapping[str, Limit]
    schedulable: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()


def page() -> str:
    """The whole page."""
    found, sections = list(declared()), []
    for title, kinds in KINDS.items():
        entries = [of_operator(d) for d in found if isinstance(d, Operator) and d.work in kinds]
        sections.append((title, merged(entries)))
    losses = merged([of_loss(d) for d in found if isinstance(d, LossFunction)])
    sections += [
        ("Losses", losses),
        ("Environments", [of_value(value) for value in ENVIRONMENTS]),
        ("Values", [of_value(value) for value in VALUES]),
    ]
    contents = [f"- {title}: {links(entries)}" for title, entries in sections]
    lines = [line for each in contents for line in wrapped(each, "  ")] + [""]
    for title, entries in sections:
        lines += [f"## {title}", ""]
        lines += [line for e in entries for line in entry(e)]
    return HEAD + "\n".join(lines)


def declared() -> Iterator[Operator | LossFunction]:
    """Every operator and loss of the package that has a function, in the order of their names."""
    found: dict[str, Operator | LossFunction] = {}
    for module in pkgutil.iter_modules(operators.__path__):
        if not module.ispkg:
            for value in vars(importlib.import_module(f"operators.{module.name}")).values():
                if isinstance(value, Operator | LossFunction) and function_of(value):
                    found[value.path] = value
    yield from sorted(found.values(), key=lambda each: each.name)


def merged(entries: Sequence[PageEntry]) -> list[PageEntry]:
    """One entry for each function, of all that it may declare."""
    found: dict[str, PageEntry] = {}
    for each in entries:
        first = found.setdefault(each.name, each)
        found[each.name] = replace(first, limits={**each.limits, **first.limits})
    return list(found.values())


def of_operator(operator: Operator) -> PageEntry:
    """An operator, with what its declaration says of its rows."""
    facts = []
    if operator.work in KINDS[COLUMNS]:
        facts.append(_SCOPES[operator.scope])
    if operator.outputs:
        facts.append(f"Returns {' and '.join(schema.__name__ for schema in operator.outputs)}.")
    if operator.conventions:
        facts.append(f"Dialects: {', '.join(operator.conventions)}.")
    function = function_of(operator)
    assert function is not None
    return PageEntry(
        name=operator.name,
        function=function,
        module=function.__module__,
        limits=operator.limits,
        schedulable=operator.schedulable,
        facts=tuple(facts),
    )


def of_loss(loss: LossFunction) -> PageEntry:
    """A loss, with the scope of its numbers."""
    function = function_of(loss)
    assert function is not None
    names = [name for name in inspect.signature(function).parameters if _numbered(loss, name)]
    return PageEntry(
        name=loss.name,
        function=function,
        module=function.__module__,
        limits=dict(loss.limits),
        schedulable=tuple(names),
        facts=(f"Gives a number for each {loss.scope}.",),
    )


def _numbered(loss: LossFunction, name: str) -> bool:
    own = inspect.signature(loss.fn).parameters
    return name in own and loss.takes_number(name)


def of_value(value: Callable[..., Any]) -> PageEntry:
    """A value that parameters take, or a function that makes one."""
    return PageEntry(name=value.__name__, function=value, module=value.__module__, limits={})


def entry(e: PageEntry) -> Iterator[str]:
    """Heading, call, text and parameters."""
    yield from [f"### {e.name}", "", "```python", f"from {e.module} import {e.name}", ""]
    yield from call(e)
    yield from ["```", ""]
    for paragraph in prose(e):
        lines = [paragraph] if paragraph.startswith(FENCE) else wrapped(paragraph)
        yield from [*lines, ""]
    if e.facts:
        yield from [*wrapped(" ".join(e.facts)), ""]
    table = list(parameters(e))
    if table:
        yield from ["| parameter | default | takes |", "|---|---|---|", *table, ""]


def call(e: PageEntry) -> Iterator[str]:
    """The call, one line where it fits."""
    shown = list(stars(inspect.signature(e.function)))
    line = f"{e.name}({', '.join(shown)})"
    if len(line) <= 100:
        yield line
    else:
        yield from [f"{e.name}(", *(f"    {part}," for part in shown), ")"]


def stars(signature: inspect.Signature) -> Iterator[str]:
    """The parameters, with a `*` before those that go by keyword alone."""
    starred = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        starred |= parameter.kind is parameter.VAR_POSITIONAL
        yield written(parameter)


def written(parameter: inspect.Parameter) -> str:
    """`lr: Number = 1e-6`."""
    marks = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    name, kind = f"{marks.get(parameter.kind, '')}{parameter.name}", parameter.annotation
    named = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    text = name if kind is parameter.empty else f"{name}: {named}"
    default = parameter.default
    if default is parameter.empty:
        return text
    if isinstance(default, MappingProxyType):
        default = dict(default)
    return f"{text}{'=' if kind is parameter.empty else ' = '}{default!r}"


def prose(e: PageEntry) -> list[str]:
    """The docstring's paragraphs; a list of parameters begins a line for each of them."""
    doc = inspect.getdoc(e.function) or ""
    names = sorted(inspect.signature(e.function).parameters, key=len, reverse=True)
    paragraphs = list(paragraphs_of(doc))
    each = "|".join(map(re.escape, names)) or "(?!)"
    begins = re.compile(rf"(?:^|(?<=[.:;)] ))((?:{each})(?:, (?:{each}))*): ")
    found = []
    for paragraph in paragraphs:
        if paragraph.startswith(FENCE):
            found.append(paragraph)
            continue
        parts = begins.split(paragraph)
        found += [parts[0].strip()] if parts[0].strip() else []
        found += [
            f"- `{name.replace(', ', '`, `')}`: {text.strip()}"
            for name, text in zip(parts[1::2], parts[2::2], strict=True)
        ]
    return joined(found)


def paragraphs_of(doc: str) -> Iterator[str]:
    """Paragraphs of text as one line each; what is indented is code, fenced, as it is."""
    for part in re.split(r"\n\n(?! {8})", doc):
        if part.startswith("    "):
            yield f"{FENCE}\n{textwrap.dedent(part)}\n```"
        else:
            yield " ".join(part.split())


def joined(paragraphs: list[str]) -> list[str]:
    """Items of one list are not paragraphs of their own."""
    found: list[str] = []
    for text in paragraphs:
        if found and text.startswith("- ") and found[-1].startswith("- "):
            found[-1] += f"\n{text}"
        else:
            found.append(text)
    return found


def parameters(e: PageEntry) -> Iterator[str]:
    """The rows of the table: parameters with declared values."""
    for name, parameter in inspect.signature(e.function).parameters.items():
        limit = e.limits.get(name)
        if limit is None:
            continue
        default = "" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        takes = limit.describe() + (", or a schedule" if name in e.schedulable else "")
        yield f"| `{name}` | {default} | {takes} |".replace("  |", " |")


def links(entries: list[PageEntry]) -> str:
    return ", ".join(f"[{e.name}](#{e.name.lower()})" for e in entries)


def wrapped(text: str, indent: str = "") -> Iterator[str]:
    """Lines of a paragraph; those of a list's items are indented after the first."""
    for line in text.split("\n"):
        after = "  " if line.startswith("- ") else indent
        yield from textwrap.wrap(
            line, WIDTH, subsequent_indent=after, break_on_hyphens=False, break_long_words=False
        )


def main(file: Path) -> None:
    """Write the page."""
    file.write_text(page(), encoding="ascii")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reference.md")
