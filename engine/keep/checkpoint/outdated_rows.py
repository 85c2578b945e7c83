"""Rows in a checkpoint that were made by what has changed since.

Owns: which sources' finished rows do not go on. Does not own: what counts as a change
(provenance.py), reading a checkpoint (engine/run/loop/checkpoint_files.py).

Rows may wait in a checkpoint where they may lag. Had the one that made them other parameters, they
would be trained in Steps for which the new ones hold. So their prompts begin again, as those do
that were on their way.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.keep.checkpoint.provenance import (
    PHASE,
    ProvenanceDifference,
    ProvenanceRecord,
    differences,
)
from engine.plan.plan import Plan

_INTAKE = "intake"
"""A parameter of train nodes: which waiting rows may be trained."""


def find_outdated_sources(
    plan: Plan, then: ProvenanceRecord | None, now: ProvenanceRecord
) -> tuple[frozenset[str], str]:
    """The sources whose finished rows were made by something else, and the first such thing in
    words. then: of the checkpoint; None: of an older version, which does not say.
    """
    sources: set[str] = set()
    first = ""
    for each in differences(then.made_of, now.made_of) if then is not None else ():
        harmed = set(_sources(plan, each)) - sources
        sources |= harmed
        first = first or (str(each) if harmed else "")
    return frozenset(sources), first


def _sources(plan: Plan, difference: ProvenanceDifference) -> Iterator[str]:
    """The sources whose rows one difference may change."""
    if difference.where.startswith(PHASE):
        return
    kind, _, name = difference.where.partition(" ")
    phase, _, node_name = name.rpartition("/")
    if kind != "node" or not name:
        yield from (source.name for source in plan.sources)
        return
    if phase != (str(plan.phase.number) if plan.phase else ""):
        return
    node = next((n for n in plan.nodes if n.name == node_name), None)
    if node is None or difference.what == _INTAKE:
        yield from (source.name for source in plan.sources)
    elif node.region == "stream":
        yield node.source
