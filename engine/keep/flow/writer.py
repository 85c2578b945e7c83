"""Where the records of a run go: its `events/` folder.

Owns: that a disk which fails ends the records, not the run. Does not own: the files' form
(segments.py).
"""

from __future__ import annotations

import logging
from pathlib import Path

from dataflow.errors import RunError, StorageError
from engine.keep.flow.records import Flow, Record
from engine.keep.flow.segments import LiveSegments, StepSegments

_log = logging.getLogger(__name__)


class FlowWriter:
    """Writes into one folder. What cannot be written is told once, and the rest left out."""

    def __init__(self, folder: Path, *, after: int) -> None:
        """Drops the records behind Step `after`, which come again."""
        self._failed = False
        self._live = LiveSegments(folder)
        try:
            self._steps = StepSegments(folder)
            self._steps.truncate_after(after)
        except StorageError as error:
            self._fail(error)

    def step(self, record: Record) -> None:
        """What belongs to a Step."""
        if not self._failed:
            try:
                self._steps.write(record)
            except StorageError as error:
                self._fail(error)

    def second(self, flow: Flow) -> None:
        """What is shown while the run goes on."""
        if not self._failed:
            try:
                self._live.write(flow)
            except StorageError as error:
                self._fail(error)

    def close(self) -> None:
        """Close the files."""
        self._live.close()
        if not self._failed:
            self._steps.close()

    def _fail(self, error: StorageError | RunError) -> None:
        self._failed = True
        _log.warning("%s The run goes on without events.", error)
