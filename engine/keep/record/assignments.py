"""What was told and made, as a file for each Step: what it takes to call a kernel again.

Owns: the form of these files, and writing them as the run goes on. Does not own: reading them
(stored_assignments.py), rows (recorder.py). They hold keys, never rows.

A line of a file is one of:

    event       name        of                   has
    chunk       -           RunChunk             node, worker, step, keys; begin, end: its spans,
                                                 and weights, where it has them
    train       -           TrainStep            the same; of a rank's own rows, mine, total:
                                                 where they are among how many of the Step
    part        its number  TrainPart            the same as train
    finish      parts       FinishStep           node, worker, step
    evaluate    -           Evaluate             the same; step: the version
    set         row set     the train or part    keys, mine, total
                            before it
    gather      input       the task before it   producer, columns, keys (none: the task's), owners
    made        -           Produced             keys of rows that a chunk made
    stepped     -           Stepped              digest of the weights after it (first rank)

The line of a chunk, a train or a part of a node that has had less memory than its plan says has
slots, tokens, recompute: its limits (dataflow/memory_limits.py).

Every line has the run's life and the id of its task. A file is written whole when its Step closes,
and again before a checkpoint of it, which has rows that were made since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataflow.batch import Keys
from dataflow.loss_terms import ROWS
from dataflow.memory_limits import MemoryLimits
from dataflow.storage import replacing
from engine.keep.background_job import BackgroundJob
from engine.keep.record.place import ASSIGNMENTS
from engine.plan.plan import Plan
from engine.protocol import messages as m
from engine.protocol.events import EventHeard, InstructionTold, RunEvent, WritingBegan
from engine.protocol.refs import Gather, Ref

_POSITIONS, _SAMPLES = pa.list_(pa.int64()), pa.list_(pa.int32())
SCHEMA = pa.schema([
    ("life", pa.int32()), ("id", pa.int64()), ("event", pa.utf8()), ("name", pa.utf8()),
    ("node", pa.utf8()), ("worker", pa.utf8()), ("step", pa.int64()), ("again", pa.bool_()),
    ("columns", pa.list_(pa.utf8())), ("digest", pa.utf8()),
    ("position", _POSITIONS), ("sample", _SAMPLES), ("attempt", _SAMPLES), ("mine", _SAMPLES),
    ("total", pa.int64()),
    ("of_position", _POSITIONS), ("of_sample", _SAMPLES), ("of_attempt", _SAMPLES),
    ("begin", _SAMPLES), ("end", _SAMPLES), ("weights", pa.list_(pa.float32())),
    ("slots", pa.int64()), ("tokens", pa.int64()), ("recompute", pa.utf8()),
])  # fmt: skip
LATER = ("begin", "end", "weights", "slots", "tokens", "recompute")
"""Columns that files of earlier versions do not have: the last of these, or all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AssignmentLine:
    """One line of a file. node: of a gather, the producer."""

    life: int
    id: int
    event: str
    name: str = ""
    node: str = ""
    worker: str = ""
    step: int = 0
    again: bool = False
    columns: tuple[str, ...] = ()
    digest: str = ""
    keys: Keys | None = None
    mine: np.ndarray | None = None
    total: int | None = None
    owners: Keys | None = None
    begin: np.ndarray | None = None
    end: np.ndarray | None = None
    weights: np.ndarray | None = None
    slots: int | None = None
    tokens: int | None = None
    recompute: str | None = None


def step_file(recorded: Path, step: int) -> Path:
    """The file of what was told and made until a Step of the run closed."""
    return recorded / ASSIGNMENTS / f"step_{step:06d}.parquet"


