"""Token alignment: all token columns of a row have one length, where rows are made and where they
are joined.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.aligned import misaligned
from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import KernelError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.schema import Advantage, Logprobs, Reward, Rollout, Schema
from dataflow.user import Columns, operator
from engine.worker.alignment import Alignment
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.mean_over import mean_over
from operators.reward import reward
from operators.train import train

KINDS = {"completion_mask": np.uint8, "completion_ids": np.int32, "prompt_ids": np.int32}


def rows(schema: type[Schema], **lengths: Sequence[int]) -> Batch:
    """Rows with so many zeros in these columns; positions 10, 11, ..."""
    made = {}
    for name, counts in lengths.items():
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        made[name] = Ragged(np.zeros(int(offsets[-1]), KINDS.get(name, np.float32)), offsets)
    count = len(next(iter(lengths.values())))
    return Batch.make(Keys.of(range(10, 10 + count)), made, schema)


LENGTHS = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@given(LENGTHS, st.data())
@settings(max_examples=60, deadline=None)
def test_the_first_row_that_differs_is_found(lengths: list[int], data: st.DataObject) -> None:
    other = [data.draw(st.integers(n, n + data.draw(st.integers(0, 1)))) for n in lengths]
    ports = [
        ("rollout", rows(Rollout, prompt_ids=[9] * len(lengths), completion_mask=lengths), Rollout),
        ("old", rows(Logprobs, logprobs=other), Logprobs),
    ]
    found = misaligned(ports)
    differ = [i for i, (a, b) in enumerate(zip(lengths, other, strict=True)) if a != b]
    if not differ:
        assert found is None
        return
    assert found is not None
    assert (found.row, found.axis) == (differ[0], "T")
    at = differ[0]
    assert (
        str(found) == f"expected one value for every completion token, found {lengths[at]} in"
        f" 'rollout.completion_mask' and {other[at]} in 'old.logprobs'"
    )


def test_a_slice_of_a_batch_is_compared_by_its_own_rows() -> None:
    whole = rows(Rollout, completion_mask=[1, 2, 3], completion_ids=[1, 2, 3])
    part = Batch(whole.keys.take(np.array([1, 2])), whole.records.slice(1, 2))
    assert (
        misaligned([("a", part, Rollout), ("b", rows(Logprobs, logprobs=[2, 3]), Logprobs)]) is None
    )


def zero(completions: Sequence[str], **given_: object) -> list[float]:
    return [0.0 for _ in completions]


@operator()
def judged(rollout: Columns[Rollout], draft: Columns[Rollout]) -> Columns[Reward]:
    return Columns.make(Reward, like=rollout, reward=[0.0] * len(rollout))


@operator()
def revised(rollout: Columns[Rollout]) -> Columns[Rollout]:
    return rollout


@operator()
def weighed(rollout: Columns[Rollout]) -> Columns[Advantage]:
    return Columns.make(Advantage, like=rollout, advantage=rollout["completion_mask"])


@operator(parent="first")
def since(later: Columns[Rollout], first: Columns[Rollout]) -> Columns[Advantage]:
    return Columns.make(Advantage, like=later, advantage=later["completion_mask"])


policy = Model("policy", "base", trainable=True)
rollout = generate(policy, prompts("data", batch=2), n=2, max_tokens=4, name="rollout")
advantage = weighed(rollout)
trained = train(
    policy, rollout, loss=clipped_policy_loss(advantage, old=logprobs(policy, rollout)), lr=1e-3
)


def test_what_a_train_node_reads_is_compared() -> None:
    inputs = {
        "rows": rows(Rollout, completion_ids=[2, 3], completion_mask=[2, 3]),
        "clipped_policy_loss.advantage": rows(Advantage, advantage=[2, 3]),
        "clipped_policy_loss.old": rows(Logprobs, logprobs=[2, 2]),
    }
    keys = Keys.of([10, 11], [0, 3], [0, 1])
    with pytest.raises(KernelError) as caught:
        Alignment(Graph("g", trained).node("train_policy")).require_inputs(keys, inputs)
    assert (
        str(caught.value)
        == "train_policy: row (position, sample, attempt) (11, 3, 1): expected one value for every"
        " completion token, found 3 in 'rows.completion_ids' and 2 in"
        " 'clipped_policy_loss.old.logprobs'. Fix: columns that were made from the tokens of"
        " this very port."
    )


def test_what_a_function_returns_is_compared_with_what_it_read() -> None:
    guard, read = Alignment(advantage.node), rows(Rollout, completion_mask=[2, 3])
    guard.require_made(read.keys, rows(Advantage, advantage=[2, 3]), {"rollout": read})
    with pytest.raises(
        KernelError, match=r"weighed: row \(position, sample, attempt\) \(10, 0, 0\): "
    ):
        guard.require_made(read.keys, rows(Advantage, advantage=[1, 3]), {"rollout": read})


def test_rows_with_ids_of_their_own_are_compared_among_themselves() -> None:
    guard, read = Alignment(revised(rollout).node), rows(Rollout, completion_mask=[2, 3])
    guard.require_made(
        read.keys, rows(Rollout, completion_ids=[1, 1], completion_mask=[1, 1]), {"rollout": read}
    )
    with pytest.raises(KernelError, match="found 1 in 'completion_ids' and 2 in 'completion_mask'"):
        guard.require_made(
            read.keys,
            rows(Rollout, completion_ids=[1, 1], completion_mask=[1, 2]),
            {"rollout": read},
        )


def test_two_texts_of_one_row_may_differ() -> None:
    node = judged(rollout, revised(rollout)).node
    inputs = {
        "rollout": rows(Rollout, completion_mask=[2, 3]),
        "draft": rows(Rollout, completion_mask=[5, 6]),
    }
    Alignment(node).require_inputs(inputs["rollout"].keys, inputs)
    inputs["draft"] = rows(Rollout, completion_mask=[5, 6], completion_ids=[5, 5])
    with pytest.raises(KernelError, match=r"6 in 'draft\.completion_mask'"):
        Alignment(node).require_inputs(inputs["rollout"].keys, inputs)


def test_an_ancestor_has_a_text_of_its_own() -> None:
    inputs = {
        "later": rows(Rollout, completion_mask=[2, 3]),
        "first": rows(Rollout, completion_mask=[5, 6]),
    }
    guard = Alignment(since(rollout, revised(rollout)).node)
    guard.require_inputs(inputs["later"].keys, inputs)
    guard.require_made(inputs["later"].keys, rows(Advantage, advantage=[2, 3]), inputs)


def test_descendants_are_other_rows() -> None:
    guard = Alignment(mean_over(reward(zero, rollout), rollout.node.inputs["prompt"]).node)
    guard.require_inputs(Keys.of([1]), {"reward": rows(Rollout, completion_mask=[1, 2, 3])})
