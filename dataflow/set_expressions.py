"""Settings: `NODE.PARAM=VALUE` texts that edit a finished graph, and what they may name.

Owns: finding node and parameter, what is refused, and the edited graph. Does not own: what a
parameter takes (value_parser.py), making a node anew (operator_functions.py), the rules (the check
runs after).

A loss's parameter is `NODE.LOSS.PARAM`, the factor of its term `NODE.LOSS.weight`, LOSS being the
term's label; in a Program `PHASE/NODE.PARAM`, by the phase's number or name, where phases share it.
Those of adapters, `MODEL.adapter.FIELD`, are read by adapter_settings.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dataflow.adapter_settings import (
    adapter_parameters,
    find_models,
    is_adapter_setting,
    with_adapter_settings,
)
from dataflow.errors import GraphError, nearest
from dataflow.graph import Graph, Inputs, Phase, States
from dataflow.loss import Loss, LossTerm
from dataflow.node import Node
from dataflow.operator_functions import remake_node, remake_term
from dataflow.parameters import NodeParameter, find_unsettable, parameters_of
from dataflow.peer_parameters import Known, peer_name
from dataflow.program import AnyGraph, Program, numbered_name, numbered_phases
from dataflow.setting_errors import setting_error, settings_error

Source = TypeVar("Source", Graph, Program, AnyGraph)
_NOBODY: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SettableNode:
    """A node, and its parameters that a setting may change. name: with its phase's number before
    it, as `2/rollout`, in a Program.
    """

    name: str
    operator: str
    parameters: tuple[NodeParameter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """One text, taken apart. phase: its number; name: of the parameter."""

    text: str
    phase: int
    node: str
    name: str
    value: Any

    @property
    def path(self) -> tuple[int, str, str]:
        return self.phase, self.node, self.name


def edited(
    source: Source, settings: Sequence[str], *, flags: Mapping[str, str] = _NOBODY
) -> Source:
    """The graph that its functions would have made with these values; the same one if they change
    nothing. Raises GraphError for a text that names nothing that can be set, and for a value that
    the parameter does not take, alone or beside the others.

    flags: `NODE.PARAM` (`PHASE/NODE.PARAM` in a Program, by number) -> the parameter of the graph's
    own function that gives that value; such a setting is refused, and the flag named.
    """
    of_adapters = [text for text in settings if is_adapter_setting(source, text)]
    source = with_adapter_settings(source, of_adapters)
    settings_by_path: dict[tuple[int, str, str], _Setting] = {}
    for text in settings:
        if text in of_adapters:
            continue
        setting = _read_setting(source, text, flags)
        if setting.path in settings_by_path:
            problem = f"{setting.node}.{setting.name} is set twice"
            raise setting_error(text, problem, "leave one out")
        settings_by_path[setting.path] = setting
    graphs: list[Graph] = []
    is_changed = False
    for number, phase in numbered_phases(source):
        phase_settings = [each for each in settings_by_path.values() if each.phase == number]
        graph = _edit_graph(phase.graph, phase_settings)
        is_changed = is_changed or graph is not phase.graph
        graphs.append(graph)
    return source.with_graphs(graphs) if is_changed else source


def settable(source: AnyGraph) -> list[SettableNode]:
    """Every node with the parameters that a setting may change, in the order of the graph; then the
    adapters of Models, as `policy.adapter`.
    """
    nodes: list[SettableNode] = []
    for number, phase in numbered_phases(source):
        for node in phase.graph.nodes:
            settable_node = SettableNode(
                name=numbered_name(number, node.name),
                operator=node.operator.name,
                parameters=tuple(parameters_of(node)),
            )
            nodes.append(settable_node)
    for name, model in find_models(source).items():
        if model.adapter is not None and model.follows is None:
            parameters = tuple(adapter_parameters(model.adapter))
            kind = type(model.adapter).__name__.lower()
            adapter = SettableNode(name=f"{name}.adapter", operator=kind, parameters=parameters)
            nodes.append(adapter)
    return nodes


# --- reading a text -------------------------------------------------------------------------------


def _read_setting(source: AnyGraph, text: str, flags: Mapping[str, str]) -> _Setting:
    """Read a text as a setting of a parameter that may be set. Raises GraphError."""
    start, equals, words = text.partition("=")
    if not equals or "." not in start:
        raise setting_error(text, "expected NODE.PARAM=VALUE", _complete(source, start, words))
    number, node, name = _find_place(source, text, start.strip())
    parameters = {parameter.name: parameter for parameter in parameters_of(node)}
    path = numbered_name(number, f"{node.name}.{name}")
    if path in flags and (name in parameters or name in find_unsettable(node)):
        raise _flag_error(text, path, flags[path], words, is_value=name in parameters)
    if name not in parameters:
        raise _unknown_error(text, words, node, name, list(parameters))
    accepted = parameters[name].accepted
    try:
        value = accepted.read(words)
    except GraphError as error:
        raise settings_error([text], error) from error
    except ValueError as error:
        like = accepted.fix(words)
        fix = f"{start}={like}" if like else "a value of that kind"
        raise setting_error(text, f"for {name} {error}", fix) from None
    return _Setting(text=text, phase=number, node=node.name, name=name, value=value)


def _flag_error(text: str, path: str, flag: str, words: str, *, is_value: bool) -> GraphError:
    """The error of a setting for which the graph's own function has a flag. is_value: whether the
    path is of a parameter that text can give.
    """
    problem = f"{path} is given by the graph function's own parameter {flag}"
    # A flag of another name may take another kind of value.
    is_same = is_value and flag == path.rpartition(".")[2]
    return setting_error(text, problem, _write_flag(flag, words if is_same else ""))


def _write_flag(name: str, words: str) -> str:
    """`--max-tokens 64`, `--no-shuffle`: a flag that gives a parameter this value."""
    dashed = name.replace("_", "-")
    if words.lower() == "true":
        return f"--{dashed}"
    if words.lower() == "false":
        return f"--no-{dashed}"
    return f"--{dashed} {shlex.quote(words)}" if words else f"--{dashed}"


def _find_place(source: AnyGraph, text: str, path: str) -> tuple[int, Node, str]:
    """The phase's number, the node and the parameter's name of a text's path. Raises GraphError."""
    phases, rest = _choose_phases(source, path)
    nodes = [(number, node) for number, phase in phases for node in phase.graph.nodes]
    matches = [(number, node) for number, node in nodes if rest.startswith(f"{node.name}.")]
    if not matches:
        names = list(dict.fromkeys(node.name for _, node in nodes))
        name, _, param = rest.partition(".")
        near = nearest(name, names)
        fix = f"{near}.{param}=..." if near else f"one of {', '.join(names)}"
        raise setting_error(text, f"no node {name!r}", fix)
    # Names of nodes may have dots: `a.b.temperature` is of the node `a.b`, if there is one.
    longest = max(len(node.name) for _, node in matches)
    matches = [(number, node) for number, node in matches if len(node.name) == longest]
    if len({number for number, _ in matches}) > 1:
        fix = " or ".join(f"{numbered_name(number, rest)}=..." for number, _ in matches)
        numbers = ", ".join(str(number) for number, _ in matches)
        raise setting_error(text, f"phases {numbers} have it", fix)
    number, node = matches[0]
    return number, node, rest[longest + 1 :]


