"""Rows: each node has a kernel, and its inputs are made before it, in the right number.

Owns: kernels, producers and ratios. Does not own: which columns travel (passes/project.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from dataflow.errors import nearest
from dataflow.loss_terms import ROWS
from engine.plan.draft import Draft
from engine.plan.plan import PlannedInput, PlannedNode


def kernels(draft: Draft) -> Iterator[str]:
    """Each node has a kernel, each use of a Model a module."""
    for node in draft.nodes:
        if not node.kernel:
            yield f"{node.name} has none. Fix: the pass choose_kernels comes before this one."
        for use in (use for use in node.models if not use.module):
            problem = f"{node.name} has no module for {use.model!r}"
            yield f"{problem}. Fix: the pass place comes before this one."


def producers(draft: Draft) -> Iterator[str]:
    """Every producer and every gate is a node that runs before."""
    before: set[str] = set()
    known = {n.name: n for n in draft.nodes}
    for node in draft.nodes:
        for i in node.inputs:
            yield from _before(node.name, i, before, known)
            yield from _returned(node.name, i, known)
        before.add(node.name)
    for i in draft.recorded:
        yield from _before("recorded", i, before, known)
        yield from _returned("recorded", i, known)


def _before(
    where: str, i: PlannedInput, before: Collection[str], known: Collection[str]
) -> Iterator[str]:
    for name in (i.gate, *(f.producer for f in i.fetches)):
        if name not in before:
            found = "runs after it" if name in known else "is no node"
            near = nearest(name, before) or "a node upstream"
            expected = f"{where}.{i.name} expects rows of a node upstream"
            yield f"{expected}, {name!r} {found}. Fix: {near}."


def _returned(where: str, i: PlannedInput, known: Mapping[str, PlannedNode]) -> Iterator[str]:
    for fetch in i.fetches:
        returns = known[fetch.producer].returns if fetch.producer in known else fetch.columns
        missing = [column for column in fetch.columns if column not in returns]
        if missing or not fetch.columns:
            lacks = f"does not return {', '.join(missing)}" if missing else "is asked for no column"
            problem = f"{where}.{i.name}: {fetch.producer!r} {lacks}"
            yield f"{problem}. Fix: the pass project says what returns."


def ratios(draft: Draft) -> Iterator[str]:
    """Input rows are a whole multiple, as stated, of the rows of each gate and producer."""
    known = {n.name: n for n in draft.nodes}
    for node in draft.nodes:
        for i in node.inputs:
            yield from _multiples(node, i, known)
        if node.rows % node.inner and node.relation != "source":
            problem = f"{node.name}: {node.rows} rows a prompt of {node.inner}"
            yield f"{problem}. Fix: a whole number of rows for each."
        if node.relation == "concat":
            yield from _side_by_side(node)


def _multiples(
    node: PlannedNode, i: PlannedInput, known: Mapping[str, PlannedNode]
) -> Iterator[str]:
    above = known.get(i.gate)
    own = i.row_set != ROWS and above is not None  # of a term of a loss: as many as its gate has
    wide = above.rows * i.ratio if own and above else i.rows(node.inner)
    for name, ratio in ((i.gate, i.ratio), *((f.producer, f.ratio) for f in i.fetches)):
        above = known.get(name)
        if above is not None and above.rows * ratio != wide:
            each = f"{ratio} for each of the {above.rows} of {name!r}"
            problem = f"{node.name}.{i.name}: {wide} rows a prompt, and {each}"
            yield f"{problem}. Fix: rows that {name!r} is an ancestor of."


def _side_by_side(node: PlannedNode) -> Iterator[str]:
    """The rows of a concat's inputs, one after another, are its own."""
    ends = [0, *(i.offset + i.width for i in node.inputs)]
    if ends != [*(i.offset for i in node.inputs), node.rows]:
        parts = ", ".join(f"{i.width} from {i.offset}" for i in node.inputs)
        problem = f"{node.name}: {node.rows} rows a prompt, of inputs with {parts}"
        yield f"{problem}. Fix: inputs one after another."
