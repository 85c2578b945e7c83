"""Held-out data: what is evaluated on has not been trained on, unless the user says so (L8).

Owns: comparing the data of sources that train with that of sources that evaluate. Does not
own: overlaps inside different files, which only their rows could show.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from dataflow.errors import Fault
from dataflow.node import Node
from dataflow.rules.context import Context, data_name


def check(context: Context) -> Iterator[Fault]:
    """Sources whose data both a train node and an evaluation see."""
    trained: dict[str, list[tuple[Node, Node]]] = {}
    sources = {s: str(PurePath(data)) for s in context.sources if isinstance(data := s.params.get("data"), str)}
    for source, data in sources.items():
        for sink in context.fed[id(source)]:
            if sink.operator.work == "train":
                trained.setdefault(data, []).append((source, sink))
    for source, data in sources.items():
        for sink in context.fed[id(source)]:
            if sink.operator.work == "evaluate" and not sink.params.get("allow_train_data"):
                yield from _seen(source, sink, trained.get(data, []))


def _seen(source: Node, evaluate: Node, trained: list[tuple[Node, Node]]) -> Iterator[Fault]:
    held = source.params.get("split")
    for other, train in trained:
        split = other.params.get("split")
        if other is not source and split is not None and held is not None and split != held:
            continue
        where = f"{data_name(source)} feeds {train.name} and {evaluate.name}"
        fix = "a second prompts(test), or evaluate(..., allow_train_data=True)"
        problem = "evaluation on training data"
        yield Fault(rule="held_out", where=where, problem=problem, fix=fix, origin=evaluate.origin)
        return
