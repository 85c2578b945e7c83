"""What a program asks of a run that goes on in a thread: to stop, or to write a checkpoint.

Owns: keeping these wishes until the run's loop takes them. Does not own: what they mean (the
coordinator), wishes from outside the process (signals.py).
"""

from __future__ import annotations

import threading

from engine.coordinator.messages import CheckpointRequested, StopRequested

STOPPED = "stopped by stop()"


class RunRequests:
    """Wishes, from any thread. A wish to stop holds for all attempts and phases that follow."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._checkpoint = threading.Event()

    def stop(self) -> None:
        """End the run after the Step under way, with a checkpoint."""
        self._stop.set()

    def checkpoint(self) -> None:
        """Write a checkpoint at the end of the Step under way."""
        self._checkpoint.set()

    @property
    def stopping(self) -> StopRequested | None:
        """The wish to stop, if there is one."""
        return StopRequested(reason=STOPPED) if self._stop.is_set() else None

    def take_checkpoint(self) -> CheckpointRequested | None:
        """A wish for a checkpoint, once."""
        if not self._checkpoint.is_set():
            return None
        self._checkpoint.clear()
        return CheckpointRequested()
