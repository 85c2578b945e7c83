"""Rows: each node has a kernel, and its inputs are made before it, in the right number.

Owns: kernels, producers and ratios. Does not own: which columns travel (passes/project.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from dataflow.errors import nearest
from dataflow.loss_terms import ROWS
from engine.plan.draft import Draft
from engine.plan.plan import PlannedNode
from engine.plan.planned_input import PlannedInput
from engine.plan.refusals import add_fix


def check_kernels(draft: Draft) -> Iterator[str]:
    """Each node has a kernel, each use of a State a module."""
    for node in draft.nodes:
        if not node.kernel:
            yield add_fix(f"{node.name} has none", "the pass choose_kernels comes before this one")
        for use in node.states:
            if not use.module:
                problem = f"{node.name} has no module for {use.model!r}"
                yield add_fix(problem, "the pass place comes before this one")


def check_producers(draft: Draft) -> Iterator[str]:
    """Every producer and every gate is a node that runs before."""
    before: set[str] = set()
    nodes = {node.name: node for node in draft.nodes}
    for node in draft.nodes:
        for i in node.inputs:
            yield from _check_order(node.name, i, before, nodes)
            yield from _check_returned(node.name, i, nodes)
        before.add(node.name)
    for i in draft.recorded:
        yield from _check_order("recorded", i, before, nodes)
        yield from _check_returned("recorded", i, nodes)


def _check_order(
    where: str, i: PlannedInput, before: Collection[str], nodes: Collection[str]
) -> Iterator[str]:
    """before: the nodes that run before it."""
    for name in (i.gate, *(fetch.producer for fetch in i.fetches)):
        if name not in before:
            state = "runs after it" if name in nodes else "is no node"
            problem = f"{where}.{i.name} expects rows of a node upstream, {name!r} {state}"
            yield add_fix(problem, nearest(name, before) or "a node upstream")


def _check_returned(where: str, i: PlannedInput, nodes: Mapping[str, PlannedNode]) -> Iterator[str]:
    for fetch in i.fetches:
        missing_columns: list[str] = []
        if fetch.producer in nodes:
            returns = nodes[fetch.producer].returns
            missing_columns = [column for column in fetch.columns if column not in returns]
        if missing_columns:
            problem = f"does not return {', '.join(missing_columns)}"
        elif not fetch.columns:
            problem = "is asked for no column"
        else:
            continue
        where_from = f"{where}.{i.name}: {fetch.producer!r}"
        yield add_fix(f"{where_from} {problem}", "the pass project says what returns")


def check_ratios(draft: Draft) -> Iterator[str]:
    """Input rows are a whole multiple, as stated, of the rows of each gate and producer."""
    nodes = {node.name: node for node in draft.nodes}
    for node in draft.nodes:
        for i in node.inputs:
            yield from _check_multiples(node, i, nodes)
        if node.rows % node.inner and node.relation != "source":
            problem = f"{node.name}: {node.rows} rows a prompt of {node.inner}"
            yield add_fix(problem, "a whole number of rows for each")
        if node.relation == "concat":
            yield from _check_side_by_side(node)


def _check_multiples(
    node: PlannedNode, i: PlannedInput, nodes: Mapping[str, PlannedNode]
) -> Iterator[str]:
    row_count = i.rows(node.inner)
    if i.row_set != ROWS and i.gate in nodes:
        # Rows of a term of a loss: as many as its gate has.
        row_count = nodes[i.gate].rows * i.ratio
    fetch_ratios = ((fetch.producer, fetch.ratio) for fetch in i.fetches)
    for name, ratio in ((i.gate, i.ratio), *fetch_ratios):
        if name in nodes and nodes[name].rows * ratio != row_count:
            each = f"{ratio} for each of the {nodes[name].rows} of {name!r}"
            problem = f"{node.name}.{i.name}: {row_count} rows a prompt, and {each}"
            fix = f"rows that {name!r} is an ancestor of"
            yield add_fix(problem, fix)


def _check_side_by_side(node: PlannedNode) -> Iterator[str]:
    """The rows of a concat's inputs, one after another, are its own."""
    ends = [0, *(i.offset + i.width for i in node.inputs)]
    begins = [*(i.offset for i in node.inputs), node.rows]
    if ends != begins:
        parts = ", ".join(f"{i.width} from {i.offset}" for i in node.inputs)
        problem = f"{node.name}: {node.rows} rows a prompt, of inputs with {parts}"
        yield add_fix(problem, "inputs one after another")
