"""Two runs compared by the rows that both recorded: where they first differ.

Owns: the order in which rows are compared, and the text. Does not own: the comparison of cells
(row_equality.py), of all else that run folders keep (engine/replay/run_diff.py). No module that a
graph names is imported.

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
from engine.keep.record.recorder import compared_columns
from engine.keep.record.stored_assignments import TaskHistory
from engine.keep.record.stored_rows import StoredRows
from engine.keep.untrusted_files import read_document, reading
from engine.plan.plan import Decisions, PlannedNode
from engine.protocol.refs import Key
from engine.replay.recorded_run import require_recorded
from engine.replay.row_equality import describe_key, first_difference


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
        row = ""
        if self.row is not None:
            row = f", row {describe_key(self.row)}"
        return f"step {self.step}, {self.edge}{row}: {self.what}"


class _Recorded:
    """What a run recorded. keys, weights: the rows and the digest of the weights, by Step and node.
    unstepped: how many rows were trained in no Step. last: the last Step.
    """

    def __init__(self, folder: Path) -> None:
        recorded = require_recorded(folder)
        with reading(folder / "plan.json"):
            plan = json.loads(read_document(folder / "plan.json"))
            nodes = msgspec.convert(plan["nodes"], tuple[PlannedNode, ...])
            edges = [(edge["producer"], edge["consumer"]) for edge in plan["edges"]]
        self.nodes = [node.name for node in nodes]
        self.assignments = TaskHistory.read(recorded, Decisions(nodes=nodes))
        self.rows = StoredRows(recorded, self.assignments)
        self._readers: dict[str, list[str]] = defaultdict(list)
        for producer, consumer in edges:
            self._readers[producer].append(consumer)
        self.weights: dict[tuple[int, str], str] = {}
        for task in self.assignments.tasks:
            if task.kind == "train" and task.digest:
                self.weights[task.step, task.node] = task.digest
        self.keys: dict[tuple[int, str], set[Key]] = defaultdict(set)
        self.unstepped = 0
        for node in self.rows.nodes:
            self._index(node)
        self.last = max(self.assignments.steps(), default=0)

    def _index(self, node: str) -> None:
        """Sort the rows of a node into the Steps that they belong to."""
        is_evaluated = self.assignments.is_versioned(node)
        for task in self.assignments.of(node):
            for key in task.made_rows():
                step = self.assignments.step_of(node, key, task)
                # An evaluation before the first Step is of version 0.
                if step or is_evaluated:
                    self.keys[step, node].add(key)
                else:
                    self.unstepped += 1

    def describe_edges(self, node: str) -> str:
        """A node's edges in words: `rollout -> score, train_policy`."""
        readers = ", ".join(self._readers.get(node, ()))
        return one_line(f"{node} -> {readers}" if readers else node)


def row_differences(a: Path, b: Path) -> str:
    """The text of `dataflow diff A B --rows`. Raises RunError where a run recorded nothing,
    DataError for damaged files.
    """
    labels = (a.name, b.name)
    if a.name == b.name:
        labels = (str(a), str(b))
    comparison = _Comparison(_Recorded(a), _Recorded(b), tuple(map(one_line, labels)))
    difference = comparison.find_first()
    if difference is None:
        first_line = "rows: no difference"
    else:
        first_line = f"first difference: {difference}"
    return "\n".join([first_line, *comparison.describe_extent()]) + "\n"


