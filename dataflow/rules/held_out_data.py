"""Held-out data: evaluation data is not trained on, unless the user says so (L8), and answers to it
are scored as those that are trained.

Owns: asking whether a source for evaluation shares rows with one for training; a warning of weights
of reward functions that differ in the two. Does not own: how sharing is known for files and tasks
(the function that the operator names), overlaps that only the rows of different files could show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from dataflow.errors import Fault, GraphWarning
from dataflow.node import Node
from dataflow.rules.context import Context, data_name, function_at, line_of, place


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


def other_weights(context: Context) -> Iterator[GraphWarning]:
    """An evaluation by the functions of a trained reward, in another proportion: by its mean the
    best versions are kept.
    """
    rewards = [node for node in context.graph.nodes if node.params.get("fns")]
    trained = [node for node in rewards if context.regions.of[node.name] != "evaluation"]
    for node in (node for node in rewards if context.regions.of[node.name] == "evaluation"):
        alike = [other for other in trained if other.params["fns"] == node.params["fns"]]
        if not alike or any(_same_ranking(node, other) for other in alike):
            continue
        other = alike[0]
        problem = (
            f"weights={_listed(node)}, and {other.name!r} ({line_of(other, node.origin)}), which is"
            f" trained, has weights={_listed(other)} of the same functions: the best versions are"
            " not those by the reward that is trained"
        )
        fix = f"weights={_listed(other)} in both (--set {node.name}.weights='{_listed(other)}')"
        yield GraphWarning(
            rule="other_weights", where=place(node), problem=problem, fix=fix, origin=node.origin
        )


def _listed(node: Node) -> list[float]:
    """One weight for each function of a reward."""
    return list(node.params.get("weights") or [1.0] * len(node.params["fns"]))


def _same_ranking(node: Node, other: Node) -> bool:
    """Whether two rewards of the same functions are a positive multiple of each other."""
    pairs = list(zip(_listed(node), _listed(other), strict=True))
    factors = [mine / theirs for mine, theirs in pairs if theirs]
    zeros = all(mine == 0 for mine, theirs in pairs if not theirs)
    return zeros and all(f > 0 and math.isclose(f, factors[0]) for f in factors)
