"""Kernels on columns: functions, selection, and the numbers of an evaluation.

Owns: calling a column function with its rows in order, and checking what it returns. Does
not own: any formula (operators/advantage.py, operators/select.py, the user's files).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.batch import Batch
from dataflow.errors import DataError, KernelError
from dataflow.kernel import Assignment, Chunk, KernelNode, Layout, Session
from dataflow.user import Columns


class ColumnFunction:
    """Kernel of every operator that is a function on columns, the user's own among them."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Take the function. It runs in this process."""
        assert node.function is not None
        self._node = node
        self._function = node.function

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch: what the function returns for the chunk's rows. Raises KernelError where it raises or misfits."""
        arguments = [Columns(batch, self._node.schemas[name]) for name, batch in chunk.inputs.items()]
        try:
            made = self._function(*arguments, **self._node.params)
        except DataError as error:
            raise self._failed(chunk, str(error)) from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise self._failed(chunk, traceback.format_exc(limit=-3)) from error
        if not isinstance(made, Columns):
            raise self._failed(chunk, f"expected Columns, found {type(made).__name__}")
        if len(made) != len(chunk.keys):
            raise self._failed(chunk, f"it returned {len(made)} rows for {len(chunk.keys)}")
        self._refuse_unusable(chunk, made.batch)
        yield Batch(chunk.keys, made.batch.records)

    def close(self) -> None:
        """Nothing is held."""

    def _refuse_unusable(self, chunk: Chunk, made: Batch) -> None:
        """Values are checked once, where a row is made: declared columns are there, and finite."""
        for name in self._node.returns:
            if name not in made.names:
                if name.endswith("/*"):
                    continue
                raise self._failed(chunk, f"it returned no column {name!r}; there are: {', '.join(made.names)}")
            array = made.array(name)
            values = array.values if pa.types.is_large_list(array.type) else array
            if pa.types.is_floating(values.type) and not np.isfinite(values.to_numpy(zero_copy_only=False)).all():
                raise self._failed(chunk, f"column {name!r} has a value that is not finite")

    def _failed(self, chunk: Chunk, why: str) -> KernelError:
        first = chunk.keys.rows()[0] if len(chunk.keys) else "none"
        return KernelError(
            f"{self._node.name}: operator {self._node.operator!r} failed on {len(chunk.keys)} rows, the first "
            f"(position, sample, attempt) {first}: {why}"
        )


class Select:
    """Kernel of `select`: answers with the keys that stay; the rows themselves do not move."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Nothing to load."""
        self._session = session
        self._name = node.name

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch without columns: the kept rows' keys."""
        keep = chunk.inputs["where"].flat("keep") != 0
        self._session.metric(f"{self._name}/kept", float(keep.mean()) if len(keep) else 0.0, float(len(keep)))
        yield chunk.inputs["where"].select([]).take(keep)

    def close(self) -> None:
        """Nothing is held."""


class Evaluate:
    """Kernel of `evaluate`: the mean of each reward function over all rows of the evaluation."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Nothing to load."""
        self._prefix = "eval" if node.name == "evaluate" else f"eval/{node.name}"

    def step(self, assignment: Assignment) -> Mapping[str, float]:
        """`eval/reward` and `eval/<function>`; rows to which a function does not apply are left out of its mean."""
        rows = assignment.inputs["score"]
        means: dict[str, Any] = {"reward": pc.mean(rows.array("reward")).as_py()}
        for name in rows.names:
            if name.startswith("reward/"):
                means[name.removeprefix("reward/")] = pc.mean(rows.array(name)).as_py()
        found = {f"{self._prefix}/{name}": float(mean) for name, mean in means.items() if mean is not None}
        return found | {f"{self._prefix}/rows": float(len(rows))}

    def close(self) -> None:
        """Nothing is held."""
