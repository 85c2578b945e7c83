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
    """Where the first attempt begins. checkpoint: None at the run's start. record: goes into every
    later cut. differences: what changes after the checkpoint. notice: said once, before anything
    runs.
    """

    record: ProvenanceRecord
    checkpoint: StoredCheckpoint | None = None
    differences: tuple[ProvenanceDifference, ...] = ()
    notice: str = ""


class _Accepted(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """changes.json: what was accepted last, and everything that ever was."""

    step: int
    made_of: Provenance
    changes: list[AcceptedChange]


def find_beginning(
    folder: RunFolder, latest: StoredCheckpoint | None, wanted: WantedRun
) -> Beginning:
    """Find where a resume begins. latest: its newest checkpoint. Raises CheckpointError that names
    differences that nobody accepted, and settings that cannot change in a run.
    """
    if latest is None:
        return Beginning(record=ProvenanceRecord(made_of=wanted.made_of))
    cut = read_cut(latest.path, latest.step)
    before = _read_accepted(folder, cut)
    edits_by_place = {(edit.where, edit.what): edit for edit in wanted.edits}
    edits: list[Edit] = []
    edited: list[ProvenanceDifference] = []
    others: list[ProvenanceDifference] = []
    for difference in _find_differences(before, cut, wanted):
        edit = edits_by_place.get((difference.where, difference.what))
        if edit is None:
            others.append(difference)
        else:
            edits.append(edit)
            edited.append(difference)
    require_edits_allowed(edits, str(folder.path), ended=wanted.ended)
    others += _find_gap(folder, cut.step)
    if others and not wanted.accept:
        raise CheckpointError(_refusal(folder, cut.step, others))
    found_differences = (*edited, *others, *wanted.layouts)
    changes = list(before.changes) if before is not None else []
    for difference in found_differences:
        changes.append(_accept(difference, cut.step + 1))
    record = ProvenanceRecord(made_of=wanted.made_of, changes=tuple(changes))
    return Beginning(record=record, checkpoint=latest, differences=found_differences)


def _accept(difference: ProvenanceDifference, step: int) -> AcceptedChange:
    return AcceptedChange(
        step=step,
        where=difference.where,
        what=difference.what,
        old=difference.old,
        new=difference.new,
    )


def keep_changes(folder: RunFolder, begins: Beginning) -> None:
    """Write what changes after the checkpoint, if anything does, and say it."""
    if begins.checkpoint is None:
        _say_that_it_starts_over(folder)
    elif begins.differences:
        write_changes(folder, begins)
        start = f"{folder.path}: from step {begins.checkpoint.step + 1} on"
        _say(f"{start}:\n{_list_lines(begins.differences)}")


def write_changes(folder: RunFolder, begins: Beginning) -> None:
    """Write everything that was ever changed, and what the run is made of from its checkpoint
    on.
    """
    assert begins.checkpoint is not None
    step, record = begins.checkpoint.step, begins.record
    accepted = _Accepted(step=step, made_of=record.made_of, changes=list(record.changes))
    text = msgspec.json.format(msgspec.json.encode(accepted))
    folder.write_text(CHANGES, text.decode())


def _read_accepted(folder: RunFolder, cut: Cut) -> ProvenanceRecord | None:
    """Read what the run was last made of: as accepted since the cut, else the cut's own, if any."""
    path = folder.path / CHANGES
    if path.is_file():
        try:
            accepted = msgspec.json.decode(path.read_bytes(), type=_Accepted)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            fix = "restore it, or delete it"
            raise RunError(f"{path}: cannot be read: {error}. Fix: {fix}.") from error
        # An older one is of a resume whose changes the cut has recorded since.
        if accepted.step >= cut.step:
            changes = tuple(accepted.changes)
            return ProvenanceRecord(made_of=accepted.made_of, changes=changes)
    return cut.record


def _find_differences(
    before: ProvenanceRecord | None, cut: Cut, wanted: WantedRun
) -> list[ProvenanceDifference]:
    """Find what the run is made of otherwise than it was."""
    if before is not None:
        return differences(before.made_of, wanted.made_of)
    if cut.graph == wanted.graph:  # an older version kept nothing but a digest of the graph
        return []
    old = "that of an older version's checkpoint, which kept no parameters"
    return [ProvenanceDifference(where="graph", what="nodes", old=old, new="others")]


def _find_gap(folder: RunFolder, until: int) -> list[ProvenanceDifference]:
    """Find the Steps up to the cut that the metrics lack, as one difference; none if they lack
    none.
    """
    missing_steps = sorted(set(range(1, until + 1)) - set(recorded_steps(folder.metrics)))
    if not missing_steps:
        return []
    gap = ProvenanceDifference(
        where=folder.metrics.name,
        what="steps",
        old=f"steps 1 to {until}",
        new=f"all but {_spans(missing_steps)}",
    )
    return [gap]


def _spans(steps: Sequence[int]) -> str:
    """`3, 5-7`; of more than five spans the first."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    texts = [str(start) if start == end else f"{start}-{end}" for start, end in spans]
    if len(texts) > 5:
        texts[5:] = ["..."]
    return ", ".join(texts)


def _refusal(folder: RunFolder, step: int, others: Sequence[ProvenanceDifference]) -> str:
    what = "one thing is" if len(others) == 1 else f"{len(others)} things are"
    problem = f"expected what the run had up to step {step}, found that {what} another"
    fix = f"undo that; or --accept-changes, which records that it holds from step {step + 1} on"
    return f"{folder.path}: {problem}:\n{_list_lines(others)}\nFix: {fix}."


def _list_lines(differences: Sequence[ProvenanceDifference]) -> str:
    return "\n".join(f"  {difference}" for difference in differences)


def _say_that_it_starts_over(folder: RunFolder) -> None:
    reached = max(recorded_steps(folder.metrics), default=0)
    problem = "no checkpoint was written before the run ended"
    if reached:
        problem += f"; its metrics reached step {reached}, of which nothing is left"
    _say(f"{folder.path}: {problem}. It starts over, with the same seed.")


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