class Assignments:
    """Subscribes to a run's events and writes the files. life: the run's."""

    takes = (
        *(m.RunChunk, m.TrainStep, m.TrainPart, m.FinishStep, m.Evaluate),
        *(m.Produced, m.Stepped, m.Release, m.StepClosed, WritingBegan),
    )

    def __init__(self, plan: Plan, recorded: Path, life: int) -> None:
        self._recorded, self._life, self._first = recorded, life, plan.first
        self._row_sets = {n.name: {i.name: i.row_set for i in n.inputs} for n in plan.nodes}
        self._blocks: dict[tuple[str, int], Keys] = {}
        """Keys of each block of rows that may be gathered."""
        self._lines: list[AssignmentLine] = []
        self._step, self._of_step = -1, list[AssignmentLine]()
        """The last Step that closed, and its lines: it may close again."""
        self._job = BackgroundJob("assignments")

    def know(self, rows: Mapping[str, Mapping[str, Ref]]) -> None:
        """Blocks that were read from a checkpoint, by source and node."""
        for refs in rows.values():
            self._blocks |= {(ref.worker, ref.block): ref.keys for ref in refs.values()}

    def take(self, event: RunEvent) -> None:
        """See `engine.protocol.events`."""
        match event:
            case InstructionTold(instruction=m.StepClosed(step=step)):
                self._close(self._first + step)
            case InstructionTold(instruction=m.Release(worker=worker, blocks=blocks)):
                for block in blocks:
                    self._blocks.pop((worker, block), None)
            case InstructionTold(instruction=told):
                self._add_instruction(told)
            case EventHeard(event=heard):
                self._add_answer(heard)
            case WritingBegan(of=of):
                closed = isinstance(of, m.Checkpoint) and self._first + of.step == self._step
                if closed and self._lines:
                    self._close(self._step)  # it has what was made since the Step closed, too
                self._job.settle()

    def close(self) -> None:
        """Wait for the file under way. What came since the last Step closed is not kept."""
        try:
            self._job.settle()
        finally:
            self._job.end()

    def _add_instruction(self, instruction: object) -> None:
        match instruction:
            case m.RunChunk() if instruction.giver in ("", instruction.worker):
                # Step 0: a chunk above the cut is told for no Step.
                if instruction.step:
                    step = self._first + instruction.step
                else:
                    step = 0
                self._add_task("chunk", instruction, step)
                self._add_gathers(instruction.id, instruction.inputs, lambda name: instruction.keys)
            case m.Evaluate():
                self._add_task("evaluate", instruction, self._first + instruction.version)
                self._add_gathers(instruction.id, instruction.inputs, lambda name: instruction.keys)
            case m.TrainStep() | m.TrainPart():
                self._add_train(instruction)
            case m.FinishStep():
                step = self._first + instruction.step
                self._add_task("finish", instruction, step, name=str(instruction.parts))

    def _add_train(self, assignment: m.TrainStep | m.TrainPart) -> None:
        step = self._first + assignment.step
        event, name = "train", ""
        if isinstance(assignment, m.TrainPart):
            event, name = "part", str(assignment.part)
        mine, total = assignment.mine, assignment.total
        self._add_task(event, assignment, step, name=name, mine=mine, total=total)
        keys_by_row_set = {ROWS: assignment.keys}
        for name, rows in assignment.others.items():
            keys_by_row_set[name] = rows.keys
            self._lines.append(
                AssignmentLine(
                    life=self._life,
                    id=assignment.id,
                    event="set",
                    name=name,
                    keys=rows.keys,
                    mine=rows.mine,
                    total=rows.total,
                )
            )
        row_sets = self._row_sets[assignment.node]
        self._add_gathers(
            assignment.id, assignment.inputs, lambda name: keys_by_row_set[row_sets.get(name, ROWS)]
        )

    def _add_task(
        self,
        event: str,
        task: m.RunChunk | m.TrainStep | m.TrainPart | m.FinishStep | m.Evaluate,
        step: int,
        *,
        name: str = "",
        mine: np.ndarray | None = None,
        total: int | None = None,
    ) -> None:
        begin = end = weights = keys = None
        if not isinstance(task, m.FinishStep):
            keys = task.keys
        if isinstance(task, m.RunChunk):
            weights = task.weights
            if task.spans is not None:
                begin, end = task.spans.T
        limits: MemoryLimits | None = None
        if isinstance(task, m.RunChunk | m.TrainStep | m.TrainPart):
            limits = task.limits
        self._lines.append(
            AssignmentLine(
                life=self._life,
                id=task.id,
                event=event,
                name=name,
                node=task.node,
                worker=task.worker,
                step=step,
                again=isinstance(task, m.RunChunk) and task.again,
                keys=keys,
                mine=mine,
                total=total,
                begin=begin,
                end=end,
                weights=weights,
                slots=limits and limits.slots,
                tokens=limits and limits.tokens,
                recompute=limits and limits.recompute,
            )
        )

    def _add_gathers(
        self, task: int, inputs: m.Inputs, keys_of_input: Callable[[str], Keys]
    ) -> None:
        for name, gathers in inputs.items():
            for gather in gathers:
                keys: Keys | None = self._keys_of(gather)
                # The task's own keys are in its line, and are not written again.
                if gather.keys is None and _same(keys, keys_of_input(name)):
                    keys = None
                self._lines.append(
                    AssignmentLine(
                        life=self._life,
                        id=task,
                        event="gather",
                        name=name,
                        node=gather.producer,
                        columns=gather.columns,
                        keys=keys,
                        owners=gather.keys,
                    )
                )

    def _keys_of(self, gather: Gather) -> Keys:
        """The keys of its rows, in its order."""
        blocks = [self._blocks[ref] for ref in gather.refs]
        if len(blocks) == 1:
            return blocks[0].take(gather.row)
        if not blocks:
            return Keys.of([])
        starts = np.cumsum([0, *map(len, blocks[:-1])])
        return Keys.concat(blocks).take(starts[gather.block] + gather.row)

    def _add_answer(self, heard: object) -> None:
        match heard:
            case m.Produced(ref=ref):
                self._blocks[ref.worker, ref.block] = ref.keys
                self._lines.append(
                    AssignmentLine(
                        life=self._life,
                        id=heard.id,
                        event="made",
                        node=heard.node,
                        worker=ref.worker,
                        keys=ref.keys,
                    )
                )
            case m.Stepped():
                self._lines.append(
                    AssignmentLine(
                        life=self._life,
                        id=heard.id,
                        event="stepped",
                        step=self._first + heard.step,
                        node=heard.node,
                        worker=heard.worker,
                        digest=heard.digest,
                    )
                )

    def _close(self, step: int) -> None:
        """Begin to write the Step's file; one that closes again has what came since, too."""
        if step and step == self._first:  # a phase begins at what the one before has closed
            return
        lines, self._lines = self._lines, []
        self._of_step = self._of_step + lines if step == self._step else lines
        self._step, step_lines = step, list(self._of_step)
        self._job.begin(_write, self._recorded, step, step_lines)


