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
from dataflow.rules.context import Context, data_name, function_at, line_of, warning_at


def check_held_out_data(context: Context) -> Iterator[Fault]:
    """Sources whose data both a train node and an evaluation see."""
    sources = [source for source in context.sources if isinstance(source.params.get("data"), str)]
    trained: list[tuple[Node, Node]] = []
    for source in sources:
        trains = [sink for sink in context.fed[id(source)] if sink.operator.work == "train"]
        trained += [(source, train) for train in trains]
    for source in sources:
        for sink in context.fed[id(source)]:
            if sink.operator.work == "evaluate" and not sink.params.get("allow_train_data"):
                yield from _check_source(source, sink, trained)


def _check_source(
    source: Node, evaluate: Node, trained: list[tuple[Node, Node]]
) -> Iterator[Fault]:
    """trained: (source, train node) of all that are trained on."""
    for other, train in trained:
        if other is not source and not _overlap(other, source):
            continue
        evaluated_data, trained_data = data_name(source), data_name(other)
        where = f"{evaluated_data} feeds {train.name} and {evaluate.name}"
        problem = "evaluation on training data"
        if evaluated_data != trained_data:
            where = (
                f"{trained_data} ({line_of(other, evaluate.origin)}) feeds {train.name},"
                f" {evaluated_data} feeds {evaluate.name}"
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
    path = one.operator.data_overlap
    if not path or path != other.operator.data_overlap:
        return one.params["data"] == other.params["data"]
    share_rows = function_at(path)
    one_data = (one.params["data"], one.params.get("split"))
    other_data = (other.params["data"], other.params.get("split"))
    return share_rows(*one_data, *other_data)


def other_weights(context: Context) -> Iterator[GraphWarning]:
    """An evaluation by the functions of a trained reward, in another proportion: by its mean the
    best versions are kept.
    """
    evaluated: list[Node] = []
    trained: list[Node] = []
    for node in context.graph.nodes:
        if node.params.get("fns"):
            if context.regions.of[node.name] == "evaluation":
                evaluated.append(node)
            else:
                trained.append(node)
    for node in evaluated:
        same_functions = [each for each in trained if each.params["fns"] == node.params["fns"]]
        if not same_functions or any(_rank_alike(node, other) for other in same_functions):
            continue
        other = same_functions[0]
        weights = _weights_of(other)
        problem = (
            f"weights={_weights_of(node)}, and {other.name!r} ({line_of(other, node.origin)}),"
            f" which is trained, has weights={weights} of the same functions: the best versions are"
            " not those by the reward that is trained"
        )
        fix = f"weights={weights} in both (--set {node.name}.weights='{weights}')"
        yield warning_at(node, "other_weights", problem, fix)


def _weights_of(node: Node) -> list[float]:
    """One weight for each function of a reward."""
    return list(node.params.get("weights") or [1.0] * len(node.params["fns"]))


def _rank_alike(node: Node, other: Node) -> bool:
    """Whether two rewards of the same functions are a positive multiple of each other."""
    factors: list[float] = []
    for weight, other_weight in zip(_weights_of(node), _weights_of(other), strict=True):
        if other_weight:
            factors.append(weight / other_weight)
        elif weight:
            return False
    return all(factor > 0 and math.isclose(factor, factors[0]) for factor in factors)
