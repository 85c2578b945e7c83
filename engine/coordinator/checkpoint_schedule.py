"""When a checkpoint is due: every so many Steps, so many seconds after the last, when someone asks
for one, at the end.

Owns: which Step's end gets a checkpoint, and of which kind. Does not own: what is in one
(sources.py), when it can be told (course.py), which of them are kept
(engine/keep/checkpoint/store.py).

A timed one waits for the end of a Step as any other does, so that it never decides what a Step is
made of.
"""

from __future__ import annotations

from engine.coordinator.run_settings import Settings


class CheckpointDue:
    """step: of the last checkpoint. asked: someone wants one at the end of the Step under way.
    wanted: one is to be told, for the first time or again. timed: it is due by the clock alone. at:
    when the last one was written, or the run began; None before the first event.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._now = 0.0
        self.step = 0
        self.at = settings.stored_at
        self.asked = self.wanted = False
        self.timed = False

    def passes(self, now: float) -> None:
        """Note the time."""
        self._now = now
        self.at = now if self.at is None else self.at

    def note_stored(self, step: int) -> None:
        """The checkpoint of a Step is on disk."""
        self.step, self.at = step, self._now

    def due(self, step: int) -> bool:
        """Whether the end of a Step gets one; it is then wanted."""
        settings, seconds = self._settings, self._settings.checkpoint_seconds
        every = (settings.checkpoint_every, settings.keep_every)
        regular = self.asked or any(steps and not step % steps for steps in every)
        # The clock decides only whether one is written here, never what a Step is made of.
        late = seconds > 0 and self.at is not None and self._now - self.at >= seconds
        if self.step == step or not (regular or late):
            return False
        self.want(timed=not regular)
        return True

    def want(self, *, timed: bool = False) -> None:
        """One is to be told."""
        self.asked, self.wanted, self.timed = False, True, timed
