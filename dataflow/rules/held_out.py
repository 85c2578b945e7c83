"""Held-out data: evaluation data is not trained on, unless the user says so (L8).

Owns: asking whether a source for evaluation shares rows with one for training. Does not own: how
that is known for files and tasks (the function that the operator names), overlaps that only the
rows of different files could show.
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import Fault
from dataflow.node import Node
from dataflow.rules.context import Context, data_name, function_at, line_of


def check(context: Context) -> Iterator[Fault]:
    """Sources whose data both a train node and an evaluation see."""
    sources = [s for s in context.sources if isinstance(s.params.get("data"), str)]
    trained = [
        (s, sink) for s in sources for sink in context.fed[id(s)] if sink.operator.work == "train"
    ]
    for source in sources:
        for sink in context.fed[id(source)]:
            if sink.operator.work == "evaluate" and not sink.params.get("allow_train_data"):
                yield from _seen(source, sink, trained)


def _seen(source: Node, evaluate: Node, trained: list[tuple[Node, Node]]) -> Iterator[Fault]:
    for other, train in trained:
        if other is not source and not _overlap(other, source):
            continue
        mine, theirs = data_name(source), data_name(other)
        where, problem = (
            f"{mine} feeds {train.name} and {evaluate.name}",
            "evaluation on training data",
        )
        if mine != theirs:
            where = (
                f"{theirs} ({line_of(other, evaluate.origin)}) feeds {train.name}, {mine} feeds"
                f" {evaluate.name}"
            )
            problem += (
                ": the two have rows of one file or its copy, or items of one task, in common"
            )
        fix = "a second prompts(test), or evaluate(..., allow_train_data=True)"
        yield Fault(rule="held_out", where=where, problem=problem, fix=fix, origin=evaluate.origin)
        return


def _overlap(one: Node, other: Node) -> bool:
    """The answer of the operators' function; without one, sources share rows if their data is the
    same.
    """
    a, b = ((s.params["data"], s.params.get("split")) for s in (one, other))
    path = one.operator.data_overlap
    if not path or path != other.operator.data_overlap:
        return a[0] == b[0]
    return function_at(path)(*a, *b)
