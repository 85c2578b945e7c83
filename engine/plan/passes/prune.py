"""Leave out what cannot change a number: ports of weight 0, recomputation of what is known.

Owns: the rewrites, and saying what they did. Does not own: dead columns (project.py).
"""

from __future__ import annotations

from dataclasses import replace

from dataflow.loss import Loss, LossTerm
from dataflow.node import Node
from dataflow.rows import Domains, physical_port
from dataflow.samplers import Samplers
from engine.plan.draft import Draft


def prune_graph(draft: Draft) -> Draft:
    """Drop loss ports of constant weight 0, dead nodes, and `old` if a Step has one update: the
    loss then reads its own log-probs, detached.
    """
    notes: list[str] = []
    samplers = Samplers(draft.graph, Domains(draft.graph))
    graph = draft.graph.map(lambda node: _prune_ports(node, notes, samplers))
    live = {node.name for node in graph.nodes}
    dead = {node.name for node in draft.graph.nodes} - live
    notes += [f"{name}: left out, nothing reads it" for name in sorted(dead)]
    return replace(draft, graph=graph, notes=(*draft.notes, *notes))


def _prune_ports(node: Node, notes: list[str], samplers: Samplers) -> Node:
    loss = node.params.get("loss")
    if not isinstance(loss, Loss):
        return node
    inputs = dict(node.inputs)
    terms: list[LossTerm] = []
    for term in loss.terms:
        for port, parameter in term.function.zero:
            key = f"{term.label}.{port}"
            if dict(term.params).get(parameter) == 0 and key in inputs:
                del inputs[key]
                notes.append(f"{node.name}: {key} left out, {parameter} is 0")
        if _is_old_current(node, term, samplers):
            del inputs[f"{term.label}.old"]
            why = "a Step has one update, so it is the current log-probs"
            notes.append(f"{node.name}: {term.label}.old left out, {why}")
            term = replace(term, now=("old",))
        terms.append(term)
    if inputs.keys() == node.inputs.keys():
        return node
    params = node.params | {"loss": Loss(tuple(terms))}
    return node.changed(inputs=inputs, params=params)


def _is_old_current(node: Node, term: LossTerm, samplers: Samplers) -> bool:
    """Whether `old` of a term is what the Model that is trained computes in the Step itself."""
    old = node.inputs.get(f"{term.label}.old")
    updates = node.params["epochs"] * node.params["minibatches"]
    if old is None or updates != 1:
        return False
    maker = old.node
    if not maker.operator.log_probs or maker.states.get("model") != node.states["model"]:
        return False
    rows = node.inputs[term.on]
    if physical_port(maker.inputs["rows"]) != physical_port(rows):
        return False  # the current log-probs are those of the rows that are trained
    temperature = maker.params["temperature"]
    is_as_sampled = temperature is None or samplers.all_at(rows, temperature)
    return is_as_sampled and maker.params["max_lag"] == 0
