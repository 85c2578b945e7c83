"""From nodes to planned nodes: relations, widths, regions, gates, lags.

Owns: the structure that the coordinator runs on. Does not own: which columns travel
(project.py), kernels, layouts or places.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Node
from dataflow.operator import Expand, Fresh, Nothing, Reduce, Subset
from dataflow.regions import Region, regions, trained_models
from dataflow.rows import Domain, Domains
from engine.plan.draft import Draft
from engine.plan.plan import (
    ModelUse,
    PlannedInput,
    PlannedNode,
    PlannedSource,
    Relation,
    with_lags,
)


def shape(draft: Draft) -> Draft:
    """One planned node for each node, in running order, the sinks of the Step in the order of the
    Graph's sinks.
    """
    domains, found, trained = (
        Domains(draft.graph),
        regions(draft.graph),
        trained_models(draft.graph),
    )
    order = {id(s): i for i, s in enumerate(draft.graph.sinks)}
    ordered = sorted(draft.graph.nodes, key=lambda n: order.get(id(n), -1))
    nodes = tuple(_node(n, domains, found.of, trained) for n in ordered)
    sources = tuple(_sources(draft.graph, nodes))
    return replace(draft, nodes=with_lags(nodes, sources), sources=sources)


def width(domain: Domain | None) -> int:
    """Rows for each prompt, selections not counted: the width of the coordinator's tables."""
    return 1 if domain is None else prod(d.factor for d in domain.ancestors())


def _node(
    node: Node, domains: Domains, region: dict[str, Region], trained: set[str]
) -> PlannedNode:
    domain = domains.of_node(node)
    onto = node.operator.rows
    if domain is None:
        raise PlanError(
            f"{node.name}: its rows cannot be derived. Fix: give {node.operator.name} at least one"
            " input."
        )
    if isinstance(onto, Expand) and region[node.name] == "step":
        where = f"{node.name}: {node.operator.name} below the cut"
        raise PlanError(
            f"{where} makes new rows within a Step, which no plan does yet. Fix: let it read rows"
            " from above the cut."
        )
    widths = {key: width(domains.of(p)) for key, p in node.inputs.items()}
    outer = width(domain)
    inner = outer if isinstance(onto, Reduce) else max(widths.values(), default=1)
    return PlannedNode(
        name=node.name,
        operator=node.operator.name,
        work=node.operator.work,
        scope=node.operator.scope,
        region=region[node.name],
        relation=_relation(node),
        source=domain.source.name,
        rows=outer,
        inner=inner,
        inputs=tuple(_input(node, key, widths[key], inner) for key in node.inputs),
        models=tuple(_uses(node, trained)),
        tokens=next((schema.tokens for schema in node.schemas if schema.tokens), ""),
        max_lag=int(node.params.get("max_lag", 0)),
        refill=bool(node.params.get("refill", False)),
        max_attempts=int(node.params.get("max_attempts", 10)),
        every=int(node.params.get("every", 0)),
    )


def _input(node: Node, key: str, wide: int, inner: int) -> PlannedInput:
    """wide: rows of the input's gate for each prompt; inner: those of the node's chunks."""
    rows = node.operator.rows
    fan_in = wide // inner if isinstance(rows, Reduce) and key == rows.of else 0
    gate = node.inputs[key].node.name
    return PlannedInput(name=key, gate=gate, ratio=max(1, inner // wide), fan_in=fan_in)


def _relation(node: Node) -> Relation:
    kind = node.operator.rows
    if isinstance(kind, Fresh):
        return "source"
    if isinstance(kind, Nothing):
        return "sink"
    if isinstance(kind, Reduce):
        return "reduce"
    return (
        "subset" if isinstance(kind, Subset) else "expand" if isinstance(kind, Expand) else "same"
    )


def _uses(node: Node, trained: set[str]) -> list[ModelUse]:
    uses = []
    for param, state in node.states.items():
        if isinstance(state, Model):
            access = "write" if param in node.operator.writes else "read"
            uses.append(
                ModelUse(
                    param=param, model=state.name, access=access, trained=state.name in trained
                )
            )
    return uses


def _sources(graph: Graph, nodes: tuple[PlannedNode, ...]) -> list[PlannedSource]:
    """Training sources. The lag is the least of those that the trained Models' readers above the
    cut allow.
    """
    found = []
    for node in nodes:
        if node.work != "source" or node.region == "evaluation":
            continue
        line = [n for n in nodes if n.source == node.name]
        trains = [graph.node(n.name) for n in line if n.work == "train"]
        policy = trains[0].params["intake"] if trains else "exact"
        batch = graph.node(node.name).params["batch"]
        found.append(PlannedSource(name=node.name, batch=batch, max_lag=_lag(line), intake=policy))
    return found


def _lag(line: list[PlannedNode]) -> int:
    readers = (n for n in line if n.region == "stream" and any(u.trained for u in n.models))
    return min((n.max_lag for n in readers), default=0)
