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


def check_clocks(context: Context) -> Iterator[Fault]:
    """No sinks, sources without a batch that train, sources with a batch that evaluate."""
    graph = context.graph
    if not graph.sinks:
        where, problem = f"Graph {graph.name!r}", "expected at least one sink, found none"
        fix = "Graph(name, train(model, rollout, loss=..., lr=1e-6))"
        yield Fault(rule="clocks", where=where, problem=problem, fix=fix, origin=graph.origin)
    for source in context.sources:
        yield from _check_batch(context, source)


def _check_batch(context: Context, source: Node) -> Iterator[Fault]:
    batch, fed = source.params.get("batch"), context.fed[id(source)]
    evaluations = [sink for sink in fed if sink.operator.work == "evaluate"]
    others = [sink for sink in fed if sink.operator.work != "evaluate"]
    if batch is None:
        yield from _require_no_training(source, others)
    elif evaluations and (not others or evaluations[0].params.get("allow_train_data")):
        # Of data that trains, too, held_out_data.py has the better message.
        problem = (
            f"it never ends, having batch={batch}, and {evaluations[0].name}"
            f" ({line_of(evaluations[0], source.origin)}) runs to the end of its source"
        )
        second = 'a second prompts(data, name="seen") without batch='
        yield _fault(source, problem, second if others else "leave batch= out")


def _require_no_training(source: Node, sinks: list[Node]) -> Iterator[Fault]:
    """sinks: those that the source feeds besides evaluations."""
    if sinks:
        problem = (
            f"it feeds {sinks[0].name} ({line_of(sinks[0], source.origin)}) without batch=, which"
            " only an evaluation may do: it runs once to its end"
        )
        yield _fault(source, problem, "batch=64")


def _fault(source: Node, problem: str, fix: str) -> Fault:
    where = data_name(source)
    return Fault(rule="clocks", where=where, problem=problem, fix=fix, origin=source.origin)
