"""Checkpoints of a simulated run: the same requests to its Workers, and no disk.

Does not own: which Worker is asked for what (engine/run/loop/checkpoint_files.py), the rows that
Workers write (simulated_worker.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.run_settings import Restored
from engine.plan.plan import Plan
from engine.protocol.messages import Checkpoint, Evaluated
from engine.protocol.workers import Workers
from engine.run.loop import checkpoint_files as files

SavedRows = tuple[Keys, np.ndarray]
"""Finished rows of a node: their keys, and the version of each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedCheckpoint:
    """A checkpoint that was written. rows: by their file."""

    message: Checkpoint
    rows: dict[Path, SavedRows]


class MemoryStore:
    """See `engine.run.loop.checkpoint_files.RunStore`. Keeps every checkpoint; the run resumes from
    `latest`.
    """

    def __init__(self, plan: Plan, latest: SimulatedCheckpoint | None = None) -> None:
        self._plan = plan
        self._latest = latest
        self.stored: list[SimulatedCheckpoint] = []

    def restore(self, workers: Workers) -> Restored | None:
        """As from a disk, except that nothing is deleted."""
        if self._latest is None:
            return None
        message, plan = self._latest.message, self._plan
        files.restore_state(plan, workers, _directory(message), message.step)
        rows = files.restore_rows(plan, workers, self._latest.rows)
        step, sources, evaluated = message.step, message.sources, message.evaluated
        return Restored(step=step, sources=sources, rows=rows, evaluated=evaluated)

    def write(self, workers: Workers, message: Checkpoint) -> bool:
        """The recorder answers with the rows that it has written."""
        answers = files.write_state(self._plan, workers, _directory(message), message)
        self.stored.append(SimulatedCheckpoint(message=message, rows=answers[self._plan.recorder]))
        return True

    def keep_best(self, workers: Workers, event: Evaluated) -> bool:
        """As if each were the best so far."""
        writer = files.evaluated_writer(self._plan, event)
        if writer:
            files.save_weights(self._plan, workers, Path("best"), writer)
        return bool(writer)

    def prune(self) -> None:
        """Nothing is deleted."""


def _directory(message: Checkpoint) -> Path:
    return Path(f"step_{message.step}")
