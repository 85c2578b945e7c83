"""From nodes to planned nodes: relations, widths, regions, gates, lags.

Owns: the structure that the coordinator runs on. Does not own: columns, kernels, places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.loss_terms import ROWS, Loss
from dataflow.model import Model, Table
from dataflow.node import Node, Port
from dataflow.operator import Concat, Expand, Fresh, Nothing, Reduce, Same, Subset
from dataflow.regions import find_trained_models, regions
from dataflow.rows import Domain, Domains, physical_port
from engine.plan.draft import Draft
from engine.plan.plan import ModelUse, PlannedNode, Relation
from engine.plan.planned_input import PlannedInput
from engine.plan.planned_source import PlannedSource
from engine.plan.refusals import add_fix

WEIGHT = "weight"
"""The input of a generation, and the column of what makes it, that weighs its rows."""

MOST_ROWS = 1 << 26
"""The most rows of a Step. Estimates take some bytes for each."""
_RELATIONS: Mapping[type, Relation] = {
    Fresh: "source",
    Same: "same",
    Expand: "expand",
    Subset: "subset",
    Reduce: "reduce",
    Concat: "concat",
    Nothing: "sink",
}


def shape_nodes(draft: Draft) -> Draft:
    """One planned node for each node, in running order; the Step's sinks in the Graph's order."""
    shaper = _Shaper(draft.graph)
    sink_order = {id(sink): index for index, sink in enumerate(draft.graph.sinks)}
    ordered_nodes = sorted(draft.graph.nodes, key=lambda node: sink_order.get(id(node), -1))
    nodes = tuple(map(shaper.plan_node, ordered_nodes))
    sources = tuple(shaper.plan_sources(nodes))
    _require_rows(nodes, {source.name: source.batch for source in sources})
    return replace(draft, nodes=set_lags(nodes, sources), sources=sources)


def _require_rows(nodes: tuple[PlannedNode, ...], batches: Mapping[str, int]) -> None:
    """Raise PlanError for a Step of more rows than a plan can look at one by one."""
    for node in nodes:
        rows = node.rows * batches.get(node.source, 1)
        if rows > MOST_ROWS:
            problem = f"{node.name}: expected at most {MOST_ROWS:,} rows in a Step, found {rows:,}"
            raise PlanError(add_fix(problem, "a lower batch, or a lower n"))


def set_lags(
    nodes: Iterable[PlannedNode], sources: Iterable[PlannedSource]
) -> tuple[PlannedNode, ...]:
    """Set each node's lag: in a stream its source's, else 0."""
    lags = {("stream", s.name): s.max_lag for s in sources}
    nodes_with_lag: list[PlannedNode] = []
    for node in nodes:
        lag = lags.get((node.region, node.source), 0)
        nodes_with_lag.append(node if node.lag == lag else replace(node, lag=lag))
    return tuple(nodes_with_lag)


def row_width(domain: Domain | None) -> int:
    """Rows for each prompt, before selections: the width of the coordinator's tables."""
    return 1 if domain is None else domain.width


