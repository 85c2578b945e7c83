"""A simulated run as a timeline that Perfetto opens: a track a Worker, a span for what each did.

Owns: which spans and names there are. Does not own: the file's form
(engine/keep/trace/timeline.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from engine.keep.trace.timeline import Trace
from engine.run.simulated_workers.spans import SimulatedSpan
from engine.simulation.prediction import Prediction, SimulatedStep

_STEPS = "steps"
"""The track of the Steps, first of all."""


def write_timeline(path: Path, prediction: Prediction) -> None:
    """Write the Steps, then who did what. Raises StorageError where the file cannot be made."""
    trace = Trace(path, process="simulated")
    try:
        _write_steps(trace, prediction.steps)
        for span in sorted(prediction.spans, key=lambda span: span.start):
            _write_span(trace, span, prediction.plan.host_of(span.worker))
    finally:
        trace.close()


def _write_steps(trace: Trace, steps: Iterable[SimulatedStep]) -> None:
    """Each from the end of the one before it: with a lag it began earlier."""
    start = 0.0
    for step in steps:
        name = f"Step {step.step}"
        trace.span(_STEPS, name, start, step.end, rows=step.rows, tokens=step.tokens)
        start = step.end


def _write_span(trace: Trace, span: SimulatedSpan, host: str) -> None:
    """A span, and within it what it fetched."""
    track = f"{host or 'Workers'}/{span.worker}"
    if span.what in ("chunk", "train"):
        name = span.node
    else:
        name = f"{span.what} {span.node}".strip()
    trace.span(track, name, span.start, span.end, **_known_arguments(span))
    if span.fetch > 0:
        trace.span(track, "fetch", span.start, min(span.end, span.start + span.fetch))


def _known_arguments(span: SimulatedSpan) -> dict[str, int]:
    """What the viewer shows of a span; a number that is 0 says nothing."""
    arguments = {"step": span.step, "rows": span.rows, "tokens": span.tokens}
    return {name: number for name, number in arguments.items() if number}
