"""What an attempt at a run records of what is told: from its beginning, after the cut.

Owns: where recording begins. Does not own: the files (assignments.py, recorder.py), the cut itself
(stored_rows.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from engine.keep.record.assignments import Assignments
from engine.keep.record.place import begin_life
from engine.keep.record.stored_rows import cut_after
from engine.keep.run_folder import RunFolder
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.protocol.events import RunEvent
from engine.protocol.refs import Ref


class NothingRecorded:
    """The recording of a run that records nothing."""

    takes: tuple[type, ...] = ()

    def take(self, event: RunEvent) -> None:
        """Never called."""

    def know(self, rows: Mapping[str, Mapping[str, Ref]]) -> None:
        """Nothing is gathered for a file."""


def record_run(
    plan: Plan, folder: RunFolder, options: RunOptions, begun: int, stack: ExitStack
) -> Assignments | NothingRecorded:
    """Make a subscriber to an attempt that begins after Step `begun`, in a new life of the run;
    later Steps are cut. stack: of the attempt, with which it ends.
    """
    where = folder.recorded
    if where.is_dir():
        cut_after(where, plan, begun or -1)  # Step 0 is what comes before the first
    if not options.record:
        return NothingRecorded()
    assignments = Assignments(plan, where, begin_life(where))
    stack.callback(assignments.close)
    return assignments