class _Shaper:
    """Plans nodes one by one, by what the whole graph says of their rows and regions."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._domains = Domains(graph)
        self._regions = regions(graph).of
        self._trained = find_trained_models(graph)

    def plan_node(self, node: Node) -> PlannedNode:
        """Raises PlanError for rows that no plan has."""
        domain = self._require_domain(node)
        row_sets = _find_row_sets(node)
        widths: dict[str, int] = {}
        set_widths: dict[str, int] = {}
        for key, port in node.inputs.items():
            widths[key] = row_width(self._domains.of(port))
            row_set = row_sets[key]
            set_widths[row_set] = max(widths[key], set_widths.get(row_set, 0))
        inner = set_widths.get(ROWS, 1)
        if isinstance(node.operator.rows, Reduce | Concat):
            inner = domain.width
        set_widths[ROWS] = inner
        return PlannedNode(
            name=node.name,
            operator=node.operator.name,
            work=node.operator.work,
            scope=node.operator.scope,
            region=self._regions[node.name],
            relation=_RELATIONS[type(node.operator.rows)],
            source=domain.source.name,
            rows=domain.width,
            inner=inner,
            inputs=tuple(_plan_inputs(node, widths, set_widths, row_sets)),
            models=tuple(self._find_uses(node)),
            tables=tuple(_find_table_uses(node)),
            tokens=next((schema.tokens for schema in node.schemas if schema.tokens), ""),
            max_lag=int(node.params.get("max_lag", 0)),
            refill=bool(node.params.get("refill", False)),
            max_attempts=int(node.params.get("max_attempts", 10)),
            every=_count_steps_between(node),
            segments=_count_segments(node),
        )

    def _require_domain(self, node: Node) -> Domain:
        domain = self._domains.of_node(node)
        if domain is None:
            fix = f"give {node.operator.name} at least one input"
            raise PlanError(add_fix(f"{node.name}: its rows cannot be derived", fix))
        if isinstance(node.operator.rows, Expand) and self._regions[node.name] == "step":
            where = f"{node.name}: {node.operator.name} below the cut"
            problem = f"{where} makes new rows within a Step, which no plan does yet"
            raise PlanError(add_fix(problem, "let it read rows from above the cut"))
        return domain

    def _find_uses(self, node: Node) -> Iterator[ModelUse]:
        for param, state in node.states.items():
            if isinstance(state, Model):
                access = "write" if param in node.operator.writes else "read"
                trained = state.name in self._trained
                yield ModelUse(param=param, model=state.name, access=access, trained=trained)

    def plan_sources(self, nodes: tuple[PlannedNode, ...]) -> Iterator[PlannedSource]:
        """Training sources. The lag is the least that readers of trained Models above the cut
        allow.
        """
        trains = [self._graph.node(node.name) for node in nodes if node.work == "train"]
        # The first train node that reads a source's rows says how they are taken in.
        intakes: dict[str, Literal["exact", "admission", "drop"]] = {}
        for train in trains:
            for port in train.inputs.values():
                domain = self._domains.of(port)
                if domain is not None:
                    intakes.setdefault(domain.source.name, train.params["intake"])
        for node in nodes:
            if node.work == "source" and node.region != "evaluation":
                yield PlannedSource(
                    name=node.name,
                    batch=self._graph.node(node.name).params["batch"],
                    max_lag=_least_lag(n for n in nodes if n.source == node.name),
                    intake=intakes.get(node.name, "exact"),
                )


def _count_steps_between(node: Node) -> int:
    """Steps between two rounds of an evaluation; a train node consumes rows in each Step."""
    if node.operator.work != "evaluate":
        return 0
    return int(node.params["every"])


def _find_table_uses(node: Node) -> Iterator[ModelUse]:
    for param, state in node.states.items():
        if isinstance(state, Table):
            access = "write" if param in node.operator.writes else "read"
            yield ModelUse(param=param, model=state.name, access=access, trained=True)


def _count_segments(node: Node) -> int:
    rows = node.operator.rows
    if isinstance(rows, Expand) and rows.times:
        return int(node.params[rows.times])
    return 1


def _find_row_sets(node: Node) -> dict[str, str]:
    """The row set of each input; all have the node's own unless terms of a loss have theirs."""
    loss = node.params.get("loss")
    if not isinstance(loss, Loss):
        loss = Loss(())
    return {key: loss.rows_of(key) for key in node.inputs}


def _plan_inputs(
    node: Node,
    widths: Mapping[str, int],
    set_widths: Mapping[str, int],
    row_sets: Mapping[str, str],
) -> Iterator[PlannedInput]:
    """widths: rows of each input's gate for each prompt; set_widths: those of each row set;
    row_sets: the row set of each input.
    """
    rows = node.operator.rows
    offset = 0
    for key, port in node.inputs.items():
        gate_width = widths[key]
        inner = set_widths[row_sets[key]]
        gate = _find_gate(node, key, port)
        planned_input = PlannedInput(name=key, gate=gate.name, row_set=row_sets[key])
        if isinstance(rows, Concat):
            yield replace(planned_input, offset=offset, width=gate_width)
            offset += gate_width
        elif isinstance(rows, Reduce) and key == rows.of:
            yield replace(planned_input, fan_in=gate_width // inner)
        else:
            yield replace(planned_input, ratio=max(1, inner // gate_width))


def _find_gate(node: Node, key: str, port: Port[Any]) -> Node:
    """The node whose rows an input waits for."""
    if key == WEIGHT and node.operator.traits.generates:
        # What made the rows told their weights; a selection of them, which the prompt went
        # through as well, has none to tell.
        return physical_port(port).node
    return port.node


def _least_lag(nodes: Iterable[PlannedNode]) -> int:
    """The least lag that the readers of trained Models and of Tables allow, of nodes of one
    source.
    """
    lags: list[int] = []
    for node in nodes:
        if node.region == "stream" and any(use.trained for use in node.states):
            lags.append(node.max_lag)
    return min(lags, default=0)
