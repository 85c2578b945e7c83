"""Rows: each node has a kernel, and its inputs are made before it, in the right number.

Owns: kernels, producers and ratios. Does not own: which columns travel (passes/project.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dataflow.errors import nearest
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
    for node in draft.nodes:
        for i in node.inputs:
            yield from _before(draft, node.name, i, before)
            yield from _returned(draft, node.name, i)
        before.add(node.name)
    for i in draft.recorded:
        yield from _before(draft, "recorded", i, before)
        yield from _returned(draft, "recorded", i)


def _before(draft: Draft, where: str, i: PlannedInput, before: Collection[str]) -> Iterator[str]:
    known = {n.name for n in draft.nodes}
    for name in (i.gate, *(f.producer for f in i.fetches)):
        if name not in before:
            found = "runs after it" if name in known else "is no node"
            near = nearest(name, before) or "a node upstream"
            expected = f"{where}.{i.name} expects rows of a node upstream"
            yield f"{expected}, {name!r} {found}. Fix: {near}."


def _returned(draft: Draft, where: str, i: PlannedInput) -> Iterator[str]:
    known = {n.name: n.returns for n in draft.nodes}
    for fetch in i.fetches:
        returns = known.get(fetch.producer, fetch.columns)
        missing = [column for column in fetch.columns if column not in returns]
        if missing or not fetch.columns:
            lacks = f"does not return {', '.join(missing)}" if missing else "is asked for no column"
            problem = f"{where}.{i.name}: {fetch.producer!r} {lacks}"
            yield f"{problem}. Fix: the pass project says what returns."


def ratios(draft: Draft) -> Iterator[str]:
    """Input rows are a whole multiple, as stated, of the rows of each gate and producer."""
    for node in draft.nodes:
        for i in node.inputs:
            yield from _multiples(draft, node, i)
        if node.rows % node.inner and node.relation != "source":
            problem = f"{node.name}: {node.rows} rows a prompt of {node.inner}"
            yield f"{problem}. Fix: a whole number of rows for each."


def _multiples(draft: Draft, node: PlannedNode, i: PlannedInput) -> Iterator[str]:
    rows, wide = {n.name: n.rows for n in draft.nodes}, node.inner * max(1, i.fan_in)
    for name, ratio in ((i.gate, i.ratio), *((f.producer, f.ratio) for f in i.fetches)):
        if name in rows and rows[name] * ratio != wide:
            each = f"{ratio} for each of the {rows[name]} of {name!r}"
            problem = f"{node.name}.{i.name}: {wide} rows a prompt, and {each}"
            yield f"{problem}. Fix: rows that {name!r} is an ancestor of."
