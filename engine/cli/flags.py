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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import partial
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from dataflow.convention import Dialect
from dataflow.draw.node_calls import shown_value
from dataflow.model import Schedule
from dataflow.peer_parameters import Known
from dataflow.program import AnyGraph
from engine.cli.flag_values import (
    FUNCTION,
    dataclasses_in,
    gather_values,
    name_of_flag,
    number_or_schedule,
    option_names,
    registry,
    takes_function,
    value_by_call,
)
from engine.cli.screen import read_flags, say
from engine.cli.set_flag import (
    NodeOptions,
    how_to_see_nodes,
    nodes_page,
    with_settings,
)
from engine.cli.target import (
    Target,
    UsageError,
    is_received,
    load_function,
    load_target,
    run_folder,
)
from engine.cli.unknown_flags import refuse_node_flags, refuse_peer_names
from engine.keep.untrusted_files import kept_options
from engine.plan.options import PLANNED, RunOptions

O1 = TypeVar("O1")
_HELP = ("-h", "--help")
_RUNNING = ("run", "peek", "profile")
"""Commands that run what a graph names; all others only look at it."""
_Classes = Sequence[type[Any]]
_FLAT = (tyro.conf.OmitArgPrefixes,)
_PLAIN = (str, int, float, bool, types.NoneType)
_ARGUMENT = re.compile(r"\s*(\w+(?:, *\w+)*)(?: \([^)]*\))?: *(.*)")
"""A line of a docstring's Args that begins with names: `n, m (optional): what they are`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageOptions:
    """What any graph can be told, besides its own parameters."""

    dialect: Dialect | None = None
    """The peer whose conventions operators and losses follow that name no other."""


def graph_and(options: type[O1], command: str, arguments: Sequence[str]) -> tuple[AnyGraph, O1]:
    """Make the graph of TARGET with its flags, edited by --set, and read the command's options.
    Raises SystemExit(2) for wrong flags. A function with a parameter `dialect` of its own gets that
    flag.
    """
    usage = f"dataflow {command} TARGET [flags]"
    target, flags = split_target(command, usage, options, arguments)
    has_dialect = "dialect" in inspect.signature(target.function).parameters
    classes: tuple[type[Any], ...] = (options, NodeOptions)
    if not has_dialect:
        classes += (LanguageOptions,)
    if asks_for_help(flags):
        _help(command, target, classes, flags)
    if is_received(target.text):
        refuse_node_flags(command, target.text, flags, classes)
    values, (command_options, node_options, *language_options) = parse(
        command, target, classes, flags
    )
    graph = target.graph(values)
    for language in language_options:  # none where the function has a `dialect` of its own
        if language.dialect is not None:
            graph = graph.in_dialect(language.dialect)
    chosen = inherit_planned(target, command_options, flags)
    return with_settings(target, values, graph, node_options.set), chosen


def asks_for_help(flags: Sequence[str]) -> bool:
    """Whether the flags ask for help."""
    return any(flag in _HELP for flag in flags)


def _help(command: str, target: Target, classes: _Classes, flags: Sequence[str]) -> NoReturn:
    """Print the flags, then the nodes with what --set may change, if all that the graph needs is
    given; ends with SystemExit.
    """
    with suppress(SystemExit):
        parse(command, target, classes, ["--help"])
    names = set(map(name_of_flag, flags))
    parameters = inspect.signature(target.function).parameters.values()
    if all(p.name in names for p in parameters if p.default is p.empty):
        rest = [flag for flag in flags if flag not in _HELP]
        values, (_, node_options, *_) = parse(command, target, classes, rest)
        graph = with_settings(target, values, target.graph(values), node_options.set)
        say(nodes_page(target, values, graph))
    else:
        say(how_to_see_nodes(command, target))
    raise SystemExit(0)


def inherit_planned(target: Target, options: O1, flags: Sequence[str]) -> O1:
    """Take over from a run folder the options that its plan was made of, where no flag gives them;
    for any other target the options stay as they are. Raises RunError where the folder has none.
    """
    if not isinstance(options, RunOptions):
        return options
    folder = run_folder(target.text)
    if folder is None:
        return options
    run_options, _ = kept_options(folder)
    overridden = options_in(flags)
    inherited = [name for name in PLANNED if name not in overridden]
    return replace(options, **{name: getattr(run_options, name) for name in inherited})


def options_in(flags: Sequence[str]) -> list[str]:
    """List the options of a run that some flag gives, by name."""
    words = {name_of_flag(flag) for flag in flags if flag.startswith("--")}
    return [f.name for f in fields(RunOptions) if words & {f.name, f"no_{f.name}"}]


def without_own_flags(options: RunOptions) -> RunOptions:
    """Make the options of a run of a command's, without those that the command adds."""
    return RunOptions(**{f.name: getattr(options, f.name) for f in fields(RunOptions)})


