"""Kernels on columns: functions, selection, and the numbers of an evaluation.

Owns: calling a column function with its rows in order, and checking what it returns. Does not
own: any formula (operators/advantage_formulas.py, operators/select.py, the user's files).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch
from dataflow.device import first_not_finite
from dataflow.errors import DataError, KernelError
from dataflow.kernel import Assignment, Chunk, KernelNode, Layout, Session
from dataflow.schema import Schema
from dataflow.user import Columns
from operators.kernels.bounds import find_newer_than_inputs, find_out_of_bounds
from operators.kernels.return_checks import LIKE, in_order, in_own_memory, refuse_broken_promise
from operators.kernels.scoring_child import Caught


class ColumnFunction:
    """Kernel of every operator that is a function on columns, including the user's own."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Take the function, which runs in this process."""
        assert node.function is not None
        self._node = node
        self._function = node.function

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """Call the function on the chunk's rows. Raises KernelError if it fails or misfits."""
        schemas = self._node.schemas
        arguments = [Columns(batch, schemas[name]) for name, batch in chunk.inputs.items()]
        output = None
        with Caught() as caught:  # user code may raise anything
            output = self._function(*arguments, **self._node.params)
        if caught.fault is not None:
            problem = f"it {caught.fault.text}\n{caught.fault.detail}"
            raise self._make_error(chunk, problem.rstrip())
        if not isinstance(output, Columns):
            kind = type(output).__name__
            problem = f"expected Columns, found {kind}. Fix: return score.set(...)"
            raise self._make_error(chunk, problem)
        if not output.keyed and len(output) == len(chunk.keys):
            raise self._make_error(chunk, f"the rows that it returned have no keys. {LIKE}")
        try:
            rows = in_order(output.batch, chunk.keys)
            self._require_usable(chunk, rows, output.schema)
            refuse_broken_promise(rows, self._node.keeps)
        except DataError as error:
            raise self._make_error(chunk, str(error)) from None
        kept_names = [n for n in rows.names if n not in rows.device or self._is_read(n)]
        owned = in_own_memory(rows.select(kept_names), chunk.inputs.values())
        yield Batch(chunk.keys, owned.records, owned.device)

    def close(self) -> None:
        """Nothing to close."""

    def _is_read(self, name: str) -> bool:
        """Whether a column is read (if unknown: yes); unread ones would fill device memory."""
        return not self._node.returns or name in self._node.returns

    def _require_usable(self, chunk: Chunk, output: Batch, schema: type[Schema]) -> None:
        """Check, once, where rows are created, that declared columns are there, finite and within
        their bounds. Raises KernelError.
        """
        for name in self._node.returns:
            if name not in output.names:
                if name.endswith("/*"):
                    continue
                there_are = ", ".join(output.names)
                problem = f"it returned no column {name!r}; there are: {there_are}"
                raise self._make_error(chunk, problem)
            row = _find_first_not_finite(output, name)
            if row is not None:
                problem = f"column {name!r} has a value that is not finite"
                fix = "a finite number in its place, as a nan spoils all that is computed of it"
                raise self._make_error(chunk, f"{problem}. Fix: {fix}", row)
        outside = find_out_of_bounds(output, schema, self._node.returns)
        if outside is None:
            outside = find_newer_than_inputs(output, chunk.inputs)
        if outside is not None:
            raise self._make_error(chunk, outside.text, outside.row)

    def _make_error(self, chunk: Chunk, why: str, row: int = 0) -> KernelError:
        keys = chunk.keys.rows()
        key = f"row (position, sample, attempt) {keys[row]}" if keys else "no row"
        rows = "a chunk with" if row else f"{len(keys)} rows from"
        return KernelError(
            f"{self._node.name}: operator {self._node.operator!r} failed on {rows} {key}: {why}"
        )


def _find_first_not_finite(output: Batch, name: str) -> int | None:
    """Find the first row with a non-finite value; None if there is none, or the column has no
    floats.
    """
    if name in output.device:
        return first_not_finite(output.tensor(name))
    array = output.array(name)
    is_list = pa.types.is_large_list(array.type)
    elements = array.flatten() if is_list else array
    per_element = 1
    if pa.types.is_fixed_size_list(elements.type):
        per_element = elements.type.list_size
        elements = elements.flatten()
    if not pa.types.is_floating(elements.type):
        return None
    wrong = ~np.isfinite(elements.to_numpy(zero_copy_only=False))
    if elements.null_count:
        # A null is no number; as one it would be nan.
        wrong &= np.asarray(elements.is_valid())
    if not wrong.any():
        return None
    first = int(np.argmax(wrong)) // per_element
    if is_list:
        return int(np.searchsorted(output.offsets(name), first, side="right")) - 1
    return first


class Select:
    """Kernel of `select`: answers with the keys of the rows to keep; no row moves."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Nothing to load."""
        self._session = session
        self._name = node.name

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch without columns: the kept rows' keys."""
        rows = chunk.inputs["where"]
        keep = rows.flat("keep") != 0
        share = float(keep.mean()) if len(keep) else 0.0
        self._session.metric(f"{self._name}/kept", share, float(len(keep)))
        yield rows.select([]).take(keep)

    def close(self) -> None:
        """Nothing to close."""


class HostEvaluate:
    """Kernel of `evaluate`: the mean of each reward function over all rows of the evaluation."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Nothing to load."""
        self._prefix = "eval" if node.name == "evaluate" else f"eval/{node.name}"

    def step(self, assignment: Assignment) -> Mapping[str, float]:
        """`eval/reward`, the mean of the reward that the node reads, and `eval/<function>` for each
        of its functions, over the rows to which it applies; `eval/lost_rows` where some are left
        out, as they failed.

        The first number is the one that `keep_best` uses: the reward as the graph defines it, or
        none if no row has one.
        """
        rows = assignment.inputs["score"]
        functions = [name for name in rows.names if name.startswith("reward/")]
        means = {"reward": _mean(rows.array("reward")), "rows": float(len(rows))}
        if assignment.lost_rows:
            means["lost_rows"] = float(assignment.lost_rows)
        for name in functions:
            metric = _free_name(name.removeprefix("reward/"), means)
            means[metric] = _mean(rows.array(name))
        return {f"{self._prefix}/{name}": mean for name, mean in means.items() if mean is not None}

    def close(self) -> None:
        """Nothing to close."""


def _mean(column: pa.Array) -> float | None:
    """The exactly rounded mean over the rows that have a number; None if no row has."""
    numbers = column.drop_null().to_pylist()
    if not numbers:
        return None
    return math.fsum(numbers) / len(numbers)


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    """The name, or with a number added if taken: a user's function may be named `reward`."""
    if name not in taken:
        return name
    numbered = (f"{name}_{i}" for i in range(2, len(taken) + 3))
    return next(n for n in numbered if n not in taken)
