"""Which spans of Workers belong together: rows from where they were made to where they were taken,
a version from the train Step that made it to each load, and on to the chunks that used it.

Owns: joining spans with what their Workers were told, the arrows between them, and what is said of
each. Does not own: what a span is (engine/protocol/reports.py), the file that they are written to
(timeline.py).

Samples have no arrows: they take what training took, and would double the file.

Only what is still needed is kept: an instruction until its last answer, the span that made a block
until the block is released. A Worker's spans come before the loop hears of their ends, so both go
with the first `measured` after that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from dataflow.batch import Keys
from engine.protocol import messages as m
from engine.protocol.reports import SpanOf

_VERSIONS = 4
"""Train Steps of a node that are remembered: a load is told soon after its version was made."""


class Arrow(NamedTuple):
    """An arrow from one span to another. kind: `rows` or `version`."""

    kind: str
    source: SpanOf
    target: SpanOf


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedSpan:
    """A span and what is known of it, and the arrows that end in it."""

    span: SpanOf
    args: dict[str, Any]
    arrows: Sequence[Arrow]


@dataclass(slots=True, eq=False)
class _OpenTask:
    """A task of one Worker. pointed: the arrows of its rows have been drawn. versions: by Model the
    last version that it has an arrow from.
    """

    task: m.Task
    args: dict[str, Any]
    pointed: bool = False
    versions: dict[str, int] = field(default_factory=dict)


class Arrows:
    """Draws the arrows of one attempt at a run after another. first: Steps of the run before this
    graph's own.
    """

    def __init__(self, *, first: int = 0) -> None:
        self._first = first
        self._told: dict[int, dict[str, _OpenTask]] = {}
        """By id and Worker: ranks are told the same."""
        self._makers: dict[tuple[str, int], SpanOf] = {}
        """By Worker and block."""
        self._steps: dict[str, dict[int, SpanOf]] = {}
        """By train node and version."""
        self._loads: dict[str, dict[str, tuple[SpanOf, int]]] = {}
        """By track and Model: the last load, and its version."""
        self._over: list[m.TaskEnd] = []
        self._lost: dict[str, float] = {}
        """By Worker, when its last process was lost."""
        self._released: list[m.Release] = []
        self._ended = False

    def note_instruction(self, instruction: m.Instruction) -> None:
        """Note what the coordinator has said; tasks, Release and Rollback count."""
        match instruction:
            case m.Release():
                self._released.append(instruction)
            case m.Rollback():
                self._ended = True
            case _ if isinstance(instruction, m.Task):
                of = self._told.setdefault(instruction.id, {})
                of[instruction.worker] = _OpenTask(instruction, self._args(instruction))

    def note_event(self, event: m.Event, at: float) -> None:
        """Note that a task has ended, or that a Worker is gone with all that it was told, has made
        and has loaded; nothing else counts.
        """
        if isinstance(event, m.WorkerLost):
            self.lose(event.worker, at)
        elif isinstance(event, m.TaskEnd):
            self._over.append(event)

    def join_spans(self, spans: Sequence[SpanOf]) -> list[JoinedSpan]:
        """Join spans with what is known of them; each comes once."""
        for span in spans:  # all of them first: those of hosts do not come in order of time
            if span.block >= 0 and span.end > self._lost.get(span.worker, -math.inf):
                self._makers[span.worker, span.block] = span
            self._note_step(span)
        joined = [self._join_span(span) for span in spans]
        self._forget()
        return joined

    def __len__(self) -> int:
        """How many things are kept."""
        return len(self._told) + len(self._makers)

    def _find(self, span: SpanOf) -> _OpenTask | None:
        return self._told.get(span.task, {}).get(span.worker)

    def _note_step(self, span: SpanOf) -> None:
        told_task = self._find(span)
        if told_task is not None and isinstance(told_task.task, m.TrainStep | m.FinishStep):
            steps = self._steps.setdefault(told_task.task.node, {})
            steps[told_task.task.step] = span
            if len(steps) > _VERSIONS:
                del steps[min(steps)]

    def _join_span(self, span: SpanOf) -> JoinedSpan:
        told_task = self._find(span)
        if told_task is None:
            if span.what:
                args = {"what": span.what}
            else:
                args = {}
            return JoinedSpan(span=span, args=args, arrows=())
        if span.block >= 0:
            args = self._describe_rows(span) | told_task.args
        else:
            args = told_task.args
        if isinstance(told_task.task, m.RunChunk) and (loads := self._loads.get(span.track)):
            args = args | {"versions": {model: at for model, (_, at) in loads.items()}}
        arrows = [a for a in self._draw_arrows(span, told_task) if a.source.start <= a.target.start]
        return JoinedSpan(span=span, args=args, arrows=arrows)

    def _args(self, task: m.Task) -> dict[str, Any]:
        """What is known of all its spans."""
        match task:
            case m.RunChunk():
                return {
                    "chunk": task.id,
                    "given": len(task.keys),
                    "positions": _positions(task.keys),
                }
            case m.TrainStep() | m.TrainPart():
                part = {"part": task.part} if isinstance(task, m.TrainPart) else {}
                step, rows = self._first + task.step, len(task.keys)
                return {"step": step, **part, "rows": rows, "positions": _positions(task.keys)}
            case m.FinishStep():
                return {"step": self._first + task.step, "parts": task.parts}
            case m.Evaluate():
                return {"version": task.version, "rows": len(task.keys)}
            case m.Record():
                return {"step": self._first + task.step}
            case m.Offer() | m.Load():
                return {"model": task.model, "version": task.version}

    def _describe_rows(self, span: SpanOf) -> dict[str, Any]:
        return {"rows": span.rows, **({"tokens": span.tokens} if span.tokens else {})}

    def _draw_arrows(self, span: SpanOf, told_task: _OpenTask) -> Iterator[Arrow]:
        match told_task.task:
            case m.Offer() | m.Load() as task:
                yield from self._draw_weights(span, task)
            case m.RunChunk() | m.TrainStep() | m.TrainPart() | m.Evaluate() as task:
                if not told_task.pointed:
                    told_task.pointed = True
                    makers = (self._makers.get(block) for block in _blocks(task))
                    yield from (Arrow("rows", maker, span) for maker in makers if maker is not None)
                if isinstance(task, m.RunChunk):
                    yield from self._draw_loads(span, told_task)

    def _draw_weights(self, span: SpanOf, task: m.Offer | m.Load) -> Iterator[Arrow]:
        """Draw an arrow from the train Step of a version; a load is noted."""
        train_step = self._steps.get(task.writer, {}).get(task.version)
        if train_step is not None:
            yield Arrow("version", train_step, span)
        if isinstance(task, m.Load) and not span.beside:
            self._loads.setdefault(span.track, {})[task.model] = span, task.version

    def _draw_loads(self, span: SpanOf, told_task: _OpenTask) -> Iterator[Arrow]:
        """Draw arrows from the loads of the versions that a chunk computes with, once for each."""
        for model, (load, version) in self._loads.get(span.track, {}).items():
            if told_task.versions.get(model) != version:
                told_task.versions[model] = version
                yield Arrow("version", load, span)

    def _forget(self) -> None:
        for event in self._over:
            self._end(event)
        for release in self._released:
            for block in release.blocks:
                self._makers.pop((release.worker, block), None)
        if self._ended:
            for memory in (self._told, self._makers, self._steps, self._loads):
                memory.clear()
        self._over, self._released, self._ended = [], [], False

    def lose(self, worker: str, at: float) -> None:
        """A Worker is gone, or is ended now."""
        self._lost[worker] = at
        for number in [n for n, of in self._told.items() if of.pop(worker, None) and not of]:
            del self._told[number]
        for block in [block for block in self._makers if block[0] == worker]:
            del self._makers[block]
        for track in [track for track in self._loads if track.startswith(f"{worker}/")]:
            del self._loads[track]

    def _end(self, event: m.TaskEnd) -> None:
        of = self._told.get(event.id, {})
        if isinstance(event, m.ChunkDone | m.Evaluated | m.Recorded):
            of.clear()
        else:
            of.pop(event.worker, None)
        if not of:
            self._told.pop(event.id, None)


def _blocks(task: m.RunChunk | m.TrainStep | m.TrainPart | m.Evaluate) -> Iterable[tuple[str, int]]:
    """(worker, block) of all that it reads, each once, in order."""
    gathers = chain.from_iterable(task.inputs.values())
    return dict.fromkeys(chain.from_iterable(gather.refs for gather in gathers))


def _positions(keys: Keys) -> str:
    """`64..127`: the source positions that it has rows of."""
    if not len(keys):
        return ""
    return f"{keys.position.min()}..{keys.position.max()}"
