"""Flags from signatures: the graph function's own parameters, and the fields of option classes.

Owns: how an annotation becomes a flag, and a flag's text an argument. Does not own: any flag. A
Number (a float or a schedule) is a float here. Functions are `module:function`, or several of these
with commas.
"""

from __future__ import annotations

import collections.abc
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from dataflow.convention import Dialect
from dataflow.draw.picture import shown_value
from dataflow.graph import Graph
from dataflow.model import Schedule
from dataflow.names import PEER_NAMES
from dataflow.program import Program
from engine.cli.target import Target, UsageError, load_function, load_target
from engine.cli.values import gathered, registry

O1 = TypeVar("O1")
_RUNNING = ("run", "peek")
"""Commands that run what a graph names; all others only look at it."""
_Classes = Sequence[type[Any]]
_FLAT = (tyro.conf.OmitArgPrefixes,)
_PLAIN = (str, int, float, bool, types.NoneType)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageOptions:
    """What any graph can be told, besides its own parameters."""

    dialect: Dialect | None = None
    """The peer whose conventions operators and losses follow that name no other."""


def graph_and(
    options: type[O1], command: str, arguments: Sequence[str]
) -> tuple[Graph | Program, O1]:
    """What TARGET makes with its flags, and the command's options; SystemExit(2) if wrong. A
    function with a parameter `dialect` of its own gets that flag.
    """
    usage = f"dataflow {command} TARGET [flags]"
    target, flags = split_target(command, usage, options, arguments)
    own = "dialect" in inspect.signature(target.function).parameters
    values, found = parse(command, target, (options, *([] if own else [LanguageOptions])), flags)
    made = target.graph(**values)
    dialect = None if own else found[1].dialect
    return (made if dialect is None else made.in_dialect(dialect)), found[0]


def split_target(
    command: str, usage: str, options: type[Any], arguments: Sequence[str]
) -> tuple[Target, Sequence[str]]:
    """TARGET and the rest; without TARGET, `--help` shows the command's own options."""
    if arguments and arguments[0] in ("-h", "--help"):
        about = inspect.getdoc(options) or ""
        tyro.cli(options, args=["--help"], prog=usage, description=about, registry=registry())
    if not arguments or arguments[0].startswith("-"):
        found = f"{arguments[0]!r}" if arguments else "nothing"
        raise UsageError(f"dataflow {command}", f"expected TARGET first, found {found}", usage)
    return load_target(arguments[0], runs=command in _RUNNING), arguments[1:]


def parse(
    command: str, target: Target, options: _Classes, arguments: Sequence[str]
) -> tuple[dict[str, Any], list[Any]]:
    """The graph function's arguments by name, and an instance of each option class."""
    return _parsed(command, target, options, arguments, strict=True)[0]


def parse_shared(
    command: str, targets: Sequence[Target], arguments: Sequence[str]
) -> list[dict[str, Any]]:
    """Arguments of several graph functions from one set of flags; each flag fits at least one."""
    parsed = [_parsed(command, target, (), arguments, strict=False) for target in targets]
    rests = [rest for _, rest in parsed]
    if unknown := [*_flags_in_all(rests), *(r[0] for r in rests if r and not r[0].startswith("-"))]:
        problem = f"no graph function takes {unknown[0]!r}"
        raise UsageError(f"dataflow {command}", problem, "see --help")
    return [values for (values, _), _ in parsed]


def _flags_in_all(rests: Sequence[Sequence[str]]) -> list[str]:
    return [w for w in rests[0] if w.startswith("--") and all(w in rest for rest in rests)]


def _parsed(
    command: str, target: Target, options: _Classes, arguments: Sequence[str], *, strict: bool
) -> tuple[tuple[dict[str, Any], list[Any]], list[str]]:
    own = _parameters(target)
    _refuse_clashes(target, own, options)
    groups = [("graph", _as_class(target, own))] if own else []
    groups += [(_title(kind), kind) for kind in options]
    whole = make_dataclass("Flags", groups, kw_only=True)
    prog, about = f"dataflow {command} {target.text}", _summary(target.function)
    read = partial(tyro.cli, whole, prog=prog, description=about, config=_FLAT)
    made: Any
    if strict:
        _refuse_peer_names(command, arguments, {*own, *_names(options)})
        made, rest = read(args=gathered(arguments, options), registry=registry()), []
    else:
        made, rest = read(args=list(arguments), return_unknown_args=True)
    values = _arguments(own, made.graph) if own else {}
    return (values, [getattr(made, _title(kind)) for kind in options]), list(rest)


def _arguments(own: Mapping[str, Any], flags: Any) -> dict[str, Any]:
    """The graph function's arguments; a None that is not the default stands for the default."""
    given = {name: _argument(p, getattr(flags, name)) for name, p in own.items()}
    return {n: v for n, v in given.items() if v is not None or own[n].default is None}


def _refuse_peer_names(command: str, arguments: Sequence[str], known: set[str]) -> None:
    """Raises UsageError for a flag that is another system's name of one of ours."""
    for word in arguments:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        ours, system = PEER_NAMES.get(name, (None, ""))
        if word.startswith("--") and ours is not None and name not in known:
            fix = ours if " " in ours else "see --help"
            if ours in known:
                fix = f"--{ours.replace('_', '-')}"
            problem = f"unknown flag {word!r} ({system}'s name)"
            raise UsageError(f"dataflow {command}", problem, fix)


