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
    LimitLowered,
    Tombstoned,
    Warn,
    WorkerLost,
)

_log = logging.getLogger(__name__)


class RunLog:
    """Shows and logs what is said in a run, in all of its attempts."""

    takes = (
        Warn,
        LimitLowered,
        WorkerLost,
        LeaveRequested,
        Tombstoned,
        WritingFailed,
        FailingSilently,
    )

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._shown: set[tuple[str, str, Origin | None]] = set()
        self._dropping: set[str] = set()

    def take(self, event: RunEvent) -> None:
        """See `engine.protocol.events`."""
        match event:
            case InstructionTold(instruction=Warn(warning=warning)):
                self.warn(warning)
            case InstructionTold(instruction=LimitLowered() as lowered):
                _log.warning("%s", describe_lowered(lowered))
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


def describe_lowered(lowered: LimitLowered) -> str:
    """What a node takes at once from now on, and why."""
    limits, before = lowered.limits, lowered.before
    if limits.slots < before.slots:
        less = f"decodes at most {limits.slots} rows at once, not {before.slots}"
    elif limits.tokens < before.tokens:
        less = f"computes at most {limits.tokens} tokens at once, not {before.tokens}"
    else:
        less = "computes layers again in its backward pass"
    return f"{lowered.node}: from now on {less}, as {lowered.worker} was short: {lowered.error}"
