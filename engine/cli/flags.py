"""Flags from signatures: the graph function's own parameters, and the fields of option classes.

Owns: how an annotation becomes a flag, and a flag's text an argument. Does not own: any flag. A
Number is a float, or the call that makes a schedule. Functions are `module:function`, or several of
these with commas.
"""

from __future__ import annotations

import collections.abc
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from dataflow.convention import Dialect
from dataflow.draw.node_calls import shown_value
from dataflow.model import Schedule
from dataflow.names import Known, peer_name
from dataflow.program import AnyGraph
from dataflow.set_expressions import settable
from engine.cli.flag_values import FUNCTION, gathered, number_or_schedule, registry, takes_function
from engine.cli.screen import read_flags, say
from engine.cli.set_flag import NodeOptions, how_to_see_nodes, nodes_page, with_settings
from engine.cli.target import (
    Target,
    UsageError,
    is_received,
    load_function,
    load_target,
    run_folder,
)
from engine.keep.untrusted_files import kept_options
from engine.plan.options import PLANNED, RunOptions

O1 = TypeVar("O1")
_RUNNING = ("run", "peek", "profile")
"""Commands that run what a graph names; all others only look at it."""
_Classes = Sequence[type[Any]]
_TEXTS = ("--set", "--what-if", "--what_if")
"""Flags with the names of nodes and parameters in their texts."""
_FLAT = (tyro.conf.OmitArgPrefixes,)
_PLAIN = (str, int, float, bool, types.NoneType)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageOptions:
    """What any graph can be told, besides its own parameters."""

    dialect: Dialect | None = None
    """The peer whose conventions operators and losses follow that name no other."""


def graph_and(options: type[O1], command: str, arguments: Sequence[str]) -> tuple[AnyGraph, O1]:
    """What TARGET makes with its flags, edited by --set, and the command's options; SystemExit(2)
    if wrong. A function with a parameter `dialect` of its own gets that flag.
    """
    usage = f"dataflow {command} TARGET [flags]"
    target, flags = split_target(command, usage, options, arguments)
    has_dialect = "dialect" in inspect.signature(target.function).parameters
    classes: tuple[type[Any], ...] = (options, NodeOptions)
    if not has_dialect:
        classes += (LanguageOptions,)
    if helped(flags):
        _help(command, target, classes, flags)
    if is_received(target.text):
        refuse_of_nodes(command, target.text, flags, classes)
    values, (command_options, node_options, *language_options) = parse(
        command, target, classes, flags
    )
    graph = target.graph(**values)
    for language in language_options:  # none where the function has a `dialect` of its own
        if language.dialect is not None:
            graph = graph.in_dialect(language.dialect)
    chosen = as_planned(target, command_options, flags)
    return with_settings(target, values, graph, node_options.set), chosen


def refuse_of_nodes(command: str, text: str, flags: Sequence[str], options: _Classes) -> None:
    """Raises UsageError for a flag that a kept graph does not have, where --set changes what it
    names, by our name or another system's. text: the run folder or graph.json.
    """
    known = _names(options)
    for word, after in pairwise([*flags, "--"]):
        flag, _, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or name.removeprefix("no_") in known:
            continue
        names = {name}
        peer = peer_name(name, Known(options=known))
        if peer and not peer.find_ours(Known(options=known)):
            names.update(peer.parameters)
        if not value:
            value = "..." if after.startswith("--") else after
        paths = _settable_paths(load_target(text).graph())
        fixes = [f"--set {path}={value}" for path in paths if path.rpartition(".")[2] in names]
        if fixes:
            problem = f"unknown flag {flag!r}: of a kept graph, parameters are set by node"
            raise UsageError(f"dataflow {command}", problem, " or ".join(fixes[:3]))


def _settable_paths(graph: AnyGraph) -> Iterator[str]:
    """`NODE.PARAM` of all that --set may change."""
    for node in settable(graph):
        yield from (f"{node.name}.{parameter.name}" for parameter in node.parameters)


def helped(flags: Sequence[str]) -> bool:
    """Whether the flags ask for help."""
    return any(flag in ("-h", "--help") for flag in flags)


def _help(command: str, target: Target, classes: _Classes, flags: Sequence[str]) -> NoReturn:
    """Print the flags, then the nodes with what --set may change, if all that the graph needs is
    given; ends with SystemExit.
    """
    with suppress(SystemExit):
        parse(command, target, classes, ["--help"])
    names = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in flags}
    parameters = inspect.signature(target.function).parameters.values()
    if all(p.name in names for p in parameters if p.default is p.empty):
        rest = [flag for flag in flags if not helped([flag])]
        values, (_, node_options, *_) = parse(command, target, classes, rest)
        graph = with_settings(target, values, target.graph(**values), node_options.set)
        say(nodes_page(target, values, graph))
    else:
        say(how_to_see_nodes(command, target))
    raise SystemExit(0)


