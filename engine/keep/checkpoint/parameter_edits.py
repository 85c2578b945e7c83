"""What settings change in a graph between two Steps of a run, and what may not change there.

Owns: naming each parameter that two versions of a graph give another value, and refusing those
that its operator declares as fixed in a run. Does not own: reading settings
(dataflow/set_expressions.py), what else a resume compares and accepts
(engine/session/run_beginning.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dataflow.dialect import with_dialects
from dataflow.errors import CheckpointError
from dataflow.graph import Graph
from dataflow.program import AnyGraph, numbered_name, numbered_phases
from engine.keep.checkpoint.provenance import as_set, in_python, parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A parameter with another value. where, what: as in a ProvenanceDifference. fixed: why it
    cannot change in a run; empty if it can. phase: of a Program, from 1; 0 for a graph alone.
    """

    where: str
    what: str
    old: str
    new: str
    fixed: str = ""
    phase: int = 0


def parameter_edits(before: AnyGraph, after: AnyGraph) -> tuple[Edit, ...]:
    """The parameters that differ between a graph and its edited version, which has its phases."""
    edits: list[Edit] = []
    for (number, old), new in zip(numbered_phases(before), after.phases, strict=True):
        edits += _of_graphs(old.graph, new.graph, number)
    return tuple(edits)


def _of_graphs(before: Graph, after: Graph, phase: int) -> Iterator[Edit]:
    nodes = {node.name: node for node in with_dialects(after).nodes}
    for old in with_dialects(before).nodes:
        new = nodes.get(old.name)
        if new is None:
            continue
        was, now = parameters(old), parameters(new)
        where = f"node {numbered_name(phase, old.name)}"
        for key in dict.fromkeys([*was, *now]):
            before_it, after_it = was.get(key, ""), now.get(key, "")
            if before_it != after_it:
                yield Edit(
                    where=where,
                    what=key,
                    old=before_it,
                    new=after_it,
                    fixed=new.operator.fixed.get(key, ""),
                    phase=phase,
                )


def require_edits_allowed(edited: Sequence[Edit], folder: str, *, ended: int = 0) -> None:
    """Raise CheckpointError, naming the first parameter that cannot change in the run in this
    folder. ended: phases of its Program that are over.
    """
    for edit in edited:
        old, new = (in_python(text) or "nothing" for text in (edit.old, edit.new))
        change = f"from {old} to {new}"
        place = f"{folder}: {edit.where}: {as_set(edit.what)}"
        if edit.fixed:
            problem = f"cannot change {change} in the middle of a run: {edit.fixed}"
            fix = f"leave it out; or start another run, from {folder}/graph.json"
            raise CheckpointError(f"{place} {problem}. Fix: {fix}.")
        if edit.phase and edit.phase <= ended:
            problem = f"phase {edit.phase} has ended, so {change} would change nothing"
            fix = f"name a node of phase {ended + 1} or later"
            raise CheckpointError(f"{place}: {problem}. Fix: {fix}.")
