"""Bytes of a prompt's rows as they wait for their Step, by how long its answers are.

Owns: the sizes of a node's columns, and what of them grows with answers. Does not own: how many
prompts wait (passes/intake_fit.py, passes/estimate.py), the size of a value (cost/column_bytes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from dataflow.node import Node
from dataflow.operator import DATA_ROW
from engine.plan.cost.column_bytes import column_bytes, data_bytes, row_bytes
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.models import cost_of_model
from engine.plan.draft import Draft
from engine.plan.lengths import all_lengths
from engine.plan.plan import PlannedNode


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRows:
    """What the rows of one prompt take that wait for their Step. longest: tokens of its answers at
    most; beside: what does not grow with them, in as many tokens.
    """

    longest: int
    beside: int


def measure_waiting_rows(draft: Draft, source: str) -> WaitingRows:
    """What rows of a source's prompts take in the stream region, of all nodes together."""
    shapes = {model.name: cost_of_model(model).shape for model in draft.graph_models}
    lengths = all_lengths(draft.graph, shapes)
    nodes = [node for node in draft.nodes if node.source == source and node.region == "stream"]
    longest = 0
    for node in nodes:
        if node.traits.generates:
            longest += node.rows * lengths[node.name].completion

    def sum_bytes(lengths_of: Callable[[Lengths], Lengths]) -> int:
        total = 0
        for node in nodes:
            declared = draft.graph.node(node.name)
            dataset = draft.dataset.get(node.name, {})
            sizes = size_columns(declared, node, lengths_of(lengths[node.name]), dataset)
            total += node.rows * row_bytes(sizes, node.returns)
        return total

    whole, without = sum_bytes(lambda each: each), sum_bytes(_drop_answer)
    if not longest or whole <= without:
        return WaitingRows(longest=longest, beside=0)
    return WaitingRows(longest=longest, beside=without * longest // (whole - without))


def _drop_answer(lengths: Lengths) -> Lengths:
    return replace(lengths, completion=0, counts=None, context=0)


def size_columns(
    node: Node, planned: PlannedNode, lengths: Lengths, dataset: Mapping[str, pa.DataType]
) -> dict[str, int]:
    """Bytes of one row's value of each column that a node offers. dataset: of a source, the columns
    of its data.
    """
    sizes: dict[str, int] = {}
    for schema in node.schemas:
        for column in schema.columns.values():
            sizes[column.name] = column_bytes(column, lengths)
    if node.operator.work == "source":
        others = {n: data_bytes(n, t, lengths) for n, t in dataset.items() if n not in sizes}
        sizes = others | sizes
        if DATA_ROW in planned.returns:
            sizes[DATA_ROW] = 8
    if node.operator.parts:
        sizes[node.operator.parts] = 4 * len(node.params["fns"])
    return sizes
