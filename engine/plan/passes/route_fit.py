"""Whether the copies of weights that processes share fit on their GPU; else versions are pulled.

Owns: going back to pull where `weights` is auto. Does not own: the first choice of a route
(modules.py), what fits (checks/memory.py).
"""

from __future__ import annotations

from dataclasses import replace

from dataflow.safe_text import shown_bytes
from engine.plan.checks.memory import MemoryRoom, find_memory_rooms
from engine.plan.draft import Draft
from engine.plan.passes.correct import correct_peaks
from engine.plan.passes.estimate import estimate_costs
from engine.plan.passes.processes import estimate_processes
from engine.plan.plan import PlannedModel


def fit_routes(draft: Draft) -> Draft:
    """Pull the weights of Models whose copies for IPC are on a GPU that is too small."""
    if draft.placing.weights != "auto":
        return draft
    room_by_model: dict[str, MemoryRoom] = {}
    for room in find_memory_rooms(draft, draft.cluster):
        if room.is_full:
            names = (m.name for m in draft.models if _has_copies_in(m, room, draft))
            room_by_model |= dict.fromkeys(names, room)
    if not room_by_model:
        return draft
    models: list[PlannedModel] = []
    for model in draft.models:
        if (model.follows or model.name) in room_by_model:
            model = replace(model, route="pull")
        models.append(model)
    changed_draft = replace(draft, models=tuple(models))
    for run in (estimate_costs, correct_peaks, estimate_processes):
        changed_draft = run(changed_draft)
    notes: list[str] = []
    for name, room in room_by_model.items():
        why = f"{shown_bytes(room.need)} do not fit in the {shown_bytes(room.bytes)}"
        notes.append(f"{name}: weights are pulled, since with copies {why} of {room.where}")
    return replace(changed_draft, notes=(*draft.notes, *notes))


def _has_copies_in(model: PlannedModel, room: MemoryRoom, draft: Draft) -> bool:
    if not model.writer or model.route != "ipc":
        return False
    return draft.node(model.writer).workers[0] in room.workers