def as_planned(target: Target, options: O1, flags: Sequence[str]) -> O1:
    """The options; of a run folder, with those that its plan was made of where no flag gives them.
    Raises RunError where the folder has none.
    """
    if not isinstance(options, RunOptions):
        return options
    folder = run_folder(target.text)
    if folder is None:
        return options
    run_options, overridden = kept_options(folder)[0], options_in(flags)
    inherited = [name for name in PLANNED if name not in overridden]
    return replace(options, **{name: getattr(run_options, name) for name in inherited})


def options_in(flags: Sequence[str]) -> list[str]:
    """The names of the options of a run that some flag gives."""
    words = {flag.partition("=")[0].replace("-", "_") for flag in flags if flag.startswith("--")}
    return [f.name for f in fields(RunOptions) if words & {f"__{f.name}", f"__no_{f.name}"}]


def split_target(
    command: str, usage: str, options: type[Any], arguments: Sequence[str]
) -> tuple[Target, Sequence[str]]:
    """TARGET and the rest; without TARGET, `--help` shows the command's own options."""
    if arguments and arguments[0] in ("-h", "--help"):
        about = inspect.getdoc(options) or ""
        read_flags(options, args=["--help"], prog=usage, about=about, registry=registry())
    if not arguments or arguments[0].startswith("-"):
        first_word = repr(arguments[0]) if arguments else "nothing"
        raise UsageError(f"dataflow {command}", f"expected TARGET first, found {first_word}", usage)
    runs = command in _RUNNING and not helped(arguments[1:])
    return load_target(arguments[0], runs=runs), arguments[1:]


def parse(
    command: str, target: Target, options: _Classes, arguments: Sequence[str]
) -> tuple[dict[str, Any], list[Any]]:
    """The graph function's arguments by name, and an instance of each option class."""
    return _parsed(command, target, options, arguments, strict=True)[0]


def parse_own(command: str, target: Target, arguments: Sequence[str]) -> dict[str, Any]:
    """The graph function's arguments alone, of a line that may have other flags too."""
    return _parsed(command, target, (), arguments, strict=False)[0][0]


def parse_shared(
    command: str, targets: Sequence[Target], arguments: Sequence[str]
) -> list[dict[str, Any]]:
    """Arguments of several graph functions from one set of flags; each flag fits at least one."""
    parsed = [_parsed(command, target, (), arguments, strict=False) for target in targets]
    rests = [rest for _, rest in parsed]
    unknown = _flags_in_all(rests)
    unknown += [rest[0] for rest in rests if rest and not rest[0].startswith("-")]
    if unknown:
        problem = f"no graph function takes {unknown[0]!r}"
        raise UsageError(f"dataflow {command}", problem, "see --help")
    return [values for (values, _), _ in parsed]


def _flags_in_all(rests: Sequence[Sequence[str]]) -> list[str]:
    flags = [word for word in rests[0] if word.startswith("--")]
    return [flag for flag in flags if all(flag in rest for rest in rests)]


def _parsed(
    command: str, target: Target, options: _Classes, arguments: Sequence[str], *, strict: bool
) -> tuple[tuple[dict[str, Any], list[Any]], list[str]]:
    parameters = _parameters(target)
    _refuse_clashes(target, parameters, options)
    groups = [("graph", _as_class(target, parameters))] if parameters else []
    groups += [(_title(kind), kind) for kind in options]
    whole = make_dataclass("Flags", groups, kw_only=True)
    prog, about = f"dataflow {command} {target.text}", _summary(target.function)
    read = partial(read_flags, whole, prog=prog, about=about, config=_FLAT)
    flags: Any
    if strict:
        known = Known(parameters=parameters, options=_names(options))
        refuse_peer_names(command, arguments, known)
        flags, rest = read(args=gathered(arguments, options), registry=registry()), []
    else:
        flags, rest = read(args=list(arguments), return_unknown_args=True, registry=registry())
    values = _arguments(parameters, flags.graph) if parameters else {}
    return (values, [getattr(flags, _title(kind)) for kind in options]), list(rest)


def _arguments(parameters: Mapping[str, inspect.Parameter], flags: Any) -> dict[str, Any]:
    """The graph function's arguments; a None that is not the default stands for the default."""
    arguments: dict[str, Any] = {}
    for name, parameter in parameters.items():
        argument = _argument(parameter, getattr(flags, name))
        if argument is not None or parameter.default is None:
            arguments[name] = argument
    return arguments