def split_target(
    command: str, usage: str, options: type[Any], arguments: Sequence[str]
) -> tuple[Target, Sequence[str]]:
    """Split into TARGET and the rest; without TARGET, `--help` shows the command's own options."""
    if asks_for_help(arguments[:1]):
        about = inspect.getdoc(options) or ""
        read_flags(options, args=["--help"], prog=usage, about=about, registry=registry())
    if not arguments or arguments[0].startswith("-"):
        first_word = "nothing"
        if arguments:
            first_word = repr(arguments[0])
        raise UsageError(f"dataflow {command}", f"expected TARGET first, found {first_word}", usage)
    runs = command in _RUNNING and not asks_for_help(arguments[1:])
    return load_target(arguments[0], runs=runs), arguments[1:]


def parse(
    command: str, target: Target, options: _Classes, arguments: Sequence[str]
) -> tuple[dict[str, Any], list[Any]]:
    """Read the graph function's arguments by name, and an instance of each option class."""
    parsed = _parse_flags(command, target, options, arguments, strict=True)
    return parsed.values, parsed.options


def parse_own(command: str, target: Target, arguments: Sequence[str]) -> dict[str, Any]:
    """Read the graph function's arguments alone, of a line that may have other flags too."""
    return _parse_flags(command, target, (), arguments, strict=False).values


def parse_shared(
    command: str, targets: Sequence[Target], arguments: Sequence[str]
) -> list[dict[str, Any]]:
    """Read the arguments of several graph functions from one set of flags. Raises UsageError for a
    flag that fits none of them.
    """
    parsed = [_parse_flags(command, target, (), arguments, strict=False) for target in targets]
    rests = [each.rest for each in parsed]
    unknown = _flags_in_all(rests)
    unknown += [rest[0] for rest in rests if rest and not rest[0].startswith("-")]
    if unknown:
        problem = f"no graph function takes {unknown[0]!r}"
        raise UsageError(f"dataflow {command}", problem, "see --help")
    return [each.values for each in parsed]


def _flags_in_all(rests: Sequence[Sequence[str]]) -> list[str]:
    flags = [word for word in rests[0] if word.startswith("--")]
    return [flag for flag in flags if all(flag in rest for rest in rests)]


@dataclass(frozen=True, slots=True)
class _ParsedFlags:
    """values: the graph function's arguments by name. options: an instance of each option class.
    rest: words that are neither's.
    """

    values: dict[str, Any]
    options: list[Any]
    rest: list[str]


def _parse_flags(
    command: str, target: Target, options: _Classes, arguments: Sequence[str], *, strict: bool
) -> _ParsedFlags:
    """Read flags with tyro, all at once, so that --help shows them together. strict: unknown ones
    end with SystemExit; else they are the rest.
    """
    parameters = _parameters(target)
    _refuse_clashes(target, parameters, options)
    groups: list[tuple[str, type[Any]]] = []
    if parameters:  # a class without fields would still have a heading in the help
        groups.append(("graph", _as_class(target, parameters)))
    for kind in options:
        groups.append((_title(kind), kind))
    whole = make_dataclass("Flags", groups, kw_only=True)
    read = partial(
        read_flags,
        whole,
        prog=f"dataflow {command} {target.text}",
        about=_summary(target.function),
        config=_FLAT,
        registry=registry(),
    )
    flags: Any
    rest: list[str] = []
    if strict:
        known = Known(parameters=parameters, options=option_names(options))
        refuse_peer_names(command, arguments, known)
        flags = read(args=gather_values(arguments, options))
    else:
        flags, rest = read(args=list(arguments), return_unknown_args=True)
    values: dict[str, Any] = {}
    if parameters:
        values = _arguments(parameters, flags.graph)
    instances = [getattr(flags, _title(kind)) for kind in options]
    return _ParsedFlags(values, instances, rest)


def _arguments(parameters: Mapping[str, inspect.Parameter], flags: Any) -> dict[str, Any]:
    """Make the graph function's arguments; a None that is not the default stands for the
    default.
    """
    arguments: dict[str, Any] = {}
    for name, parameter in parameters.items():
        argument = _argument(parameter, getattr(flags, name))
        if argument is not None or parameter.default is None:
            arguments[name] = argument
    return arguments


def _title(options: type[Any]) -> str:
    """RunOptions -> `run`: the heading above its flags in the help."""
    return getattr(options, "TITLE", options.__name__.removesuffix("Options").lower())


