"""Clocks: the Step moves training, an evaluation moves itself, and no node obeys two of them (L7,
L8).

Owns: what a source's batch means for whom it feeds, and that there is something to run. Does
not own: held-out data (held_out.py), numbers such as `every` (parameters.py), rows of two
sources in one node (lineage.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import Fault
from dataflow.node import Node
from dataflow.rules.context import Context, data_name, line_of


def check(context: Context) -> Iterator[Fault]:
    """No sinks, sources without a batch that train, sources with one that evaluate."""
    if not context.graph.sinks:
        where, fix = (
            f"Graph {context.graph.name!r}",
            "Graph(name, train(model, rollout, loss=..., lr=1e-6))",
        )
        problem = "expected at least one sink, found none"
        yield Fault(
            rule="clocks", where=where, problem=problem, fix=fix, origin=context.graph.origin
        )
    for source in context.sources:
        yield from _batch(context, source)


def _batch(context: Context, source: Node) -> Iterator[Fault]:
    batch = source.params.get("batch")
    evaluates = [s for s in context.fed[id(source)] if s.operator.work == "evaluate"]
    trains = [s for s in context.fed[id(source)] if s.operator.work != "evaluate"]
    if batch is None and trains:
        problem = (
            f"it feeds {trains[0].name} ({line_of(trains[0], source.origin)}) without batch=, which"
            " only an "
        )
        problem += "evaluation may do: it runs once to its end"
        yield Fault(
            rule="clocks",
            where=data_name(source),
            problem=problem,
            fix="batch=64",
            origin=source.origin,
        )
    if (
        batch is not None
        and evaluates
        and (not trains or evaluates[0].params.get("allow_train_data"))
    ):
        problem = f"it never ends, having batch={batch}, and {evaluates[0].name} "
        problem += f"({line_of(evaluates[0], source.origin)}) runs to the end of its source"
        fix = (
            "leave batch= out"
            if not trains
            else 'a second prompts(data, name="seen") without batch='
        )
        yield Fault(
            rule="clocks", where=data_name(source), problem=problem, fix=fix, origin=source.origin
        )
