"""What a run says on the screen and in its log: warnings, losses, files that were not written.

Owns: showing each warning once, by its name and place; with `strict` the first ends the run. Does
not own: finding them (dataflow/rules/suspect_graphs.py, plan/warnings.py,
engine/coordinator/run_warnings.py, silent_failures.py, whose warnings come again and end no run).
"""

from __future__ import annotations

import logging

from dataflow.errors import GraphWarning, Origin, RunError
from engine.protocol.events import (
    EventHeard,
    FailingSilently,
    InstructionTold,
    RunEvent,
    WritingFailed,
)
from engine.protocol.messages import (
    Checkpoint,
    Evaluated,
    LeaveRequested,
    Tombstoned,
    Warn,
    WorkerLost,
)

_log = logging.getLogger(__name__)


class RunLog:
    """Shows and logs what is said in a run, in all of its attempts."""

    takes = (Warn, WorkerLost, LeaveRequested, Tombstoned, WritingFailed, FailingSilently)

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._shown: set[tuple[str, str, Origin | None]] = set()
        self._dropping: set[str] = set()

    def take(self, event: RunEvent) -> None:
        """See `engine.protocol.events`."""
        match event:
            case InstructionTold(instruction=Warn(warning=warning)):
                self.warn(warning)
            case EventHeard(event=WorkerLost(worker=worker, error=error)):
                _log.warning("Worker %s was lost: %s", worker, error)
            case EventHeard(event=LeaveRequested(workers=workers, reason=reason)):
                _log.warning("%s will have to leave: %s", ", ".join(workers), reason)
            case EventHeard(event=Tombstoned(node=node, failed=True) as dropped):
                self._say_dropped(node, dropped)
            case WritingFailed(of=Checkpoint(step=step), error=error):
                _log.warning("the checkpoint of step %d was not written: %s", step, error)
            case FailingSilently(rule=rule, text=text):
                _log.warning("warning: %s [%s]", text, rule)
            case WritingFailed(of=Evaluated(version=version), error=error):
                _log.warning("version %d was not kept among the best: %s", version, error)

    def _say_dropped(self, node: str, row: Tombstoned) -> None:
        """Say of a node's first row that failed; later ones only count, in data/dropped or
        data/lost_rows.
        """
        if node not in self._dropping:
            self._dropping.add(node)
            what = "its group goes on without it" if row.row_only else "its prompt is dropped"
            message = "%s: row %s failed, and %s; the first such: %s"
            _log.warning(message, node, row.key, what, row.error)

    def warn(self, warning: GraphWarning) -> None:
        """Show a warning once. Raises RunError where the run is strict."""
        if self._strict:
            raise RunError(str(warning))
        name = (warning.rule, warning.where, warning.origin)
        if name not in self._shown:
            self._shown.add(name)
            _log.warning("warning: %s", warning)
