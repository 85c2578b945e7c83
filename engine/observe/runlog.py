"""What a run says on the screen and in its log: warnings, losses, files that were not written.

Owns: showing each warning once, by its name and place; with `strict` the first ends the run. Does
not own: finding them (dataflow/rules/doubtful.py, plan/warnings.py, coordinator/doubtful.py).
"""

from __future__ import annotations

import logging

from dataflow.errors import GraphWarning, Origin, RunError
from engine.coordinator.messages import Checkpoint, Evaluated, Warn, WorkerLost
from engine.observe.events import EventHeard, InstructionTold, RunEvent, WritingFailed

_log = logging.getLogger(__name__)


class RunLog:
    """Shows and logs what is said in a run, in all of its attempts."""

    takes = (Warn, WorkerLost, WritingFailed)

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._shown: set[tuple[str, str, Origin | None]] = set()

    def take(self, event: RunEvent) -> None:
        """See `engine.observe.events`."""
        match event:
            case InstructionTold(instruction=Warn(warning=warning)):
                self.warn(warning)
            case EventHeard(event=WorkerLost(worker=worker, error=error)):
                _log.warning("Worker %s was lost: %s", worker, error)
            case WritingFailed(of=Checkpoint(step=step), error=error):
                _log.warning("the checkpoint of step %d was not written: %s", step, error)
            case WritingFailed(of=Evaluated(version=version), error=error):
                _log.warning("version %d was not kept among the best: %s", version, error)

    def warn(self, warning: GraphWarning) -> None:
        """Show a warning once. Raises RunError where the run is strict."""
        if self._strict:
            raise RunError(str(warning))
        name = (warning.rule, warning.where, warning.origin)
        if name not in self._shown:
            self._shown.add(name)
            _log.warning("warning: %s", warning)
