"""Views of the metrics that may fail: nothing depends on one, so a run goes on without it.

Owns: that a view which cannot be written is said once, and left out from then on. Does not own: any
view (sinks.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from dataflow.errors import StorageError
from dataflow.storage import storage_error
from engine.observe.runfolder import RunFolder
from engine.observe.sinks import Sink

_log = logging.getLogger(__name__)


class View:
    """A sink beside metrics.jsonl, which has all that it shows."""

    def __init__(self, name: str, sink: Sink) -> None:
        self._name, self._sink = name, sink
        self._run: RunFolder | None = None
        self._over = False

    def open(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        """Raises RunError where its library is not installed."""
        self._run = run
        self._tried(lambda: self._sink.open(run, config))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing, where it has failed."""
        self._tried(lambda: self._sink.write(step, metrics))

    def close(self) -> None:
        """Nothing, where it has failed."""
        self._tried(self._sink.close)

    def _tried(self, action: Callable[[], None]) -> None:
        if self._over:
            return
        try:
            action()
        except StorageError as error:
            self._give_up(error)
        except OSError as error:
            assert self._run is not None
            self._give_up(
                storage_error(f"the view {self._name}", self._run.path / self._name, error)
            )

    def _give_up(self, why: StorageError) -> None:
        self._over = True
        _log.warning("%s The run goes on without it; metrics.jsonl has all of it.", why)
