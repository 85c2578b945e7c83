"""What a program asks of a run that goes on in a thread: to stop, to write a checkpoint, or to have
more or fewer replicas.

Owns: keeping these wishes until the run's loop takes them. Does not own: what they mean (the
coordinator), wishes from outside the process (signals.py).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from engine.protocol.messages import CheckpointRequested, ScaleRequested, StopRequested

STOPPED = "stopped by stop()"


class RunRequests:
    """Wishes, from any thread. A wish to stop, or for replicas, holds for all attempts and phases
    that follow.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._checkpoint = threading.Event()
        self._scaled: list[ScaleRequested] = []

    def stop(self) -> None:
        """End the run after the Step under way, with a checkpoint."""
        self._stop.set()

    def checkpoint(self) -> None:
        """Write a checkpoint at the end of the Step under way."""
        self._checkpoint.set()

    def scale(self, replicas: Mapping[str, int]) -> None:
        """Have so many replicas of these nodes."""
        for node, count in replicas.items():
            self._scaled.append(ScaleRequested(node=node, replicas=count))

    def next_scale_request(self, after: int) -> ScaleRequested | None:
        """Return the next wish for replicas after so many; each attempt takes all of them."""
        if after >= len(self._scaled):
            return None
        return self._scaled[after]

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
