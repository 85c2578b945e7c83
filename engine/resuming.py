"""Where a run begins: at its start, or at a checkpoint that it may resume from.

Owns: choosing that checkpoint, refusing a run that is made of something else now or whose metrics
have a gap, the record of accepted changes. Does not own: what counts as a change
(engine/checkpoint/provenance.py), reading the checkpoint (engine/run/files.py).

    changes.json    {"step": of the cut, "made_of": since then,
                     "changes": [{step, where, what, old, new}, ...]}
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dataflow.errors import CheckpointError, RunError
from engine.checkpoint.cut import Cut, read_cut
from engine.checkpoint.provenance import (
    AcceptedChange,
    Provenance,
    ProvenanceDifference,
    ProvenanceRecord,
    differences,
)
from engine.checkpoint.store import CheckpointStore, StoredCheckpoint
from engine.observe.runfolder import RunFolder
from engine.observe.sinks import recorded_steps

CHANGES = "changes.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where the first attempt begins (None: at the start). record: goes into every later cut."""

    record: ProvenanceRecord
    checkpoint: StoredCheckpoint | None = None


class _Accepted(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """changes.json: what was accepted last, and everything that ever was."""

    step: int
    made_of: Provenance
    changes: list[AcceptedChange]


def beginning(
    folder: RunFolder,
    store: CheckpointStore,
    made_of: Provenance,
    graph: str,
    *,
    accept: bool = False,
) -> Beginning:
    """Where a resume begins. made_of, graph (a digest): of the run as it would go on. accept:
    record differences. Else CheckpointError names them; it also tells of damaged checkpoints.
    """
    latest = store.latest()
    if latest is None:
        _say_that_it_starts_over(folder)
        return Beginning(record=ProvenanceRecord(made_of=made_of))
    cut = read_cut(latest.path, latest.step)
    known = _accepted(folder, cut)
    found = _differences(known, cut, made_of, graph) + _gap(folder, cut.step)
    before = known.changes if known else ()
    if not found:
        record = ProvenanceRecord(made_of=made_of, changes=before)
        return Beginning(record=record, checkpoint=latest)
    if not accept:
        raise CheckpointError(_refusal(folder, cut.step, found))
    now = [
        AcceptedChange(step=cut.step + 1, where=d.where, what=d.what, old=d.old, new=d.new)
        for d in found
    ]
    record = ProvenanceRecord(made_of=made_of, changes=(*before, *now))
    kept = _Accepted(step=cut.step, made_of=made_of, changes=list(record.changes))
    folder.write_text(CHANGES, msgspec.json.format(msgspec.json.encode(kept)).decode())
    _say(f"{folder.path}: from step {cut.step + 1} on:\n{_listed(found)}")
    return Beginning(record=record, checkpoint=latest)


def _accepted(folder: RunFolder, cut: Cut) -> ProvenanceRecord | None:
    """What the run was last made of: as accepted since the cut, else the cut's own, if any."""
    path = folder.path / CHANGES
    if path.is_file():
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_Accepted)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            fix = "restore it, or delete it"
            raise RunError(f"{path}: cannot be read: {error}. Fix: {fix}.") from error
        if found.step >= cut.step:
            return ProvenanceRecord(made_of=found.made_of, changes=tuple(found.changes))
    return cut.record


def _differences(
    known: ProvenanceRecord | None, cut: Cut, made_of: Provenance, graph: str
) -> list[ProvenanceDifference]:
    if known is not None:
        return differences(known.made_of, made_of)
    if cut.graph == graph:  # a digest is all that there is
        return []
    return [ProvenanceDifference(where="graph", what="its digest", old=cut.graph, new=graph)]


def _gap(folder: RunFolder, until: int) -> list[ProvenanceDifference]:
    """Steps up to the cut that the metrics lack."""
    missing = sorted(set(range(1, until + 1)) - set(recorded_steps(folder.metrics)))
    if not missing:
        return []
    where, wanted, there = folder.metrics.name, f"steps 1 to {until}", f"all but {_spans(missing)}"
    return [ProvenanceDifference(where=where, what="steps", old=wanted, new=there)]


def _spans(steps: Sequence[int]) -> str:
    """`3, 5-7`."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in found]
    return ", ".join(shown[:5] + (["..."] if len(shown) > 5 else []))


def _refusal(folder: RunFolder, step: int, found: Sequence[ProvenanceDifference]) -> str:
    what = "one thing is" if len(found) == 1 else f"{len(found)} things are"
    problem = f"expected what the run had up to step {step}, found that {what} another"
    fix = f"undo that; or --accept-changes, which records that it holds from step {step + 1} on"
    return f"{folder.path}: {problem}:\n{_listed(found)}\nFix: {fix}."


def _listed(found: Sequence[ProvenanceDifference]) -> str:
    return "\n".join(f"  {each}" for each in found)


def _say_that_it_starts_over(folder: RunFolder) -> None:
    reached = max(recorded_steps(folder.metrics), default=0)
    lost = f"; its metrics reached step {reached}, of which nothing is left" if reached else ""
    problem = f"no checkpoint was written before the run ended{lost}"
    _say(f"{folder.path}: {problem}. It starts over, with the same seed.")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
