"""A simulated run as a timeline that Perfetto opens: a track a Worker, a span for what each did.

Owns: which spans and names there are. Does not own: the file's form
(engine/keep/trace/timeline.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from engine.keep.trace.timeline import Trace
from engine.predict.simulation.prediction import Prediction, SimulatedStep
from engine.run.simulated_workers.spans import SimulatedSpan

_STEPS = "steps"
"""The track of the Steps, first of all."""


def write_timeline(path: Path, found: Prediction) -> None:
    """Raises StorageError where the file cannot be made."""
    trace = Trace(path, process="simulated")
    try:
        for step, start in _steps(found.steps):
            about = {"rows": step.rows, "tokens": step.tokens}
            trace.span(_STEPS, f"Step {step.step}", start, step.end, **about)
        for span in sorted(found.spans, key=lambda each: each.start):
            _show(trace, span, found.plan.host_of(span.worker))
    finally:
        trace.close()


def _steps(steps: Iterable[SimulatedStep]) -> Iterator[tuple[SimulatedStep, float]]:
    """Each with the end of the one before it."""
    before = 0.0
    for step in steps:
        yield step, before
        before = step.end


def _show(trace: Trace, span: SimulatedSpan, host: str) -> None:
    """A span, and within it what it fetched."""
    track = f"{host or 'Workers'}/{span.worker}"
    name = span.node if span.what in ("chunk", "train") else f"{span.what} {span.node}".strip()
    told = {"step": span.step, "rows": span.rows, "tokens": span.tokens}
    about = {key: value for key, value in told.items() if value}
    trace.span(track, name, span.start, span.end, **about)
    if span.fetch > 0:
        trace.span(track, "fetch", span.start, min(span.end, span.start + span.fetch))
