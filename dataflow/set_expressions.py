"""Settings: `NODE.PARAM=VALUE` texts that edit a finished graph, and what they may name.

Owns: finding node and parameter, what is refused, and the edited graph. Does not own: what a
parameter takes (literals.py), making a node anew (operator_functions.py), the rules (the check runs
after).

A loss's parameter is `NODE.LOSS.PARAM`, the factor of its term `NODE.LOSS.weight`, LOSS being the
term's label; in a Program `PHASE/NODE.PARAM`, by the phase's number or name, where phases share it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dataflow.errors import Fault, GraphError, nearest
from dataflow.graph import Graph, Inputs, Phase, States
from dataflow.loss import Loss
from dataflow.names import Known, peer_name
from dataflow.node import Node
from dataflow.operator_functions import remade, remade_term
from dataflow.parameters import NodeParameter, parameters_of, unsettable
from dataflow.program import AnyGraph, Program, numbered_name, numbered_phases

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
    """One text, taken apart. phase: its number."""

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
    settings_by_path: dict[tuple[int, str, str], _Setting] = {}
    for text in settings:
        setting = _read(source, text, flags)
        if setting.path in settings_by_path:
            raise refused(text, f"{setting.node}.{setting.name} is set twice", "leave one out")
        settings_by_path[setting.path] = setting
    graphs: list[Graph] = []
    changed = False
    for number, phase in numbered_phases(source):
        phase_settings = [each for each in settings_by_path.values() if each.phase == number]
        graph = _edited(phase.graph, phase_settings)
        changed = changed or graph is not phase.graph
        graphs.append(graph)
    return source.with_graphs(graphs) if changed else source


def settable(source: AnyGraph) -> list[SettableNode]:
    """Every node with the parameters that a setting may change, in the order of the graph."""
    nodes: list[SettableNode] = []
    for number, phase in numbered_phases(source):
        for node in phase.graph.nodes:
            name, parameters = numbered_name(number, node.name), tuple(parameters_of(node))
            nodes.append(
                SettableNode(name=name, operator=node.operator.name, parameters=parameters)
            )
    return nodes


def refused(text: str, problem: str, fix: str) -> GraphError:
    """The error of a setting."""
    return GraphError(
        Fault(rule="setting", where=f"setting {text!r:.80}", problem=problem, fix=fix)
    )


def _read(source: AnyGraph, text: str, flags: Mapping[str, str]) -> _Setting:
    """A text as a setting of a parameter that may be set. Raises GraphError."""
    number, node, name = _place(source, text)
    path, words = numbered_name(number, f"{node.name}.{name}"), text.partition("=")[2]
    known = {parameter.name: parameter for parameter in parameters_of(node)}
    if path in flags and (name in known or name in unsettable(node)):
        same = name in known and flags[path] == name.rpartition(".")[2]
        problem = f"{path} is given by the graph function's own parameter {flags[path]}"
        raise refused(text, problem, _flag(flags[path], words if same else ""))
    if name not in known:
        raise _unknown(text, node, name, list(known))
    try:
        value = known[name].accepted.read(words)
    except GraphError as error:
        raise _inside([text], error) from error
    except ValueError as error:
        like = known[name].accepted.fix(words)
        fix = f"{text.partition('=')[0]}={like}" if like else "a value of that kind"
        raise refused(text, f"for {name} {error}", fix) from None
    return _Setting(text=text, phase=number, node=node.name, name=name, value=value)


def _flag(name: str, words: str) -> str:
    """`--max-tokens 64`, `--no-shuffle`: a flag that gives a parameter this value."""
    dashed = name.replace("_", "-")
    if words.lower() in ("true", "false"):
        return f"--{dashed}" if words.lower() == "true" else f"--no-{dashed}"
    return f"--{dashed} {shlex.quote(words)}" if words else f"--{dashed}"


def _place(source: AnyGraph, text: str) -> tuple[int, Node, str]:
    """The phase's number, the node and the parameter's name of a text. Raises GraphError."""
    path, equals, _ = text.partition("=")
    if not equals or "." not in path:
        raise refused(text, "expected NODE.PARAM=VALUE", _completed(source, path, text))
    phases, rest = _phases(source, path.strip())
    nodes = [(number, node) for number, phase in phases for node in phase.graph.nodes]
    matches = [(number, node) for number, node in nodes if rest.startswith(f"{node.name}.")]
    if not matches:
        names = list(dict.fromkeys(node.name for _, node in nodes))
        name, _, param = rest.partition(".")
        near = nearest(name, names)
        fix = f"{near}.{param}=..." if near else f"one of {', '.join(names)}"
        raise refused(text, f"no node {name!r}", fix)
    longest = max(len(node.name) for _, node in matches)
    matches = [(number, node) for number, node in matches if len(node.name) == longest]
    if len({number for number, _ in matches}) > 1:
        fix = " or ".join(f"{numbered_name(number, rest)}=..." for number, _ in matches)
        numbers = ", ".join(str(number) for number, _ in matches)
        raise refused(text, f"phases {numbers} have it", fix)
    number, node = matches[0]
    return number, node, rest[longest + 1 :]


def _phases(source: AnyGraph, path: str) -> tuple[list[tuple[int, Phase]], str]:
    """The numbered phases that a path may mean, and the path without a phase's number or name. The
    phase of a graph alone has neither.
    """
    phases = list(numbered_phases(source))
    first, slash, rest = path.partition("/")
    named = [(n, phase) for n, phase in phases if n and first in (str(n), phase.graph.name)]
    return (named, rest) if slash and named else (phases, path)


def _completed(source: AnyGraph, path: str, text: str) -> str:
    """The nearest text of the right form: a parameter that only one node has gets its node."""
    value = text.partition("=")[2] or "..."
    names = [
        f"{node.name}.{parameter.name}"
        for phase in source.phases
        for node in phase.graph.nodes
        for parameter in parameters_of(node)
    ]
    found = [name for name in names if name == path or name.rpartition(".")[2] == path]
    return " or ".join(f"{name}={value}" for name in found[:3]) or "rollout.temperature=0.7"


def _unknown(text: str, node: Node, name: str, known: Sequence[str]) -> GraphError:
    """The error for a name that is not one of the node's parameters, or may not be set."""
    if name in (refusals := unsettable(node)):
        what, fix = refusals[name]
        return refused(text, f"{name} is {what}, which no text can give", fix)
    last = [path.rpartition(".")[2] for path in known]
    there, value = Known(parameters=last), text.partition("=")[2]
    peer = peer_name(name.rpartition(".")[2], there)
    problem = f"{node.operator.name} {node.name!r} has no parameter {name!r}"
    problem += f" ({peer.system}'s name)" if peer else ""
    if not known:
        return refused(text, f"{problem}; it has none that can be set", "another node's")
    wanted = peer.here(there) if peer else name.rpartition(".")[2]
    if peer is not None and wanted is None:
        return refused(text, problem, peer.told(there, value, flag=False))
    near = [path for path in known if path.rpartition(".")[2] == wanted]
    near = near or [path for path in (nearest(name, known),) if path]
    fixes = [f"{node.name}.{path}={value}" for path in near]
    return refused(text, problem, " or ".join(fixes) or f"one of {', '.join(known)}")