class _Comparison:
    """Compares two runs, and counts what it has compared: rows, Steps and columns. absent: rows
    that one of the runs has not got on its disk.
    """

    def __init__(self, a: _Recorded, b: _Recorded, labels: tuple[str, ...]) -> None:
        self._a, self._b, self._labels = a, b, labels
        common_nodes = a.rows.nodes & b.rows.nodes
        self._nodes = [name for name in a.nodes if name in common_nodes]
        self._last = min(a.last, b.last)
        self._rows = 0
        self._absent = 0
        self._steps: dict[int, None] = {}
        self._columns: dict[str, None] = {}

    def find_first(self) -> RowDifference | None:
        """The first difference, if there is one."""
        for step in self._list_steps():
            self._steps[step] = None
            difference = next(self._compare_step(step), None)
            # Tables of one Step at a time: those of all would fill the memory.
            self._a.rows.forget()
            self._b.rows.forget()
            if difference is not None:
                return difference
        return None

    def _list_steps(self) -> list[int]:
        """The Steps of either run, as far as both went."""
        steps: set[int] = set()
        for run in self._both:
            steps.update(step for step, _ in run.keys)
            steps.update(step for step, _ in run.weights)
        return sorted(step for step in steps if step <= self._last)

    def _compare_step(self, step: int) -> Iterator[RowDifference]:
        for node in self._nodes:
            yield from self._compare_node(step, node)
        # Weights last: a Step makes them of its rows.
        for node in self._a.nodes:
            old, new = (run.weights.get((step, node)) for run in self._both)
            if old and new and old != new:
                what = f"{self._describe_values(old, new)}, by digest"
                yield RowDifference(step=step, edge=f"weights of {node}", row=None, what=what)

    def _compare_node(self, step: int, node: str) -> Iterator[RowDifference]:
        """The first of a node's rows that differs, or that only one run has."""
        a_keys = self._a.keys.get((step, node), set())
        b_keys = self._b.keys.get((step, node), set())
        lone_key = min(a_keys ^ b_keys, default=None)
        common_keys = sorted(a_keys & b_keys)
        if lone_key is not None:
            # The first difference is at the lone row at the latest.
            common_keys = [key for key in common_keys if key < lone_key]
        edge = self._a.describe_edges(node)
        difference = self._compare_rows(step, node, common_keys)
        if difference is not None:
            row, what = difference
            yield RowDifference(step=step, edge=edge, row=row, what=what)
        elif lone_key is not None:
            owner = self._labels[0 if lone_key in a_keys else 1]
            yield RowDifference(step=step, edge=edge, row=lone_key, what=f"only {owner} has it")

    def _compare_rows(self, step: int, node: str, keys: Sequence[Key]) -> tuple[Key, str] | None:
        """The key of the first row that differs, and how; None if none does."""
        stored_keys: list[Key] = []
        for key in keys:
            if not any(run.rows.absent(node, [key], step) for run in self._both):
                stored_keys.append(key)
        self._absent += len(keys) - len(stored_keys)
        if not stored_keys:
            return None
        batch_keys = Keys.of(*zip(*stored_keys, strict=True))
        a_table, _ = self._a.rows.find(node, batch_keys, step)
        b_table, _ = self._b.rows.find(node, batch_keys, step)
        assert a_table is not None, "none of its rows is absent"
        assert b_table is not None, "none of its rows is absent"
        columns = self._common_columns(node, a_table, b_table)
        difference = first_difference(a_table, b_table, columns)
        if difference is None:
            self._rows += len(stored_keys)
            return None
        self._rows += difference.row
        values = self._describe_values(difference.a, difference.b)
        return stored_keys[difference.row], f"{difference.place}: {values}"

    @property
    def _both(self) -> tuple[_Recorded, _Recorded]:
        return self._a, self._b

    def _common_columns(self, node: str, a: pa.Table, b: pa.Table) -> list[str]:
        b_columns = set(compared_columns(b.schema))
        columns = [name for name in compared_columns(a.schema) if name in b_columns]
        self._columns |= dict.fromkeys(f"{node}.{name}" for name in columns)
        return columns

    def _describe_values(self, a: Any, b: Any) -> str:
        a_label, b_label = self._labels
        return f"{one_line(repr(a))} ({a_label}), {one_line(repr(b))} ({b_label})"

    def describe_extent(self) -> Iterator[str]:
        """Say what has been compared, and what could not be."""
        span = "no step"
        if self._steps:
            span = f"steps {min(self._steps)} to {max(self._steps)}"
        nodes = ", ".join(self._nodes) or "no node"
        yield f"compared: {self._rows} rows of {nodes}, {span}"
        columns = one_line(", ".join(self._columns))
        yield f"columns: {columns or 'none'}"
        a_label, b_label = self._labels
        yield from self._describe_surplus(a_label, self._a, self._b)
        yield from self._describe_surplus(b_label, self._b, self._a)
        if self._absent:
            yield f"{self._absent} rows are not on the disk of one of them, not compared"

    def _describe_surplus(self, label: str, run: _Recorded, other: _Recorded) -> Iterator[str]:
        """Say what only one run has."""
        lone_nodes = sorted(run.rows.nodes - other.rows.nodes)
        if lone_nodes:
            yield f"only {label} recorded {one_line(', '.join(lone_nodes))}"
        if run.last > other.last:
            yield f"only {label} has steps {other.last + 1} to {run.last}"
        if run.unstepped:
            yield f"{label}: {run.unstepped} rows that were trained in no step, not compared"
