"""What a run was told and made, read back from the files of `assignments.py`.

Owns: tasks with all that was told of them, and which of them made a row. Does not own: the rows
(stored_rows.py), the files' form (assignments.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataflow.batch import Keys
from dataflow.errors import DataError
from dataflow.kernel import AssignedRows
from dataflow.loss_terms import ROWS
from dataflow.memory_limits import MemoryLimits
from engine.keep.record.assignments import LATER, SCHEMA
from engine.keep.record.place import ASSIGNMENTS
from engine.plan.plan import Decisions
from engine.protocol.refs import Key

_FILE = re.compile(r"step_([0-9]+)\.parquet")
TASKS = ("chunk", "train", "evaluate")

TaskId = tuple[int, int]
"""(life, id)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedGather:
    """What one input of a task took from one producer. owners: of rows that are reduced, the key of
    the row that each is for.
    """

    input: str
    producer: str
    columns: tuple[str, ...]
    keys: Keys
    owners: Keys | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class RecordedTask:
    """A chunk, a train node's Step or an evaluation, as it was told and how it went.

    kind: chunk, train, part, evaluate. step: of the run that it was told for; 0 above the cut.
    closed: the Step at whose end it was written. rows: of each row set, what this Worker had; a
    chunk has one. made: keys of a chunk's rows that came. digest: of the weights after it. spans,
    weights: of a chunk, as in `dataflow.kernel.Chunk`. limits: None for the plan's. parts: of a
    Step that was trained part by part, in order; its rows and gathers are then those of all parts.
    """

    kind: str
    life: int
    id: int
    node: str
    worker: str
    step: int
    closed: int
    again: bool
    rows: dict[str, AssignedRows]
    gathers: list[RecordedGather] = field(default_factory=list)
    made: list[Keys] = field(default_factory=list)
    digest: str = ""
    done: bool = False
    spans: np.ndarray | None = None
    weights: np.ndarray | None = None
    limits: MemoryLimits | None = None
    parts: tuple[RecordedTask, ...] = ()

    @property
    def name(self) -> TaskId:
        """Unique in a run folder, but for the ranks of a node, which are told the same."""
        return self.life, self.id

    def made_rows(self) -> Iterator[Key]:
        """The key of each row that it made, in order."""
        for keys in self.made:
            yield from keys.rows()

    @property
    def keys(self) -> Keys:
        """The keys of its own rows."""
        return self.rows[ROWS].keys