def _parameters(target: Target) -> dict[str, inspect.Parameter]:
    """List the graph function's parameters, with their annotations resolved. Raises UsageError if
    one fits no flag.
    """
    signature = inspect.signature(target.function)
    hints = get_type_hints(target.function)
    parameters: dict[str, inspect.Parameter] = {}
    for parameter in signature.parameters.values():
        kinds = (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if parameter.kind not in kinds or parameter.name not in hints:
            why = "graph functions annotate every parameter and take no *args or **kwargs"
            problem = f"parameter {str(parameter)!r} cannot be a flag: {why}"
            raise UsageError(target.text, problem, _suggest_annotation(parameter))
        parameters[parameter.name] = parameter.replace(annotation=hints[parameter.name])
    return parameters


def _suggest_annotation(parameter: inspect.Parameter) -> str:
    """Suggest how the parameter could be written: `base: str = 'model'`."""
    if parameter.default is parameter.empty or parameter.default is None:
        return f"{parameter.name}: int"
    return f"{parameter.name}: {type(parameter.default).__name__} = {parameter.default!r}"


def _refuse_clashes(target: Target, parameters: Mapping[str, Any], options: _Classes) -> None:
    for name in option_names(options):
        if name in parameters:
            problem = f"parameter {name!r} has the name of a run option"
            fix = f"another name for the parameter, {name}_ for one"
            raise UsageError(target.text, problem, fix)


def _as_class(target: Target, parameters: Mapping[str, inspect.Parameter]) -> type[Any]:
    """Make a class whose fields are the parameters, which is what tyro reads flags of."""
    helps = _argument_helps(target.function)
    fields: list[Any] = []
    for name, parameter in parameters.items():
        kind, default = _flag(target, parameter)
        words = helps.get(name, "")
        if default is None and parameter.default not in (None, parameter.empty):
            words += f" (default: {shown_value(parameter.default)})"
        metavar = None
        if takes_function(parameter.annotation):
            metavar = FUNCTION
        hint = Annotated[kind, tyro.conf.arg(help=words, metavar=metavar)]
        if parameter.default is parameter.empty:
            fields.append((name, hint))
        else:
            fields.append((name, hint, field(default=default)))
    return make_dataclass("Parameters", fields, kw_only=True)


def _flag(target: Target, parameter: inspect.Parameter) -> tuple[Any, Any]:
    """Choose the type and the default of a flag; None for a default that is not text, such as a
    function. Raises UsageError for a kind that no text can give.
    """
    default = parameter.default
    if takes_function(parameter.annotation):
        if default is parameter.empty:
            return str, default
        return Union[str, None], None  # noqa: UP007
    kind = parameter.annotation
    if Schedule in get_args(kind):
        return Annotated[Any, number_or_schedule(kind)], default
    called_value = value_by_call(kind)
    if called_value is not None:
        return Annotated[Any, called_value], default
    if not _is_readable(kind):
        problem = f"parameter {parameter.name!r} is {parameter.annotation}, which no flag can give"
        fix = "str, int, float, bool, a Literal, a tuple of these, a Number, or a function"
        raise UsageError(target.text, problem, fix)
    return kind, default


def _is_readable(kind: Any) -> bool:
    if kind in _PLAIN or kind is Ellipsis or get_origin(kind) is types.NoneType:
        return True
    if get_origin(kind) in (Union, types.UnionType, tuple, list, collections.abc.Sequence):
        return all(_is_readable(part) for part in get_args(kind))
    return str(get_origin(kind)) == "typing.Literal"


def _argument(parameter: inspect.Parameter, flag_value: Any) -> Any:
    """Load the functions that a flag names; any other value is the argument as it is."""
    if flag_value is None or not takes_function(parameter.annotation):
        return flag_value
    flag = f"--{parameter.name.replace('_', '-')}"
    kinds = dataclasses_in(parameter.annotation)
    paths = flag_value.split(",")
    functions = [load_function(path.strip(), flag, kinds=kinds) for path in paths]
    if len(functions) == 1:
        return functions[0]
    return functions


def _summary(function: Callable[..., Any]) -> str:
    """Cut a docstring before its Args, Raises and Returns."""
    doc = inspect.getdoc(function) or ""
    parts = re.split(r"^\s*(?:Args|Raises|Returns):", doc, maxsplit=1, flags=re.MULTILINE)
    return parts[0].strip()


def _argument_helps(function: Callable[..., Any]) -> dict[str, str]:
    """Read what the docstring's `Args:` say of each name; a line may be about several names."""
    _, _, block = (inspect.getdoc(function) or "").partition("Args:\n")
    helps: dict[str, str] = {}
    names: list[str] = []
    depth = 0
    for line in block.splitlines():
        indent = len(line) - len(line.lstrip())
        if not line.strip() or indent == 0:
            break
        depth = depth or indent
        entry = _ARGUMENT.match(line)
        if entry and indent == depth:
            names = re.split(", *", entry.group(1))
            helps |= dict.fromkeys(names, entry.group(2))
            continue
        for name in names:
            helps[name] = f"{helps[name]} {line.strip()}".strip()
    return helps
