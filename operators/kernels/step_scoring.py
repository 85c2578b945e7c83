"""Rewards of an answer's steps: the kernel of `step_reward`.

Owns: giving the function its steps, and putting each number on its token. Does not own: what a
step is (steps.py), calling the function and what follows from a failure (scoring.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.schema import TokenReward
from operators.kernels.overlong import rows_of
from operators.kernels.scoring import FIXES, Function, HostReward, columns_for
from operators.kernels.scoring_child import STEPS
from operators.kernels.steps import AnswerSteps, steps_of
from operators.kernels.text import load_tokenizer


class StepReward(HostReward):
    """Kernel of `step_reward`: see HostReward, for one function.

    params: those of HostReward, and split. models: `tokenizer`, the Model whose directory has it.
    """

    fixes: ClassVar[Mapping[str, str]] = FIXES | {
        "type": "return for each completion a list with one number for each of its steps",
        "length": "one value for each step of each completion; None where it does not apply",
        "value": "one finite number for each step; None where it does not apply",
        "nothing": "a function that applies to a step of every row",
    }

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Load the tokenizer and start the child. Raises KernelError, GraphError or DataError."""
        self._split = node.params["split"]
        self._tokenizer = load_tokenizer(node.models["tokenizer"].base)
        super().open(node, layout, session)

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """One batch with `reward`, `reward/<function>` and `token_reward`; dropped rows are
        tombstoned.
        """
        rows = chunk.inputs["rows"]
        self._ids = rows.ragged("completion_ids")
        mask = rows.ragged("completion_mask")
        self._steps: AnswerSteps = steps_of(self._tokenizer, self._ids, mask, self._split)
        self._on_tokens = np.zeros(len(self._ids.values))
        yield from super().run(chunk)

    def _columns(self, function: Function, rows: Batch) -> pa.RecordBatch:
        """`steps` as well, even if the data has a column of that name."""
        steps = pa.array(self._steps.texts, pa.list_(pa.utf8()))
        records = columns_for(function, rows.with_columns({"steps": steps}))
        return records.replace_schema_metadata((records.schema.metadata or {}) | {STEPS: b"1"})

    def _rewards(self, given: Sequence[float | None], unit: slice) -> np.ndarray:
        """Each row's sum, and its numbers on their tokens; NaN for steps without any number."""
        offsets = self._steps.offsets
        rows = np.arange(len(offsets) - 1)[unit]
        numbers = np.array(given, dtype=np.float64)
        first, last = (offsets[rows[0]], offsets[rows[-1] + 1]) if len(rows) else (0, 0)
        there = ~np.isnan(numbers)
        np.add.at(self._on_tokens, self._steps.token[first:last][there], numbers[there])
        row = np.repeat(np.arange(len(rows)), np.diff(offsets)[rows])
        total = np.bincount(row, weights=np.nan_to_num(numbers), minlength=len(rows))
        some = np.bincount(row, weights=there, minlength=len(rows)) > 0
        return np.where(some | (np.diff(offsets)[rows] == 0), total, np.nan)

    def _batch(self, keys: Keys, values: np.ndarray, kept: np.ndarray) -> Batch:
        tokens = rows_of(self._ids.like(self._on_tokens.astype(np.float32)), np.flatnonzero(kept))
        columns = {**self._numbers(values[kept]), "token_reward": tokens}
        return Batch.make(keys.take(kept), columns, TokenReward)