class TaskHistory:
    """All tasks that a run was told up to a Step, in order."""

    def __init__(self, tasks: Iterable[RecordedTask], plan: Decisions) -> None:
        self.tasks = list(tasks)
        self._versioned = {n.name for n in plan.nodes if n.region == "evaluation"}
        self._made: dict[str, dict[tuple[Key, int], list[RecordedTask]]] = {}
        self._steps: dict[tuple[str, int, int], int] | None = None
        self._sources = {n.name: n.source for n in plan.nodes}

    @staticmethod
    def read(recorded: Path, plan: Decisions, until: int | None = None) -> TaskHistory:
        """Read the files of all Steps up to this one. Raises DataError for a damaged one."""
        files = [(s, p) for s, p in assignment_files(recorded) if until is None or s <= until]
        row_sets = {n.name: {i.name: i.row_set for i in n.inputs} for n in plan.nodes}
        try:
            return TaskHistory(_tasks(files, row_sets), plan)
        except (AssertionError, AttributeError, LookupError, TypeError) as error:
            problem = f"expected assignments as a run writes them, found {error!r:.80}"
            fix = "restore its files, or record again"
            raise DataError(f"{recorded / ASSIGNMENTS}: {problem}. Fix: {fix}.") from error

    def steps(self) -> list[int]:
        """The Steps that some train node was told to train."""
        return sorted({task.step for task in self.tasks if task.kind == "train"})

    def of(self, node: str) -> list[RecordedTask]:
        """List all tasks of a node, in order."""
        return [task for task in self.tasks if task.node == node]

    def ranks_of(self, task: RecordedTask) -> list[RecordedTask]:
        """What each rank was told of the same Step, by rank; one for a node of one rank."""
        return [each for each in self.of(task.node) if each.name == task.name]

    def makers(self, node: str, key: Key, step: int) -> list[RecordedTask]:
        """The chunks that made a row, the first one first; several if one was lost with a Worker.
        step: of an evaluation, whose keys come again with each version.
        """
        tasks_by_row = self._made.get(node)
        if tasks_by_row is None:
            tasks_by_row = self._made[node] = {}
            for task in self.of(node):
                version = self._version(task.node, task.step)
                for row in task.made_rows():
                    tasks_by_row.setdefault((row, version), []).append(task)
        return tasks_by_row.get((key, self._version(node, step)), [])

    def identity(self, task: RecordedTask, key: Key) -> tuple[int, Key, int]:
        """What is the same for a row that is made again, and for no other of its node."""
        return task.life, key, self._version(task.node, task.step)

    def is_versioned(self, node: str) -> bool:
        """Whether a node's keys come again with each version, as in evaluations."""
        return node in self._versioned

    def _version(self, node: str, step: int) -> int:
        if node in self._versioned:
            return step
        return 0

    def step_of(self, node: str, key: Key, task: RecordedTask) -> int:
        """The Step that a row of a node belongs to: in which its prompt was trained; of an
        evaluation the version; 0 if it was in no Step.
        """
        if node in self._versioned or task.step:
            return task.step
        return self._trained_steps().get((self._sources[node], key[0], key[2]), 0)

    def _trained_steps(self) -> Mapping[tuple[str, int, int], int]:
        """(source, position, attempt) of each prompt with trained rows -> the Step."""
        if self._steps is None:
            self._steps = {}
            for task in (task for task in self.tasks if task.kind == "train"):
                self._note(task, self._steps)
        return self._steps

    def _note(self, task: RecordedTask, steps: dict[tuple[str, int, int], int]) -> None:
        for gather in task.gathers:
            source = self._sources[gather.producer]
            for position, _, attempt in gather.keys.rows():
                steps.setdefault((source, position, attempt), task.step)


def assignment_files(recorded: Path) -> list[tuple[int, Path]]:
    """(Step, file), in the order of the Steps."""
    folder = recorded / ASSIGNMENTS
    if folder.is_dir():
        paths = folder.iterdir()
    else:
        paths = ()
    named = [(_FILE.fullmatch(path.name), path) for path in paths]
    return sorted((int(match[1]), path) for match, path in named if match)


