"""Requests to end a run before its last Step, to write a checkpoint, or to have other replicas.

Owns: turning a signal, a user's condition or wish, or a phase's threshold into one request. Does
not own: signals (signals.py), wishes of a program (run_requests.py), what ending means (the
coordinator).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dataflow.graph import Threshold
from engine.protocol.events import EventHeard, RunEvent, StepEnded
from engine.protocol.messages import StopRequested, Wish
from engine.run.loop.run_requests import RunRequests
from engine.run.loop.signals import StopSignals

Until = Callable[[Mapping[str, float]], bool]
"""Given a Step's metrics: whether the run ends there."""


class EarlyEnd:
    """The `stop` of a Loop. heard: the last request that the coordinator heard, from anywhere.
    threshold: of a phase, which ends there.
    """

    takes = (StopRequested, StepEnded)

    def __init__(
        self,
        signals: StopSignals,
        until: Until | None = None,
        threshold: Threshold | None = None,
        *,
        requests: RunRequests,
    ) -> None:
        self._threshold = threshold
        self.heard: StopRequested | None = None
        self._signals = signals
        self._until = until
        self._requests = requests
        self._said = False
        self._waiting: StopRequested | None = None
        self._scaled = 0
        """Wishes for replicas that the coordinator was told."""

    def pass_at_once(self) -> None:
        """The checkpoint from which the run goes on is where its threshold was reached."""
        assert self._threshold is not None
        self._waiting = StopRequested(reason=describe_threshold(self._threshold), at_once=True)

    def take(self, event: RunEvent) -> None:
        """See `engine.protocol.events`."""
        match event:
            case EventHeard(event=StopRequested() as heard):
                self.heard = heard
            case StepEnded(step=step, metrics=metrics, again=False) if step > 0:
                if self._threshold is not None and self._threshold.reached(metrics):
                    self.pass_at_once()
                if self._until is not None and self._until({"step": step, **metrics}):
                    reason = f"its condition held after step {step}"
                    self._waiting = StopRequested(reason=reason, at_once=True)

    def __call__(self) -> Wish | None:
        """The next request that the coordinator has not been told."""
        if self._waiting is not None:
            asked, self._waiting = self._waiting, None
            return asked
        if self._signals.is_stop_requested and not self._said:
            self._said = True
            return StopRequested(reason=self._signals.reason, signal=self._signals.number)
        stopping = self._requests.stopping
        if stopping is not None and not self._said:
            self._said = True
            return stopping
        if (scaled := self._requests.next_scale_request(self._scaled)) is not None:
            self._scaled += 1
            return scaled
        return self._requests.take_checkpoint()


def describe_threshold(threshold: Threshold) -> str:
    """Say in words why a phase ends at its threshold."""
    return f"reached {threshold}"