def _edited(graph: Graph, settings: Sequence[_Setting]) -> Graph:
    """The graph with these values. What follows from them in the nodes below (the columns of their
    outputs) is made anew.
    """

    def make(node: Node, inputs: Inputs, states: States) -> Node:
        given = [s for s in settings if s.node == node.name]
        moved = any(port.schema is not node.inputs[key].schema for key, port in inputs.items())
        kept = node.rebuilt(inputs, states)
        if given:
            made = _with_settings(kept, given)
        elif moved:
            made = remade(kept, inputs, {})
        else:
            return kept
        return node if made == node and kept is node else made

    return graph.remade(make)


def _with_settings(node: Node, settings: Sequence[_Setting]) -> Node:
    own = {s.name: s.value for s in settings if "." not in s.name or s.name in node.params}
    try:
        node = _with_terms(node, {s.name: s.value for s in settings if s.name not in own})
        return remade(node, node.inputs, own) if own else node
    except GraphError as error:
        raise _inside([s.text for s in settings], error) from error


def _with_terms(node: Node, values: Mapping[str, Any]) -> Node:
    loss = node.params.get("loss")
    if not values or not isinstance(loss, Loss):
        return node
    terms = []
    for term in loss.terms:
        mine = {
            k.removeprefix(f"{term.label}."): v
            for k, v in values.items()
            if k.rpartition(".")[0] == term.label
        }
        own = "weight" in dict(term.params)
        weight = term.weight if own else mine.pop("weight", term.weight)
        terms.append(
            remade_term(node, term, mine, weight) if mine or weight is not term.weight else term
        )
    return node.changed(params=node.params | {"loss": Loss(tuple(terms))})


def _inside(texts: Sequence[str], error: GraphError) -> GraphError:
    """What a function of the language refused, as the fault of the settings."""
    where = "setting " + ", ".join(f"{text!r:.80}" for text in texts)
    return GraphError(
        [replace(f, rule="setting", where=f"{where}: {f.where}", origin=None) for f in error.faults]
    )