def _choose_phases(source: AnyGraph, path: str) -> tuple[list[tuple[int, Phase]], str]:
    """The numbered phases that a path may mean, and the path without a phase's number or name. The
    phase of a graph alone has neither.
    """
    phases = list(numbered_phases(source))
    first, slash, rest = path.partition("/")
    named = [(n, phase) for n, phase in phases if n and first in (str(n), phase.graph.name)]
    return (named, rest) if slash and named else (phases, path)


def _complete(source: AnyGraph, path: str, words: str) -> str:
    """The nearest texts of the right form: a parameter's name alone gets the nodes that have it."""
    known_paths = list(_list_paths(source))
    likely_paths = [p for p in known_paths if path in (p, p.rpartition(".")[2])]
    examples = [f"{likely_path}={words or '...'}" for likely_path in likely_paths[:3]]
    return " or ".join(examples) or "rollout.temperature=0.7"


def _list_paths(source: AnyGraph) -> Iterator[str]:
    """NODE.PARAM of every parameter that may be set, without phases."""
    for phase in source.phases:
        for node in phase.graph.nodes:
            for parameter in parameters_of(node):
                yield f"{node.name}.{parameter.name}"


def _unknown_error(
    text: str, words: str, node: Node, name: str, known: Sequence[str]
) -> GraphError:
    """The error for a name that is not one of the node's parameters, or may not be set."""
    unsettable = find_unsettable(node)
    if name in unsettable:
        what, fix = unsettable[name]
        return setting_error(text, f"{name} is {what}, which no text can give", fix)
    known_here = Known(parameters=[path.rpartition(".")[2] for path in known])
    likely_name: str | None = name.rpartition(".")[2]
    problem = f"{node.operator.name} {node.name!r} has no parameter {name!r}"
    peer = peer_name(name.rpartition(".")[2], known_here)
    if peer is not None:
        problem += f" ({peer.system}'s name)"
        likely_name = peer.find_ours(known_here)
    if not known:
        return setting_error(text, f"{problem}; it has none that can be set", "another node's")
    if peer is not None and likely_name is None:
        return setting_error(text, problem, peer.write_fix(known_here, words, flag=False))
    likely_paths = [path for path in known if path.rpartition(".")[2] == likely_name]
    near = nearest(name, known)
    if near and not likely_paths:
        likely_paths = [near]
    fixes = [f"{node.name}.{path}={words}" for path in likely_paths]
    return setting_error(text, problem, " or ".join(fixes) or f"one of {', '.join(known)}")