def _title(options: type[Any]) -> str:
    """RunOptions -> `run`: the heading above its flags in the help."""
    return options.__name__.removesuffix("Options").lower()


def _parameters(target: Target) -> dict[str, inspect.Parameter]:
    """The graph function's parameters, annotations resolved; UsageError if one fits no flag."""
    signature = inspect.signature(target.function)
    hints = get_type_hints(target.function)
    found = {}
    for parameter in signature.parameters.values():
        kinds = (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if parameter.kind not in kinds or parameter.name not in hints:
            why = "graph functions annotate every parameter and take no *args or **kwargs"
            problem = f"parameter {str(parameter)!r} cannot be a flag: {why}"
            raise UsageError(target.text, problem, f"{parameter.name}: int")
        found[parameter.name] = parameter.replace(annotation=hints[parameter.name])
    return found


def _refuse_clashes(target: Target, own: Mapping[str, Any], options: _Classes) -> None:
    for name in _names(options):
        if name in own:
            problem = f"parameter {name!r} has the name of a run option"
            fix = f"another name for the parameter, {name}_ for one"
            raise UsageError(target.text, problem, fix)


def _names(options: _Classes) -> list[str]:
    return [name for kind in options for name in kind.__dataclass_fields__]


def _as_class(target: Target, own: Mapping[str, inspect.Parameter]) -> type[Any]:
    helps = _argument_helps(target.function)
    fields: list[Any] = []
    for name, parameter in own.items():
        kind, default = _flag(target, parameter)
        words = helps.get(name, "")
        if default is None and parameter.default not in (None, parameter.empty):
            words += f" (default: {shown_value(parameter.default)})"
        metavar = "MODULE:FUNCTION" if takes_function(parameter.annotation) else None
        marked = Annotated[kind, tyro.conf.arg(help=words, metavar=metavar)]
        required = parameter.default is parameter.empty
        fields.append((name, marked) if required else (name, marked, field(default=default)))
    return make_dataclass("Parameters", fields, kw_only=True)


def _flag(target: Target, parameter: inspect.Parameter) -> tuple[Any, Any]:
    """Type and default of a flag; None for a default that is not text, such as a function."""
    default = parameter.default
    if takes_function(parameter.annotation):
        required = default is parameter.empty
        return (str, default) if required else (Union[str, None], None)  # noqa: UP007
    kind = _without(parameter.annotation, Schedule)
    if not _readable(kind):
        found = f"parameter {parameter.name!r} is {parameter.annotation}"
        fix = "str, int, float, bool, a Literal, a tuple of these, a Number, or a function"
        raise UsageError(target.text, f"{found}, which no flag can give", fix)
    return (Union[kind, None], None) if isinstance(default, Schedule) else (kind, default)  # noqa: UP007


def takes_function(annotation: Any) -> bool:
    """Whether a parameter takes functions: Callable[...], alone, in a list or beside None."""
    if annotation is Callable or get_origin(annotation) is collections.abc.Callable:
        return True
    origin = get_origin(annotation)
    inside = origin in (Union, types.UnionType, list, tuple, collections.abc.Sequence)
    return inside and any(takes_function(part) for part in get_args(annotation))


def _without(annotation: Any, kind: type[Any]) -> Any:
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    return Union[tuple(part for part in get_args(annotation) if part is not kind)]  # noqa: UP007


def _readable(kind: Any) -> bool:
    if kind in _PLAIN or kind is Ellipsis or get_origin(kind) is types.NoneType:
        return True
    if get_origin(kind) in (Union, types.UnionType, tuple, list, collections.abc.Sequence):
        return all(_readable(part) for part in get_args(kind))
    return str(get_origin(kind)) == "typing.Literal"


def _argument(parameter: inspect.Parameter, value: Any) -> Any:
    if value is None or not takes_function(parameter.annotation):
        return value
    flag = f"--{parameter.name.replace('_', '-')}"
    functions = [load_function(text.strip(), flag) for text in value.split(",")]
    return functions if len(functions) > 1 else functions[0]


def _summary(function: Callable[..., Any]) -> str:
    doc = inspect.getdoc(function) or ""
    return re.split(r"^\s*(?:Args|Raises|Returns):", doc, maxsplit=1, flags=re.MULTILINE)[0].strip()


def _argument_helps(function: Callable[..., Any]) -> dict[str, str]:
    """Name -> what the docstring's `Args:` say of it; a line may be about several names."""
    _, _, block = (inspect.getdoc(function) or "").partition("Args:\n")
    helps: dict[str, str] = {}
    names: list[str] = []
    depth = 0
    for line in block.splitlines():
        indent = len(line) - len(line.lstrip())
        if not line.strip() or indent == 0:
            break
        depth = depth or indent
        pattern = r"\s*(\w+(?:, *\w+)*)(?: \([^)]*\))?: *(.*)"
        started = re.match(pattern, line) if indent == depth else None
        if started:
            names = re.split(", *", started.group(1))
            helps |= dict.fromkeys(names, started.group(2))
        else:
            helps |= {name: f"{helps[name]} {line.strip()}".strip() for name in names}
    return helps