def read_assignment_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; lists as arrays, or None. Raises DataError."""
    try:
        table = pq.ParquetFile(path).read()
        table = _add_later_columns(table)
        if table.schema.names != SCHEMA.names or table.schema.types != SCHEMA.types:
            raise pa.ArrowInvalid(f"columns {', '.join(table.schema.names)}")
    except (pa.ArrowException, OSError) as error:
        problem = f"expected assignments of a run, found a damaged file ({error})"
        raise DataError(f"{path}: {problem}. Fix: restore it, or record again.") from error
    columns = {name: _values(table.column(name).combine_chunks()) for name in table.schema.names}
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _add_later_columns(table: pa.Table) -> pa.Table:
    """A table of an earlier version, with nulls for what was not recorded then."""
    missing_names = SCHEMA.names[len(table.schema.names) :]
    if not set(missing_names) <= set(LATER):
        return table
    for name in missing_names:
        field = SCHEMA.field(name)
        nulls = pa.nulls(len(table), field.type)
        table = table.append_column(field, nulls)
    return table


def _values(column: pa.Array) -> list[Any]:
    if not pa.types.is_list(column.type) or pa.types.is_string(column.type.value_type):
        return column.to_pylist()
    flat = column.values.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy()
    validity = column.is_valid().to_numpy(zero_copy_only=False)
    lists: list[np.ndarray | None] = []
    for low, high, is_there in zip(offsets[:-1], offsets[1:], validity, strict=True):
        lists.append(flat[low:high] if is_there else None)
    return lists


def _tasks(
    files: Iterable[tuple[int, Path]], row_sets: Mapping[str, Mapping[str, str]]
) -> Iterator[RecordedTask]:
    """The tasks of these files in order, each with what later lines say of it."""
    known: dict[tuple[int, int, str], RecordedTask] = {}
    parts: dict[tuple[int, str, str, int], dict[int, RecordedTask]] = defaultdict(dict)
    for step, path in files:
        last: RecordedTask | None = None
        for line in read_assignment_lines(path):
            match line["event"]:
                case "set" | "gather":
                    assert last is not None, f"{path}: a line that belongs to no task"
                    _add_told(last, line, row_sets.get(last.node, {}))
                case "made" | "stepped":
                    task = known.get((line["life"], line["id"], line["worker"]))
                    if task is not None:
                        _add_heard(task, line)
                case "part":
                    last = _task(line, step)
                    # One that is told again takes the place of the one before.
                    number = int(line["name"])
                    parts[_step_of_rank(line)][number] = last
                case "finish":
                    step_parts = parts[_step_of_rank(line)]
                    finish = _finish(line, step, step_parts)
                    known[finish.life, finish.id, finish.worker] = finish
                case _:
                    last = _task(line, step)
                    known[last.life, last.id, last.worker] = last
    yield from known.values()


def _step_of_rank(line: Mapping[str, Any]) -> tuple[int, str, str, int]:
    return line["life"], line["node"], line["worker"], line["step"]


def _finish(
    line: Mapping[str, Any], closed: int, parts_by_number: Mapping[int, RecordedTask]
) -> RecordedTask:
    """A Step that was trained in these parts, as a train node's task."""
    count = int(line["name"])
    parts = tuple(parts_by_number[number] for number in range(count))
    keys = Keys.concat([part.keys for part in parts])
    gathers = chain.from_iterable(part.gathers for part in parts)
    return RecordedTask(
        kind="train",
        life=line["life"],
        id=line["id"],
        node=line["node"],
        worker=line["worker"],
        step=line["step"],
        closed=closed,
        again=line["again"],
        rows={ROWS: AssignedRows(keys=keys)},
        gathers=list(gathers),
        parts=parts,
    )


def _task(line: Mapping[str, Any], closed: int) -> RecordedTask:
    return RecordedTask(
        kind=line["event"],
        life=line["life"],
        id=line["id"],
        node=line["node"],
        worker=line["worker"],
        step=line["step"],
        closed=closed,
        again=line["again"],
        rows={ROWS: _read_assigned(line)},
        spans=_read_spans(line),
        weights=line["weights"],
        limits=_read_limits(line),
    )


def _read_limits(line: Mapping[str, Any]) -> MemoryLimits | None:
    if line["slots"] is None:
        return None
    return MemoryLimits(slots=line["slots"], tokens=line["tokens"], recompute=line["recompute"])


def _read_spans(line: Mapping[str, Any]) -> np.ndarray | None:
    if line["begin"] is None:
        return None
    return np.stack([line["begin"], line["end"]], axis=1)


def _add_told(task: RecordedTask, line: Mapping[str, Any], row_sets: Mapping[str, str]) -> None:
    """What follows a task's own line."""
    name = line["name"]
    if line["event"] == "set":
        task.rows[name] = _read_assigned(line)
        return
    row_set = ROWS
    if task.kind in ("train", "part"):
        row_set = row_sets.get(name, ROWS)
    task_keys = task.rows[row_set].keys
    keys = _keys(line)
    gather = RecordedGather(
        input=name,
        producer=line["node"],
        columns=tuple(line["columns"]),
        keys=task_keys if keys is None else keys,
        owners=_keys(line, "of_"),
    )
    task.gathers.append(gather)


def _add_heard(task: RecordedTask, line: Mapping[str, Any]) -> None:
    """What a Worker answered."""
    if line["event"] == "made":
        keys = _keys(line)
        if keys is not None:
            task.made += [keys]
    else:
        task.done, task.digest = True, line["digest"]


def _read_assigned(line: Mapping[str, Any]) -> AssignedRows:
    keys = _keys(line)
    assert keys is not None
    return AssignedRows(keys=keys, mine=line["mine"], total=line["total"])


def _keys(line: Mapping[str, Any], prefix: str = "") -> Keys | None:
    position, sample, attempt = (line[prefix + part] for part in ("position", "sample", "attempt"))
    if position is None:
        return None
    return Keys(position, sample, attempt)
