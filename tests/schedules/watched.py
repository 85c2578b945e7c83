"""Spans of a simulated run's Workers, which are not measured: made of what is told and heard.

A Worker does one thing after another: what it says was done since it was told, or since it said
something last.
"""

from __future__ import annotations

from typing import Any, get_args

from engine.keep.trace.arrows import Arrows, JoinedSpan
from engine.protocol import messages as m
from engine.protocol.events import EventHeard, InstructionTold, RunEvent, WorkersMeasured
from engine.protocol.reports import SpanOf


class WatchedSpans:
    """A subscriber that joins spans as a trace does. joined: all so far. kept: the most that was
    kept at one time after a measurement.
    """

    takes = (WorkersMeasured, *get_args(m.Instruction), *get_args(m.Event))

    def __init__(self) -> None:
        self.arrows = Arrows()
        self.joined: list[JoinedSpan] = []
        self.tasks: dict[tuple[int, str], m.Task] = {}
        self.made: dict[tuple[str, int], m.Produced] = {}
        self._spans: list[SpanOf] = []
        self._since: dict[str, float] = {}
        self._told_at: dict[tuple[int, str], float] = {}

    def take(self, event: RunEvent) -> None:
        match event:
            case InstructionTold(instruction=m.Retire(workers=workers)):
                for worker in workers:
                    self.arrows.lose(worker, event.at)
                    self._since[worker] = event.at
            case InstructionTold(instruction=told):
                self.arrows.note_instruction(told)
                if isinstance(told, m.Task):
                    self.tasks[told.id, told.worker] = told
                    self._told_at[told.id, told.worker] = event.at
            case EventHeard(event=heard):
                self._hear(heard, event.at)
                self.arrows.note_event(heard, event.at)
            case WorkersMeasured():
                self.joined += self.arrows.join_spans(self._spans)
                self._spans = []

    def _hear(self, event: m.Event, at: float) -> None:
        match event:
            case m.WorkerLost():
                self._since[event.worker] = at
            case m.Produced(ref=ref):
                self.made[ref.worker, ref.block] = event
                rows = {"rows": len(ref.keys), "tokens": int(ref.lengths.sum())}
                self._span(event.id, ref.worker, at, block=ref.block, **rows)
            case m.ChunkDone() | m.Evaluated() | m.Recorded():
                for worker in [w for number, w in self.tasks if number == event.id]:
                    self._span(event.id, worker, at)
            case m.Stepped() | m.Offered() | m.Loaded():
                self._span(event.id, event.worker, at)

    def _span(self, number: int, worker: str, at: float, **made: Any) -> None:
        task = self.tasks[number, worker]
        start = max(self._told_at[number, worker], self._since.get(worker, 0.0))
        self._since[worker] = at
        track = f"{worker}/{_node(task)}"
        self._spans.append(
            SpanOf(track=track, name=_node(task), start=start, end=at, task=number, **made)
        )


def _node(task: m.Task) -> str:
    match task:
        case m.Record():
            return "record"
        case m.Offer():
            return task.writer
        case m.Load():
            return task.reader
        case _:
            return task.node
