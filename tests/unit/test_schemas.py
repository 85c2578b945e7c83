"""Schemas of several schemas: the columns of all, or a refusal that names both."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from dataflow.batch import Keys, Ragged
from dataflow.errors import GraphError
from dataflow.schema import MESSAGE, Logprobs, Prompt, Reward, Rollout, TokenReward, Values, column
from dataflow.user import Columns


def test_a_schema_of_two_has_the_columns_of_both() -> None:
    class Judged(Rollout, Reward):
        confidence = column(pa.float32())

    assert list(Judged.columns) == [*Rollout.columns, "reward", "confidence"]
    assert Judged.vocabulary
    assert Judged.row == "completion"


def test_a_base_of_two_has_its_columns_once() -> None:
    class Both(PerRow, TokenReward):
        pass

    assert set(Both.columns) == {"reward", "extra", "token_reward"}


def test_rows_of_a_schema_of_two_are_made_with_its_types() -> None:
    class TokenColumns(Values, Logprobs):
        pass

    tokens = Ragged(np.ones(1), np.array([0, 1, 1]))
    like = Columns.make(Reward, reward=[1, 2])
    rows = Columns.make(TokenColumns, like=like, values=tokens, logprobs=tokens)
    types = [str(field.type) for field in rows.batch.records.schema]
    assert types == ["large_list<item: float not null>"] * 2
    assert rows.keys.rows() == Keys.of([0, 1]).rows()


class PerRow(Reward):
    extra = column(pa.float32())


class OnDevice(Reward):
    extra = column(pa.float32(), device=True)


class WithNulls(Reward):
    extra = column(pa.float32(), nullable=True)


def test_two_that_differ_are_refused() -> None:
    """By a row, a turn or a token, and by their type: tests/golden/check/schema_*.txt."""
    message = "has 'extra' on the host, and OnDevice, which it extends, on a device"
    with pytest.raises(GraphError, match=message) as caught:
        type("Both", (PerRow, OnDevice), {})
    assert caught.value.faults[0].where == "schema Both"
    assert caught.value.faults[0].origin is not None


def test_nulls_are_refused_where_readers_expect_none() -> None:
    type("Stricter", (PerRow, WithNulls), {})
    with pytest.raises(GraphError, match="has 'extra' with nulls, and the readers of PerRow"):
        type("Looser", (WithNulls, PerRow), {})


def test_a_column_that_is_declared_anew_keeps_its_form() -> None:
    class Documented(Reward):
        reward = column(pa.float32(), doc="of the jury")

    assert Documented.columns["reward"].doc == "of the jury"


def test_a_prompt_may_be_messages() -> None:
    class Chat(Prompt):
        prompt = column(pa.list_(MESSAGE))

    assert Chat.columns["prompt"].type == pa.list_(MESSAGE)
