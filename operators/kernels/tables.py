"""Kernels of Tables: numbers gathered by row of the data, and looked up.

Owns: the running statistics, their pieces and their file. Does not own: the declarations
(operators/tables.py), which row of the data a row stands on (data.py), when a version is read
(the engine loads it).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from dataflow.batch import Batch, Keys
from dataflow.errors import CheckpointError, DataError
from dataflow.kernel import Assignment, Chunk, KernelNode, Layout, Piece, Session
from dataflow.model import Table
from dataflow.operator import DATA_ROW
from dataflow.schema import Weight

FILE = "table.arrow"
_COLUMNS = {"row": np.int64, "sum": np.float64, "count": np.int64}


class Statistics:
    """Sum and count of the numbers of each row of the data, and the mean of these.

    rows: int64, ascending; sums: float64; counts: int64.
    """

    def __init__(self) -> None:
        self._arrays = {name: np.empty(0, dtype=kind) for name, kind in _COLUMNS.items()}
        self._overall: float | None = None

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """`row`, `sum` and `count`, an entry for each row of the data that was visited."""
        return self._arrays

    def replace(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over other statistics; they are copied."""
        self._arrays = {name: arrays[name].astype(kind) for name, kind in _COLUMNS.items()}
        self._overall = None

    def add(self, rows: np.ndarray, numbers: np.ndarray) -> None:
        """Add a number to each of these rows, one after another: their order decides last bits."""
        before = self._arrays
        new_rows = np.unique(rows[~self.knows(rows)])
        places = np.searchsorted(before["row"], new_rows)
        # New arrays, so that who holds the ones before keeps a version that stays as it is.
        every_row = np.insert(before["row"], places, new_rows)
        sums = np.insert(before["sum"], places, 0.0)
        counts = np.insert(before["count"], places, 0)
        where = np.searchsorted(every_row, rows)
        np.add.at(sums, where, numbers)
        np.add.at(counts, where, 1)
        self._arrays = {"row": every_row, "sum": sums, "count": counts}
        self._overall = None

    def knows(self, rows: np.ndarray) -> np.ndarray:
        """Whether each of these rows was visited."""
        every_row = self._arrays["row"]
        if not len(every_row):
            return np.zeros(len(rows), dtype=bool)
        where = np.searchsorted(every_row, rows)
        return every_row[np.minimum(where, len(every_row) - 1)] == rows

    def means(self, rows: np.ndarray) -> np.ndarray:
        """The mean of each of these rows, float64; of one that was never visited the mean of the
        means of all that were, and NaN where none was.
        """
        known = self.knows(rows)
        means = np.full(len(rows), self._mean_of_all())
        where = np.searchsorted(self._arrays["row"], rows[known])
        means[known] = self._arrays["sum"][where] / self._arrays["count"][where]
        return means

    def _mean_of_all(self) -> float:
        if self._overall is None:
            sums, counts = self._arrays["sum"], self._arrays["count"]
            self._overall = float(np.mean(sums / counts)) if len(sums) else float("nan")
        return self._overall


class _TableKernel:
    """What both kernels have: the Table, and the statistics, which they may share."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Begin with an empty Table."""
        self._table: Table = node.tables["table"]
        self._statistics = session.module(self._table, Statistics)
        self._node = node

    def close(self) -> None:
        """Nothing to close."""


class RecordTable(_TableKernel):
    """Kernel of `record`: the only writer of a Table. params: column."""

    def step(self, assignment: Assignment) -> Mapping[str, float]:
        """Add the Step's numbers, in the order of their keys. Raises DataError for one that the
        Table cannot take.
        """
        rows = assignment.inputs["rows"]
        data_rows = _data_rows(rows)
        name = f"table/{self._table.name}"
        known = self._statistics.knows(data_rows)
        share = float(known.mean()) if len(known) else 0.0
        numbers, has_number = self._read_numbers(rows)
        self._statistics.add(data_rows[has_number], numbers)
        return {f"{name}/known": share, f"{name}/rows": float(len(self._statistics.arrays["row"]))}

    def _read_numbers(self, rows: Batch) -> tuple[np.ndarray, np.ndarray]:
        """The numbers to add, float64, and which rows have one."""
        column = self._node.params["column"]
        array = rows.array(column)
        has_number = array.is_valid().to_numpy(zero_copy_only=False)
        if _is_list(array.type):
            lengths = pc.call_function("list_value_length", [array]).drop_null()
            numbers = np.maximum(lengths.to_numpy(zero_copy_only=False), 1).astype(np.float64)
        else:
            filled = array.cast(pa.float64()).drop_null()
            numbers = filled.to_numpy(zero_copy_only=False)
        self._require_numbers(numbers, rows.keys.take(has_number))
        if self._table.statistic == "geometric_mean":
            numbers = np.log(numbers)
        return numbers, has_number

    def _require_numbers(self, numbers: np.ndarray, keys: Keys) -> None:
        """Raise DataError for a number that is not finite, or has no log where that is needed."""
        fits, expected, fix = np.isfinite(numbers), "a finite number", "leave such rows out"
        if self._table.statistic == "geometric_mean":
            fits = fits & (numbers > 0)
            expected, fix = "a number above 0", 'statistic="mean"'
        if fits.all():
            return
        first = int(np.flatnonzero(~fits)[0])
        where = f"{self._node.name}: {self._node.params['column']}: row {keys.rows()[first]}"
        raise DataError(f"{where}: expected {expected}, found {numbers[first]:g}. Fix: {fix}.")

    def pieces(self) -> Iterable[Piece]:
        """The statistics as they are now, a tensor each."""
        for name, array in self._statistics.arrays.items():
            yield Piece(name, torch.from_numpy(array))

    def save(self, directory: Path) -> None:
        """Write the statistics as an Arrow file."""
        directory.mkdir(parents=True, exist_ok=True)
        table = pa.table(self._statistics.arrays)
        path = str(directory / FILE)
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote. Raises CheckpointError for another file."""
        path = directory / FILE
        with pa.OSFile(str(path), "rb") as source:
            saved = pa.ipc.open_file(source).read_all()
        if set(saved.column_names) != set(_COLUMNS):
            problem = f"expected the columns {', '.join(_COLUMNS)}, found {saved.column_names}"
            raise CheckpointError(f"{path}: {problem}. Fix: an earlier checkpoint.")
        self._statistics.replace({name: saved.column(name).to_numpy() for name in _COLUMNS})


class LookUpTable(_TableKernel):
    """Kernel of `lookup`: a weight for each row. It reads a Table as others read a Model."""

    def load(self, pieces: Iterable[Piece], version: int, rate: float = 1.0) -> None:
        """Copy these statistics; no pieces if the shared ones have them."""
        arrays = {piece.name: _to_array(piece.data) for piece in pieces}
        if arrays:
            self._statistics.replace(arrays)

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch: a number above each row."""
        means = self._statistics.means(_data_rows(chunk.inputs["rows"]))
        if self._table.statistic == "geometric_mean":
            means = np.exp(means)
        weights = np.nan_to_num(means, nan=0.0).astype(np.float32)
        yield Batch.make(chunk.keys, {"weight": weights}, Weight)


def _data_rows(rows: Batch) -> np.ndarray:
    """int64: the row of the data of each row."""
    return rows.array(DATA_ROW).to_numpy(zero_copy_only=False).astype(np.int64)


def _to_array(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _is_list(kind: pa.DataType) -> bool:
    is_variable = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_variable or pa.types.is_fixed_size_list(kind)
