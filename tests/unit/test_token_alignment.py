"""Token alignment: a row's token columns have one length where rows are made and joined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.errors import KernelError
from dataflow.schema import Advantage, Logprobs, Reward, Rollout, Schema
from dataflow.token_alignment import find_misaligned
from dataflow.user import Columns, operator
from engine.run.worker.alignment import Alignment
from operators.forward import logprobs
from operators.losses import clipped_policy_loss
from operators.mean_over import mean_over
from operators.reward import reward
from tests.kit.graphs import policy, sampled, trained
from tests.kit.rewards import zero
from tests.kit.turns import example_count


def rows(schema: type[Schema], **lengths: Sequence[int]) -> Batch:
    """Rows with so many zeros in these columns; positions 10, 11, ..."""
    columns, counts = {}, ()
    for name, counts in lengths.items():
        columns[name] = [[0] * count for count in counts]
    return Batch.make(Keys.of(range(10, 10 + len(counts))), columns, schema)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), min_size=1, max_size=5))
@settings(max_examples=example_count(60))
def test_the_first_row_that_differs_is_found(drawn: list[tuple[int, int]]) -> None:
    """drawn: tokens of each row, and how many more its log-probs have."""
    lengths, other = [n for n, _ in drawn], [n + more for n, more in drawn]
    batch = rows(Rollout, prompt_ids=[9] * len(lengths), completion_mask=lengths)
    fault = find_misaligned(
        [("rollout", batch, Rollout), ("old", rows(Logprobs, logprobs=other), Logprobs)]
    )
    if lengths == other:
        assert fault is None
        return
    assert (fault.row, fault.axis) == ([more for _, more in drawn].index(1), "T")
    message = (
        f"expected one value for every completion token, found {lengths[fault.row]} in"
        f" 'rollout.completion_mask' and {other[fault.row]} in 'old.logprobs'"
    )
    assert str(fault) == message


def test_a_slice_of_a_batch_is_compared_by_its_own_rows() -> None:
    whole = rows(Rollout, completion_mask=[1, 2, 3], completion_ids=[1, 2, 3])
    part = Batch(whole.keys.take(np.array([1, 2])), whole.records.slice(1, 2))
    other = rows(Logprobs, logprobs=[2, 3])
    assert find_misaligned([("a", part, Rollout), ("b", other, Logprobs)]) is None


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


rollout = sampled()
advantage = weighed(rollout)
TWO = rows(Rollout, completion_mask=[2, 3])
OTHER = rows(Rollout, completion_mask=[5, 6])


def test_what_a_train_node_reads_is_compared() -> None:
    inputs = {
        "rows": rows(Rollout, completion_ids=[2, 3], completion_mask=[2, 3]),
        "clipped_policy_loss.advantage": rows(Advantage, advantage=[2, 3]),
        "clipped_policy_loss.old": rows(Logprobs, logprobs=[2, 2]),
    }
    keys = Keys.of([10, 11], [0, 3], [0, 1])
    loss = clipped_policy_loss(advantage, old=logprobs(policy, rollout))
    with pytest.raises(KernelError) as caught:
        Alignment(trained(rollout, loss)).require_inputs(keys, inputs)
    assert str(caught.value) == (
        "train_policy: row (position, sample, attempt) (11, 3, 1): expected one value for every"
        " completion token, found 3 in 'rows.completion_ids' and 2 in"
        " 'clipped_policy_loss.old.logprobs'. Fix: columns that were made from the tokens of"
        " this very port."
    )


def test_what_a_function_returns_is_compared_with_what_it_read() -> None:
    guard, inputs = Alignment(advantage.node), {"rollout": TWO}
    guard.require_made(TWO.keys, rows(Advantage, advantage=[2, 3]), inputs)
    with pytest.raises(
        KernelError, match=r"weighed: row \(position, sample, attempt\) \(10, 0, 0\): "
    ):
        guard.require_made(TWO.keys, rows(Advantage, advantage=[1, 3]), inputs)


def test_rows_with_ids_of_their_own_are_compared_among_themselves() -> None:
    guard, inputs = Alignment(revised(rollout).node), {"rollout": TWO}
    alike = rows(Rollout, completion_ids=[1, 1], completion_mask=[1, 1])
    guard.require_made(TWO.keys, alike, inputs)
    unlike = rows(Rollout, completion_ids=[1, 1], completion_mask=[1, 2])
    with pytest.raises(KernelError, match="found 1 in 'completion_ids' and 2 in 'completion_mask'"):
        guard.require_made(TWO.keys, unlike, inputs)


def test_two_texts_of_one_row_may_differ() -> None:
    guard = Alignment(judged(rollout, revised(rollout)).node)
    guard.require_inputs(TWO.keys, {"rollout": TWO, "draft": OTHER})
    draft = rows(Rollout, completion_mask=[5, 6], completion_ids=[5, 5])
    with pytest.raises(KernelError, match=r"6 in 'draft\.completion_mask'"):
        guard.require_inputs(TWO.keys, {"rollout": TWO, "draft": draft})


def test_an_ancestor_has_a_text_of_its_own() -> None:
    guard, inputs = Alignment(since(rollout, revised(rollout)).node), {"later": TWO, "first": OTHER}
    guard.require_inputs(TWO.keys, inputs)
    guard.require_made(TWO.keys, rows(Advantage, advantage=[2, 3]), inputs)


def test_descendants_are_other_rows() -> None:
    guard = Alignment(mean_over(reward(zero, rollout), rollout.node.inputs["prompt"]).node)
    guard.require_inputs(Keys.of([1]), {"reward": rows(Rollout, completion_mask=[1, 2, 3])})
