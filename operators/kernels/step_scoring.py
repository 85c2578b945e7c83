"""Rewards of an answer's steps: the kernel of `step_reward`.

Owns: giving the function its steps, and putting each number on its token. Does not own: what a
step is (steps.py), calling the function and what follows from a failure (scoring.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.schema import TokenReward
from operators.kernels.overlong import take_rows
from operators.kernels.scoring import FIXES, HostReward
from operators.kernels.scoring_columns import Function
from operators.kernels.scoring_keywords import STEPS
from operators.kernels.steps import AnswerSteps, find_steps
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
        self._steps: AnswerSteps = find_steps(self._tokenizer, self._ids, mask, self._split)
        self._token_rewards = np.zeros(len(self._ids.values))
        yield from super().run(chunk)

    def _columns(self, function: Function, rows: Batch) -> pa.RecordBatch:
        """`steps` as well, even if the data has a column of that name."""
        steps = pa.array(self._steps.texts, pa.list_(pa.utf8()))
        records = super()._columns(function, rows.with_columns({"steps": steps}))
        metadata = records.schema.metadata or {}
        return records.replace_schema_metadata(metadata | {STEPS: b"1"})

    def _rewards(self, numbers: Sequence[float | None], unit: slice) -> np.ndarray:
        """Each row's sum of its steps' numbers, NaN where it has steps and no number; also adds the
        numbers to their tokens.
        """
        offsets = self._steps.offsets
        rows = np.arange(len(offsets) - 1)[unit]
        step_counts = np.diff(offsets)[rows]
        rewards = np.array(numbers, dtype=np.float64)  # None becomes NaN
        applies = ~np.isnan(rewards)
        if len(rows):
            start, stop = offsets[rows[0]], offsets[rows[-1] + 1]
            tokens = self._steps.token[start:stop]
            np.add.at(self._token_rewards, tokens[applies], rewards[applies])
        row = np.repeat(np.arange(len(rows)), step_counts)
        total = np.bincount(row, weights=np.nan_to_num(rewards), minlength=len(rows))
        has_number = np.bincount(row, weights=applies, minlength=len(rows)) > 0
        return np.where(has_number | (step_counts == 0), total, np.nan)

    def _batch(self, keys: Keys, rewards: np.ndarray, is_kept: np.ndarray) -> Batch:
        all_tokens = self._ids.like(self._token_rewards.astype(np.float32))
        columns: dict[str, Any] = self._reward_columns(rewards[is_kept])
        columns["token_reward"] = take_rows(all_tokens, np.flatnonzero(is_kept))
        return Batch.make(keys.take(is_kept), columns, TokenReward)
