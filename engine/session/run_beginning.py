"""Where a run begins: at its start, or at a checkpoint that it may resume from.

Owns: choosing that checkpoint, refusing a run that is made of something else now or whose metrics
have a gap, the record of changes. Does not own: what counts as a change
(engine/keep/checkpoint/provenance.py), what settings may change
(engine/keep/checkpoint/parameter_edits.py), reading the checkpoint
(engine/run/loop/checkpoint_files.py).

    changes.json    {"step": of the cut, "made_of": since then,
                     "changes": [{step, where, what, old, new}, ...]}
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dataflow.errors import CheckpointError, RunError
from dataflow.safe_text import printable
from engine.keep.checkpoint.cut import Cut, read_cut
from engine.keep.checkpoint.parameter_edits import Edit, require_edits_allowed
from engine.keep.checkpoint.provenance import (
    AcceptedChange,
    Provenance,
    ProvenanceDifference,
    ProvenanceRecord,
    differences,
)
from engine.keep.checkpoint.store import StoredCheckpoint
from engine.keep.metrics.metric_lines import recorded_steps
from engine.keep.run_folder import RunFolder

CHANGES = "changes.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedRun:
    """The run as it would go on. accept: record any difference. edits: what settings change, which
    is accepted by itself. layouts: what its plan does differently, which is only recorded.
    ended: phases of its Program that are over.
    """

    made_of: Provenance
    graph: str
    accept: bool = False
    edits: Sequence[Edit] = ()
    layouts: Sequence[ProvenanceDifference] = ()
    ended: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where the first attempt begins (None: at the start). record: goes into every later cut.
    found: what it changes after the checkpoint. notice: said once, before anything runs.
    """

    record: ProvenanceRecord
    checkpoint: StoredCheckpoint | None = None
    found: tuple[ProvenanceDifference, ...] = ()
    notice: str = ""


class _Accepted(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """changes.json: what was accepted last, and everything that ever was."""

    step: int
    made_of: Provenance
    changes: list[AcceptedChange]


def beginning(folder: RunFolder, latest: StoredCheckpoint | None, wanted: WantedRun) -> Beginning:
    """Where a resume begins. latest: its newest checkpoint. Raises CheckpointError that names
    differences that nobody accepted, and settings that cannot change in a run.
    """
    if latest is None:
        return Beginning(record=ProvenanceRecord(made_of=wanted.made_of))
    cut = read_cut(latest.path, latest.step)
    known = _accepted(folder, cut)
    found = _differences(known, cut, wanted)
    asked = {(edit.where, edit.what): edit for edit in wanted.edits}
    real = [asked[d.where, d.what] for d in found if (d.where, d.what) in asked]
    require_edits_allowed(real, str(folder.path), ended=wanted.ended)
    others = [d for d in found if (d.where, d.what) not in asked]
    others += _gap(folder, cut.step)
    if others and not wanted.accept:
        raise CheckpointError(_refusal(folder, cut.step, others))
    found = [d for d in found if (d.where, d.what) in asked] + others + list(wanted.layouts)
    changes = known.changes if known else ()
    changes += tuple(
        AcceptedChange(step=cut.step + 1, where=d.where, what=d.what, old=d.old, new=d.new)
        for d in found
    )
    record = ProvenanceRecord(made_of=wanted.made_of, changes=changes)
    return Beginning(record=record, checkpoint=latest, found=tuple(found))


def keep_changes(folder: RunFolder, begins: Beginning) -> None:
    """Write what changes after the checkpoint, if anything does, and say it."""
    if begins.checkpoint is None:
        _say_that_it_starts_over(folder)
    elif begins.found:
        step, record = begins.checkpoint.step, begins.record
        kept = _Accepted(step=step, made_of=record.made_of, changes=list(record.changes))
        folder.write_text(CHANGES, msgspec.json.format(msgspec.json.encode(kept)).decode())
        _say(f"{folder.path}: from step {step + 1} on:\n{_listed(begins.found)}")


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
    known: ProvenanceRecord | None, cut: Cut, wanted: WantedRun
) -> list[ProvenanceDifference]:
    if known is not None:
        return differences(known.made_of, wanted.made_of)
    if cut.graph == wanted.graph:  # an older version kept nothing but a digest of the graph
        return []
    told = "that of an older version's checkpoint, which kept no parameters"
    return [ProvenanceDifference(where="graph", what="nodes", old=told, new="others")]


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
    print(printable(text), file=sys.stderr, flush=True)
