"""From nodes to planned nodes: relations, widths, regions, gates, lags.

Owns: the structure that the coordinator runs on. Does not own: columns, kernels, places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.loss_terms import ROWS, Loss
from dataflow.model import Model
from dataflow.node import Node
from dataflow.operator import Concat, Expand, Fresh, Nothing, Reduce, Same, Subset
from dataflow.regions import Region, regions, trained_models
from dataflow.rows import Domain, Domains
from engine.plan.draft import Draft
from engine.plan.plan import ModelUse, PlannedInput, PlannedNode, PlannedSource, Relation, with_lags

MOST_ROWS = 1 << 26
"""In a Step. Estimates take some bytes for each."""
_RELATIONS: Mapping[type, Relation] = {
    Fresh: "source",
    Same: "same",
    Expand: "expand",
    Subset: "subset",
    Reduce: "reduce",
    Concat: "concat",
    Nothing: "sink",
}


def shape(draft: Draft) -> Draft:
    """One planned node for each node, in running order; the Step's sinks in the Graph's order."""
    domains, region = Domains(draft.graph), regions(draft.graph).of
    trained = trained_models(draft.graph)
    order = {id(s): i for i, s in enumerate(draft.graph.sinks)}
    ordered = sorted(draft.graph.nodes, key=lambda n: order.get(id(n), -1))
    nodes = tuple(_node(n, domains, region, trained) for n in ordered)
    sources = tuple(_sources(draft.graph, nodes, domains))
    _require_rows(nodes, {source.name: source.batch for source in sources})
    return replace(draft, nodes=with_lags(nodes, sources), sources=sources)


def _require_rows(nodes: tuple[PlannedNode, ...], batches: Mapping[str, int]) -> None:
    """Raise PlanError for a Step of more rows than a plan can look at one by one."""
    for node in nodes:
        rows = node.rows * batches.get(node.source, 1)
        if rows > MOST_ROWS:
            problem = f"{node.name}: expected at most {MOST_ROWS:,} rows in a Step, found {rows:,}"
            raise PlanError(f"{problem}. Fix: a lower batch, or a lower n.")


def width(domain: Domain | None) -> int:
    """Rows for each prompt, before selections: the width of the coordinator's tables."""
    return 1 if domain is None else domain.width


def _node(
    node: Node, domains: Domains, region: dict[str, Region], trained: set[str]
) -> PlannedNode:
    domain = domains.of_node(node)
    onto = node.operator.rows
    if domain is None:
        fix = f"give {node.operator.name} at least one input"
        raise PlanError(f"{node.name}: its rows cannot be derived. Fix: {fix}.")
    if isinstance(onto, Expand) and region[node.name] == "step":
        where = f"{node.name}: {node.operator.name} below the cut"
        problem = f"{where} makes new rows within a Step, which no plan does yet"
        raise PlanError(f"{problem}. Fix: let it read rows from above the cut.")
    widths = {key: width(domains.of(p)) for key, p in node.inputs.items()}
    outer, sets = width(domain), _row_sets(node)
    widest = {s: max(widths[key] for key in sets if sets[key] == s) for s in sets.values()}
    inner = outer if isinstance(onto, Reduce | Concat) else widest.get(ROWS, 1)
    return PlannedNode(
        name=node.name,
        operator=node.operator.name,
        work=node.operator.work,
        scope=node.operator.scope,
        region=region[node.name],
        relation=_RELATIONS[type(onto)],
        source=domain.source.name,
        rows=outer,
        inner=inner,
        inputs=tuple(_inputs(node, widths, {**widest, ROWS: inner}, sets)),
        models=tuple(_uses(node, trained)),
        tokens=next((schema.tokens for schema in node.schemas if schema.tokens), ""),
        max_lag=int(node.params.get("max_lag", 0)),
        refill=bool(node.params.get("refill", False)),
        max_attempts=int(node.params.get("max_attempts", 10)),
        every=int(node.params.get("every", 0)),
    )


def _row_sets(node: Node) -> dict[str, str]:
    """The row set of each input; all have the node's own unless terms of a loss have theirs."""
    loss = node.params.get("loss")
    bound = loss if isinstance(loss, Loss) else Loss(())
    return {key: bound.rows_of(key) for key in node.inputs}


def _inputs(
    node: Node, widths: Mapping[str, int], inner: Mapping[str, int], sets: Mapping[str, str]
) -> Iterator[PlannedInput]:
    """widths: rows of each input's gate for each prompt; inner: those of each row set; sets: the
    row set of each input.
    """
    rows, offset = node.operator.rows, 0
    for key, port in node.inputs.items():
        wide, of = widths[key], inner[sets[key]]
        known = PlannedInput(name=key, gate=port.node.name, row_set=sets[key])
        if isinstance(rows, Concat):
            yield replace(known, offset=offset, width=wide)
            offset += wide
        elif isinstance(rows, Reduce) and key == rows.of:
            yield replace(known, fan_in=wide // of)
        else:
            yield replace(known, ratio=max(1, of // wide))


def _uses(node: Node, trained: set[str]) -> Iterator[ModelUse]:
    models = {param: s.name for param, s in node.states.items() if isinstance(s, Model)}
    for param, name in models.items():
        access = "write" if param in node.operator.writes else "read"
        yield ModelUse(param=param, model=name, access=access, trained=name in trained)


def _sources(
    graph: Graph, nodes: tuple[PlannedNode, ...], domains: Domains
) -> Iterator[PlannedSource]:
    """Training sources. The lag is the least that readers of trained Models above the cut allow."""
    trained = [
        (n, {d.source.name for port in n.inputs.values() if (d := domains.of(port))})
        for n in (graph.node(n.name) for n in nodes if n.work == "train")
    ]
    for node in (n for n in nodes if n.work == "source" and n.region != "evaluation"):
        line = [n for n in nodes if n.source == node.name]
        trains = [train for train, sources in trained if node.name in sources]
        intake = trains[0].params["intake"] if trains else "exact"
        batch = graph.node(node.name).params["batch"]
        yield PlannedSource(name=node.name, batch=batch, max_lag=_lag(line), intake=intake)


def _lag(line: list[PlannedNode]) -> int:
    readers = (n for n in line if n.region == "stream" and any(u.trained for u in n.models))
    return min((n.max_lag for n in readers), default=0)
