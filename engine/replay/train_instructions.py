"""What a Worker is told of a Step that it trains again: whole, or part by part as the run did.

Owns: these instructions. Does not own: where their rows lie and who carries them out
(task_replay.py).
"""

from __future__ import annotations

from dataflow.loss_terms import ROWS
from engine.keep.record.stored_assignments import RecordedTask
from engine.protocol import messages as m


def train_step(task: RecordedTask, inputs: m.Inputs, worker: str) -> m.TrainStep:
    """Train a whole Step of these rows."""
    main_rows, other_sets = _rows_by_set(task)
    return m.TrainStep(
        id=task.id,
        node=task.node,
        worker=worker,
        step=task.step,
        keys=main_rows.keys,
        mine=main_rows.mine,
        total=main_rows.total,
        inputs=inputs,
        others=other_sets,
        limits=task.limits,
    )


def train_part(task: RecordedTask, part: int, inputs: m.Inputs, worker: str) -> m.TrainPart:
    """Add up the gradients of this part of a Step."""
    main_rows, other_sets = _rows_by_set(task)
    return m.TrainPart(
        id=task.id,
        node=task.node,
        worker=worker,
        step=task.step,
        part=part,
        keys=main_rows.keys,
        mine=main_rows.mine,
        total=main_rows.total,
        inputs=inputs,
        others=other_sets,
        limits=task.limits,
    )


def finish_step(task: RecordedTask, worker: str) -> m.FinishStep:
    """Make the update of a Step of which all parts are summed."""
    return m.FinishStep(
        id=task.id, node=task.node, worker=worker, step=task.step, parts=len(task.parts)
    )


def _rows_by_set(task: RecordedTask) -> tuple[m.OwnRows, dict[str, m.OwnRows]]:
    """A task's own rows, and those of its other row sets."""
    rank_rows: dict[str, m.OwnRows] = {}
    for name, rows in task.rows.items():
        rank_rows[name] = m.OwnRows(keys=rows.keys, mine=rows.mine, total=rows.total)
    main_rows = rank_rows.pop(ROWS)
    return main_rows, rank_rows
