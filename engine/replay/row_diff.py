"""Two runs compared by the rows that both recorded: where they first differ.

Owns: the order in which rows are compared, and what is said. Does not own: the comparison of cells
(row_equality.py), of all else that run folders keep (engine/replay/run_diff.py). Nothing of a graph
is imported.

The order is that of Steps, then of nodes as they run, then of keys; after a Step's rows come the
weights that it made. Beyond the first difference nothing is claimed: all that follows may follow
from it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from dataflow.batch import Keys
from dataflow.safe_text import one_line
from engine.keep.record.recorder import own_columns
from engine.keep.record.stored_assignments import Told
from engine.keep.record.stored_rows import StoredRows
from engine.keep.untrusted_files import read_document, reading
from engine.plan.plan import Decisions, PlannedNode
from engine.protocol.refs import Key
from engine.replay.recorded_run import require_recorded
from engine.replay.row_equality import first_difference, told


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDifference:
    """Where two runs first differ. row: None where it is not a row's. what: column and both
    values, or who alone has it.
    """

    step: int
    edge: str
    row: Key | None
    what: str

    def __str__(self) -> str:
        row = f", row {told(self.row)}" if self.row is not None else ""
        return f"step {self.step}, {self.edge}{row}: {self.what}"


class _Recorded:
    """What a run recorded, by Step and node. readers: of each node's rows."""

    def __init__(self, folder: Path) -> None:
        recorded = require_recorded(folder)
        with reading(folder / "plan.json"):
            plan = json.loads(read_document(folder / "plan.json"))
            nodes = msgspec.convert(plan["nodes"], tuple[PlannedNode, ...])
            edges = [(edge["producer"], edge["consumer"]) for edge in plan["edges"]]
        self.nodes = [node.name for node in nodes]
        self.told = Told.read(recorded, Decisions(nodes=nodes))
        self.rows = StoredRows(recorded, self.told)
        self.readers: dict[str, list[str]] = defaultdict(list)
        for producer, consumer in edges:
            self.readers[producer].append(consumer)
        self.weights = {
            (task.step, task.node): task.digest
            for task in self.told.tasks
            if task.kind == "train" and task.digest
        }
        self.keys: dict[tuple[int, str], set[Key]] = defaultdict(set)
        self.of_no_step = 0
        for node in self.rows.nodes:
            self._index(node)
        self.last = max(self.told.steps(), default=0)

    def _index(self, node: str) -> None:
        evaluated = self.told.is_versioned(node)
        for task in self.told.of(node):
            for key in (key for made in task.made for key in made.rows()):
                step = self.told.step_of(node, key, task)
                if step or evaluated:
                    self.keys[step, node].add(key)
                else:
                    self.of_no_step += 1

    def edge(self, node: str) -> str:
        """A node's edges in words: `rollout -> score, train_policy`."""
        readers = ", ".join(self.readers.get(node, ()))
        return one_line(f"{node} -> {readers}" if readers else node)


def row_differences(a: Path, b: Path) -> str:
    """The text of `dataflow diff A B --rows`. Raises RunError where a run recorded nothing,
    DataError for damaged files.
    """
    named = a.name != b.name
    labels = tuple(one_line(path.name if named else str(path)) for path in (a, b))
    comparison = _Comparison(_Recorded(a), _Recorded(b), labels)
    found = comparison.first()
    lines = [f"first difference: {found}"] if found else ["rows: no difference"]
    return "\n".join([*lines, *comparison.said()]) + "\n"


class _Comparison:
    """rows, columns, steps: what has been compared so far."""

    def __init__(self, a: _Recorded, b: _Recorded, labels: tuple[str, ...]) -> None:
        self._a, self._b, self._labels = a, b, labels
        both = a.rows.nodes & b.rows.nodes
        self._nodes = [name for name in a.nodes if name in both]
        self._last = min(a.last, b.last)
        self._rows = 0
        self._absent = 0
        self._steps: dict[int, None] = {}
        self._columns: dict[str, None] = {}

    def first(self) -> RowDifference | None:
        """The first difference, if there is one."""
        steps = {step for run in (self._a, self._b) for step, _ in (*run.keys, *run.weights)}
        for step in sorted(step for step in steps if step <= self._last):
            self._steps[step] = None
            found = next(self._of_step(step), None)
            for run in (self._a, self._b):
                run.rows.forget()
            if found is not None:
                return found
        return None

    def _of_step(self, step: int) -> Iterator[RowDifference]:
        for node in self._nodes:
            yield from self._of_node(step, node)
        for node in self._a.nodes:
            was, now = (run.weights.get((step, node)) for run in (self._a, self._b))
            if was and now and was != now:
                what = f"{self._values(was, now)}, by digest"
                yield RowDifference(step=step, edge=f"weights of {node}", row=None, what=what)

    def _of_node(self, step: int, node: str) -> Iterator[RowDifference]:
        """The first of a node's rows that differs, or that only one run has."""
        a, b = (run.keys.get((step, node), set()) for run in (self._a, self._b))
        alone = min(a ^ b, default=None)
        common = sorted(key for key in a & b if alone is None or key < alone)
        edge = self._a.edge(node)
        found = self._of_rows(step, node, common)
        if found is not None:
            row, what = found
            yield RowDifference(step=step, edge=edge, row=row, what=what)
        elif alone is not None:
            owner = self._labels[0 if alone in a else 1]
            yield RowDifference(step=step, edge=edge, row=alone, what=f"only {owner} has it")

    def _of_rows(self, step: int, node: str, keys: Sequence[Key]) -> tuple[Key, str] | None:
        there = [k for k in keys if not any(r.rows.absent(node, [k], step) for r in self._both)]
        self._absent += len(keys) - len(there)
        if not there:
            return None
        wanted = Keys.of(*zip(*there, strict=True))
        tables = [run.rows.find(node, wanted, step)[0] for run in self._both]
        one, other = (table for table in tables if table is not None)
        columns = self._shared(node, one, other)
        found = first_difference(one, other, columns)
        self._rows += len(there) if found is None else found.row
        if found is None:
            return None
        where = found.column if found.at is None else f"{found.column}[{found.at}]"
        return there[found.row], f"{where}: {self._values(found.a, found.b)}"

    @property
    def _both(self) -> tuple[_Recorded, _Recorded]:
        return self._a, self._b

    def _shared(self, node: str, one: pa.Table, other: pa.Table) -> list[str]:
        theirs = set(own_columns(other.schema))
        columns = [name for name in own_columns(one.schema) if name in theirs]
        self._columns |= dict.fromkeys(f"{node}.{name}" for name in columns)
        return columns

    def _values(self, a: Any, b: Any) -> str:
        return f"{one_line(repr(a))} ({self._labels[0]}), {one_line(repr(b))} ({self._labels[1]})"

    def said(self) -> Iterator[str]:
        """What has been compared, and what could not be."""
        steps = list(self._steps)
        span = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
        yield f"compared: {self._rows} rows of {', '.join(self._nodes) or 'no node'}, {span}"
        yield f"columns: {one_line(', '.join(self._columns)) or 'none'}"
        pairs = ((self._labels[0], *self._both), (self._labels[1], *reversed(self._both)))
        for label, own, other in pairs:
            if only := sorted(own.rows.nodes - other.rows.nodes):
                yield f"only {label} recorded {one_line(', '.join(only))}"
            if own.last > other.last:
                yield f"only {label} has steps {other.last + 1} to {own.last}"
            if own.of_no_step:
                yield f"{label}: {own.of_no_step} rows that were trained in no step, not compared"
        if self._absent:
            yield f"{self._absent} rows are not on the disk of one of them, not compared"