def refuse_peer_names(command: str, arguments: Sequence[str], known: Known) -> None:
    """Raises UsageError for a flag that is another system's name, and for verl's `trainer.x=1`."""
    of_flag = ""
    for word in arguments:
        if word.startswith("--"):
            of_flag = word
        if of_flag in _TEXTS and word != of_flag:  # NODE.PARAM=VALUE, which settings read
            continue
        written = word.partition("=")[0].lstrip("+")
        name = written.removeprefix("--").replace("-", "_")
        override = "=" in word and "." in written and not written.startswith("-")
        ours = name in known.parameters or name in known.options
        if ours or not (written.startswith("--") or override):
            continue
        peer = peer_name(name, known)
        if peer is not None and _is_meant(peer.name, name, override):
            kind = "override" if override else "flag"
            problem = f"unknown {kind} {word!r} ({peer.system}'s name)"
            fix = peer.write_fix(known, None, flag=True)
            raise UsageError(f"dataflow {command}", problem, fix)


def _is_meant(peer: str, name: str, override: bool) -> bool:
    """Of a word without dashes, only a whole name is taken for another system's."""
    return not override or peer == name or peer.endswith(".*")


def _title(options: type[Any]) -> str:
    """RunOptions -> `run`: the heading above its flags in the help."""
    return getattr(options, "TITLE", options.__name__.removesuffix("Options").lower())


def _parameters(target: Target) -> dict[str, inspect.Parameter]:
    """The graph function's parameters, annotations resolved; UsageError if one fits no flag."""
    signature = inspect.signature(target.function)
    hints = get_type_hints(target.function)
    parameters: dict[str, inspect.Parameter] = {}
    for parameter in signature.parameters.values():
        kinds = (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if parameter.kind not in kinds or parameter.name not in hints:
            why = "graph functions annotate every parameter and take no *args or **kwargs"
            problem = f"parameter {str(parameter)!r} cannot be a flag: {why}"
            raise UsageError(target.text, problem, _annotated(parameter))
        parameters[parameter.name] = parameter.replace(annotation=hints[parameter.name])
    return parameters


def _annotated(parameter: inspect.Parameter) -> str:
    """`base: str = 'model'`: the parameter as it could be written."""
    if parameter.default is parameter.empty or parameter.default is None:
        return f"{parameter.name}: int"
    return f"{parameter.name}: {type(parameter.default).__name__} = {parameter.default!r}"


def _refuse_clashes(target: Target, parameters: Mapping[str, Any], options: _Classes) -> None:
    for name in _names(options):
        if name in parameters:
            problem = f"parameter {name!r} has the name of a run option"
            fix = f"another name for the parameter, {name}_ for one"
            raise UsageError(target.text, problem, fix)


def _names(options: _Classes) -> list[str]:
    return [name for kind in options for name in kind.__dataclass_fields__]


def _as_class(target: Target, parameters: Mapping[str, inspect.Parameter]) -> type[Any]:
    """The parameters as the fields of a class, which is what tyro reads flags of."""
    helps = _argument_helps(target.function)
    fields: list[Any] = []
    for name, parameter in parameters.items():
        kind, default = _flag(target, parameter)
        words = helps.get(name, "")
        if default is None and parameter.default not in (None, parameter.empty):
            words += f" (default: {shown_value(parameter.default)})"
        metavar = FUNCTION if takes_function(parameter.annotation) else None
        hint = Annotated[kind, tyro.conf.arg(help=words, metavar=metavar)]
        if parameter.default is parameter.empty:
            fields.append((name, hint))
        else:
            fields.append((name, hint, field(default=default)))
    return make_dataclass("Parameters", fields, kw_only=True)


def _flag(target: Target, parameter: inspect.Parameter) -> tuple[Any, Any]:
    """Type and default of a flag; None for a default that is not text, such as a function."""
    default = parameter.default
    if takes_function(parameter.annotation):
        if default is parameter.empty:
            return str, default
        return Union[str, None], None  # noqa: UP007
    kind = parameter.annotation
    if Schedule in get_args(kind):
        return Annotated[Any, number_or_schedule(kind)], default
    if not _readable(kind):
        found = f"parameter {parameter.name!r} is {parameter.annotation}"
        fix = "str, int, float, bool, a Literal, a tuple of these, a Number, or a function"
        raise UsageError(target.text, f"{found}, which no flag can give", fix)
    return kind, default


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
    functions = [load_function(path.strip(), flag) for path in value.split(",")]
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
