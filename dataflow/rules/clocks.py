"""Clocks: the Step drives training, an evaluation drives itself, and no node has two (L7, L8).

Owns: what a source's batch means for the sinks that it feeds, and that there is something to run.
Does not own: held-out data (held_out_data.py), numbers such as `every` (parameters.py), rows of two
sources in one node (lineage.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import Fault
from dataflow.node import Node
from dataflow.rules.context import Context, data_name, line_of


def check(context: Context) -> Iterator[Fault]:
    """No sinks, sources without a batch that train, sources with a batch that evaluate."""
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
    batch, fed = source.params.get("batch"), context.fed[id(source)]
    evaluates = [s for s in fed if s.operator.work == "evaluate"]
    trains = [s for s in fed if s.operator.work != "evaluate"]
    if batch is None:
        yield from _no_batch(source, trains)
    elif evaluates and (not trains or evaluates[0].params.get("allow_train_data")):
        problem = (
            f"it never ends, having batch={batch}, and {evaluates[0].name}"
            f" ({line_of(evaluates[0], source.origin)}) runs to the end of its source"
        )
        second = 'a second prompts(data, name="seen") without batch='
        yield _fault(source, problem, second if trains else "leave batch= out")


def _no_batch(source: Node, trains: list[Node]) -> Iterator[Fault]:
    if trains:
        problem = (
            f"it feeds {trains[0].name} ({line_of(trains[0], source.origin)}) without batch=, which"
            " only an evaluation may do: it runs once to its end"
        )
        yield _fault(source, problem, "batch=64")


def _fault(source: Node, problem: str, fix: str) -> Fault:
    where = data_name(source)
    return Fault(rule="clocks", where=where, problem=problem, fix=fix, origin=source.origin)