def _same(a: Keys, b: Keys) -> bool:
    pairs = ((a.position, b.position), (a.sample, b.sample), (a.attempt, b.attempt))
    return all(np.array_equal(x, y) for x, y in pairs)


def _write(recorded: Path, step: int, lines: Sequence[AssignmentLine]) -> None:
    table = assignment_table(lines)
    path = step_file(recorded, step)
    with replacing(f"the assignments of step {step}", path, table.nbytes) as file:
        pq.write_table(table, file, compression="zstd", use_compliant_nested_type=False)


def assignment_table(lines: Sequence[AssignmentLine]) -> pa.Table:
    """Lines as a table of `SCHEMA`."""
    columns: dict[str, pa.Array] = {}
    for name, kind in zip(SCHEMA.names, SCHEMA.types, strict=True):
        if not pa.types.is_list(kind):
            numbers = [getattr(line, name) for line in lines]
            columns[name] = pa.array(numbers, kind)
    columns["columns"] = pa.array([line.columns for line in lines], pa.list_(pa.utf8()))
    for name in ("mine", "begin", "end"):
        columns[name] = _lists([getattr(line, name) for line in lines], np.int32)
    columns["weights"] = _lists([line.weights for line in lines], np.float32)
    for prefix, keys in (("", [x.keys for x in lines]), ("of_", [x.owners for x in lines])):
        for part, kind in (("position", np.int64), ("sample", np.int32), ("attempt", np.int32)):
            lists = [getattr(each, part, None) for each in keys]
            columns[prefix + part] = _lists(lists, kind)
    return pa.table(columns, schema=SCHEMA)


def _lists(values: Iterable[np.ndarray | None], kind: type) -> pa.Array:
    """A list array; None is null."""
    parts = list(values)
    present_parts = [part for part in parts if part is not None]
    if present_parts:
        flat = np.concatenate(present_parts).astype(kind)
    else:
        flat = np.zeros(0, kind)
    offsets = np.cumsum([0, *(0 if part is None else len(part) for part in parts)], dtype=np.int32)
    missing = pa.array([part is None for part in parts], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), mask=missing)
