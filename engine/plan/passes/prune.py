"""Leave out what cannot change a number: ports of weight 0, recomputation of what is known.

Owns: the rewrites, and saying what they did. Does not own: dead columns (project.py).
"""

from __future__ import annotations

from dataclasses import replace

from dataflow.loss import Loss, LossTerm
from dataflow.node import Node
from dataflow.rows import Domains, physical
from dataflow.samplers import Samplers
from engine.plan.draft import Draft


def prune(draft: Draft) -> Draft:
    """Drop loss ports of constant weight 0, dead nodes, and `old` if a Step has one update: the
    loss then reads its own log-probs, detached.
    """
    notes: list[str] = []
    samplers = Samplers(draft.graph, Domains(draft.graph))
    graph = draft.graph.map(lambda node: _pruned(node, notes, samplers))
    before, after = {n.name for n in draft.graph.nodes}, {n.name for n in graph.nodes}
    dead = [f"{name}: left out, nothing reads it" for name in sorted(before - after)]
    return replace(draft, graph=graph, notes=(*draft.notes, *notes, *dead))


def _pruned(node: Node, notes: list[str], samplers: Samplers) -> Node:
    loss = node.params.get("loss")
    if not isinstance(loss, Loss):
        return node
    inputs, terms = dict(node.inputs), []
    for term in loss.terms:
        for port, parameter in term.function.zero:
            zero = dict(term.params).get(parameter) == 0
            if zero and inputs.pop(f"{term.label}.{port}", None) is not None:
                notes.append(f"{node.name}: {term.label}.{port} left out, {parameter} is 0")
        if _old_is_now(node, term, samplers):
            del inputs[f"{term.label}.old"]
            why = "a Step has one update, so it is the current log-probs"
            notes.append(f"{node.name}: {term.label}.old left out, {why}")
            term = replace(term, now=("old",))
        terms.append(term)
    if inputs.keys() == node.inputs.keys():
        return node
    return node.changed(inputs=inputs, params=node.params | {"loss": Loss(tuple(terms))})


def _old_is_now(node: Node, term: LossTerm, samplers: Samplers) -> bool:
    port = node.inputs.get(f"{term.label}.old")
    if port is None or node.params["epochs"] * node.params["minibatches"] != 1:
        return False
    made_by = port.node
    if not made_by.operator.log_probs or made_by.states.get("model") != node.states["model"]:
        return False
    if physical(made_by.inputs["rows"]) != physical(node.inputs[term.on]):
        return False  # the current log-probs are those of the rows that are trained
    own, rows = made_by.params["temperature"], node.inputs[term.on]
    as_sampled = own is None or samplers.all_at(rows, own)
    return as_sampled and made_by.params["max_lag"] == 0