# --- editing a graph ------------------------------------------------------------------------------


def _edit_graph(graph: Graph, settings: Sequence[_Setting]) -> Graph:
    """The graph with these values. What follows from them in the nodes below (the columns of their
    outputs) is made anew.
    """

    def make(node: Node, inputs: Inputs, states: States) -> Node:
        node_settings = [setting for setting in settings if setting.node == node.name]
        rebuilt_node = node.rebuilt(inputs, states)
        if node_settings:
            edited_node = _set_parameters(rebuilt_node, node_settings)
        elif any(port.schema is not node.inputs[key].schema for key, port in inputs.items()):
            edited_node = remake_node(rebuilt_node, inputs, {})
        else:
            return rebuilt_node
        # The same object, so that a graph in which nothing changes stays the same one, too.
        return node if edited_node == node and rebuilt_node is node else edited_node

    return graph.remade(make)


def _set_parameters(node: Node, settings: Sequence[_Setting]) -> Node:
    params: dict[str, Any] = {}
    term_params: dict[str, Any] = {}
    for setting in settings:
        if "." in setting.name and setting.name not in node.params:
            term_params[setting.name] = setting.value
        else:
            params[setting.name] = setting.value
    try:
        node = _set_term_parameters(node, term_params)
        if params:
            node = remake_node(node, node.inputs, params)
        return node
    except GraphError as error:
        raise settings_error([setting.text for setting in settings], error) from error


def _set_term_parameters(node: Node, values: Mapping[str, Any]) -> Node:
    """values: by `LOSS.PARAM`."""
    loss = node.params.get("loss")
    if not values or not isinstance(loss, Loss):
        return node
    terms: list[LossTerm] = []
    for term in loss.terms:
        changes: dict[str, Any] = {}
        for path, value in values.items():
            label, _, name = path.rpartition(".")
            if label == term.label:
                changes[name] = value
        weight = term.weight
        if "weight" not in dict(term.params):  # else it is a parameter of that name
            weight = changes.pop("weight", weight)
        if changes or weight is not term.weight:
            term = remake_term(node, term, changes, weight)
        terms.append(term)
    return node.changed(params=node.params | {"loss": Loss(tuple(terms))})
