"""What a function on columns returns: rows go where their keys say, groups stay as declared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.check import check
from dataflow.errors import DataError, GraphError, KernelError
from dataflow.graph import Graph
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.ragged import Ragged
from dataflow.schema import Keep, Preference, Reward, Rollout
from dataflow.user import Columns, operator
from operators.kernels.bounds import find_out_of_bounds
from operators.kernels.host import ColumnFunction
from operators.kernels.return_checks import in_order, refuse_broken_promise
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.select import select
from tests.kit.graphs import compared, graph_of, sampled, scored
from tests.kit.kernels import FakeSession
from tests.kit.plans import headers
from tests.kit.rewards import exact


def keys() -> Keys:
    """Of two groups of three."""
    return Keys.of([7, 7, 7, 8, 8, 8], [0, 1, 2] * 2)


def rewards(of: Keys) -> Batch:
    """Rows whose reward says which row they are."""
    return Batch.make(of, {"reward": of.position * 10.0 + of.sample}, Reward)


def called(function: Callable[..., Any], given: Batch, keeps: str | None = None) -> Batch:
    """What the kernel of user operators makes of a function's answer."""
    kernel, own = ColumnFunction(), {"function": function, "schemas": {"score": Reward}}
    kernel.open(KernelNode(name="mine", operator="mine", keeps=keeps, **own), Layout(), None)  # type: ignore[arg-type]
    (batch,) = kernel.run(Chunk(id=1, step=0, keys=given.keys, inputs={"score": given}))
    return batch


def taken(rows: Sequence[int]) -> Callable[[Columns[Reward]], Columns[Reward]]:
    """A function that returns these of its rows."""
    return lambda score: Columns(score.batch.take(np.array(rows)), Reward)


@given(st.permutations(range(6)))
def test_rows_in_another_order_go_where_their_keys_say(order: list[int]) -> None:
    chunk = rewards(keys())
    batch = called(taken(order), chunk)
    assert batch.keys.rows() == chunk.keys.rows()
    assert batch.flat("reward").tolist() == chunk.flat("reward").tolist()


def test_rows_in_their_order_are_not_copied() -> None:
    batch = rewards(keys())
    assert in_order(batch, keys()) is batch


def test_an_array_that_is_filled_again_changes_no_rows_that_were_returned_before() -> None:
    reused = np.zeros(6, np.float32)

    def doubled(score: Columns[Reward]) -> Columns[Reward]:
        np.multiply(score["reward"], 2.0, out=reused[: len(score)])
        return score.set(reward=reused[: len(score)])

    first = called(doubled, rewards(keys()))
    called(doubled, rewards(Keys.of([900, 901])))
    assert first.flat("reward").tolist() == [140, 142, 144, 160, 162, 164]


def test_columns_of_the_inputs_are_handed_on_without_a_copy() -> None:
    given = rewards(keys())
    batch = called(lambda score: score.set(mine=score["reward"] + 1), given)
    address = [b.array("reward").buffers()[1].address for b in (given, batch)]
    assert address[0] == address[1]


def edited(**columns: Any) -> Callable[..., Columns[Rollout]]:
    """An operator that returns its rows with one column changed: a value for each token."""

    def edit(rollout: Columns[Rollout]) -> Columns[Rollout]:
        mask = rollout["completion_mask"]
        return rollout.set(**{name: mask.like(np.array(v)) for name, v in columns.items()})

    return edit


def rollouts() -> Batch:
    """Two rows of two tokens each, of the versions 3 and 4."""
    offsets = np.array([0, 2, 4])
    tokens = {
        "completion_mask": np.ones(4, np.uint8),
        "completion_ids": np.arange(4, dtype=np.int32),
        "sampler_logprobs": np.full(4, -1.0, np.float32),
        "version": np.array([3, 3, 4, 4], np.int32),
    }
    columns = {name: Ragged(values, offsets) for name, values in tokens.items()}
    return Batch.make(Keys.of([7, 8]), columns, Rollout)


@pytest.mark.parametrize(("column", "values", "problem"), [
    ("completion_mask", [1, 1, 1, 2], ": expected 0 to 1, found 2 at token 1"),
    ("completion_ids", [1, 1, -1, 2], ": expected at least 0, found -1 at token 0"),
    ("sampler_logprobs", [-1, -1, 0.5, -1], ": expected at most 0, found 0.5 at token 0"),
    ("sampler_logprobs", [-1, -1, np.nan, -1], " has a value that is not finite. Fix: a finite"),
    ("version", [3, 3, 4, 9], ": expected at most 4, the newest version of its inputs, found 9 at"),
    ("version", [3, 3, -2, 4], ": expected at least 0, found -2 at token 0"),
])  # fmt: skip
def test_values_that_no_such_column_can_have_are_refused_by_row(
    column: str, values: list[float], problem: str
) -> None:
    kernel = ColumnFunction()
    own = {"function": edited(**{column: values}), "schemas": {"rollout": Rollout}}
    rows = rollouts()
    node = KernelNode(name="mine", operator="edit", returns=tuple(rows.names), **own)
    kernel.open(node, Layout(), FakeSession())
    with pytest.raises(KernelError) as caught:
        list(kernel.run(Chunk(id=1, step=0, keys=rows.keys, inputs={"rollout": rows})))
    message = str(caught.value)
    assert f"column {column!r}{problem}" in message
    assert "row (position, sample, attempt) (8, 0, 0)" in message


def test_log_probs_may_be_above_zero_by_what_rounding_makes() -> None:
    made = edited(sampler_logprobs=[-1, 5e-4, -1, -1])(Columns(rollouts(), Rollout))
    assert find_out_of_bounds(made.batch, Rollout, ["sampler_logprobs"]) is None


@pytest.mark.parametrize(("rows", "found"), [
    ([0, 1, 2, 3, 4], "it returned 5 rows for 6"),
    ([0, 1, 2, 3, 4, 4], r"found the row \(position, sample, attempt\) \(8, 1, 0\) twice"),
])  # fmt: skip
def test_rows_that_are_not_those_that_were_given_are_refused(rows: list[int], found: str) -> None:
    told = rf"mine: operator 'mine' failed .*{found}.* Fix: Columns.make\(\.\.\., like="
    with pytest.raises(KernelError, match=told):
        called(taken(rows), rewards(keys()))


def test_a_row_of_another_attempt_is_none_that_was_given() -> None:
    of = keys()
    again = Keys(of.position, of.sample, of.attempt + 1)
    told = r"found a row \(position, sample, attempt\) \(7, 0, 1\), which it was not given"
    with pytest.raises(KernelError, match=told):
        called(lambda score: Columns(rewards(again), Reward), rewards(of))


@pytest.mark.parametrize("function", [
    lambda score: Columns.make(Reward, reward=score["reward"] + 1),
    lambda score: Columns.make(Reward, reward=[1.0] * 3).set(reward=[2.0] * 3),
], ids=["made", "made and changed"])  # fmt: skip
def test_rows_without_keys_are_refused_whatever_they_look_like(
    function: Callable[..., Any],
) -> None:
    with pytest.raises(KernelError, match=r"the rows that it returned have no keys\. Fix: "):
        called(function, rewards(Keys.of([0, 1, 2])))


def kept(keep: list[int], sign: list[int] | None = None) -> Batch:
    columns = {"keep": keep} if sign is None else {"keep": keep, "sign": sign}
    return Batch.make(keys(), columns, Keep if sign is None else Preference)


def test_part_of_a_group_is_refused_where_whole_ones_were_declared() -> None:
    part = kept([1, 1, 1, 1, 0, 1])
    message = r"keeps='groups'.* found 2 of the 3 rows of the group at position 8, attempt 0"
    with pytest.raises(DataError, match=message):
        refuse_broken_promise(part, "groups")
    refuse_broken_promise(part, "rows")
    refuse_broken_promise(part, None)
    refuse_broken_promise(kept([1, 1, 1, 0, 0, 0]), "groups")


def test_a_pair_is_two_rows_or_none() -> None:
    refuse_broken_promise(kept([1, 0, 1, 0, 0, 0], [1, 0, -1, 1, 1, 1]), "pairs")
    told = r"two rows kept of each group, or none, found 3 of the 3 rows .* position 8"
    with pytest.raises(DataError, match=told):
        refuse_broken_promise(kept([1, 0, 1, 1, 1, 1], [1, 0, -1, 1, -1, 1]), "pairs")
    with pytest.raises(DataError, match=r"found 1 of the 3 rows .* position 7"):
        refuse_broken_promise(kept([1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]), "pairs")


@pytest.mark.parametrize("signs", [[1, 1], [-1, -1], [0, 1], [2, -1]])
def test_a_pair_has_one_chosen_and_one_rejected_row(signs: list[int]) -> None:
    rows = kept([1, 1, 0, 1, 0, 1], [1, -1, 0, signs[0], 9, signs[1]])
    with pytest.raises(DataError, match=f"found {signs[0]}, {signs[1]} in the group at position 8"):
        refuse_broken_promise(rows, "pairs")


def test_the_node_that_breaks_its_promise_is_named() -> None:
    def greedy(score: Columns[Reward]) -> Columns[Preference]:
        return Columns.make(Preference, like=score, keep=[1] * len(score), sign=[1] * len(score))

    declared = operator(scope="group")(greedy).operator
    assert declared.keeps == "pairs", "what a Preference means"
    told = r"mine: operator 'mine' failed .* found 3 of the 3 rows of the group at position 7"
    with pytest.raises(KernelError, match=told):
        called(greedy, rewards(keys()), declared.keeps)


def easy(score: Columns[Reward]) -> Columns[Keep]:
    return Columns.make(Keep, like=score, keep=(score["reward"] > 0).astype(np.uint8))


def baseline_after(keeps: Any) -> Graph:
    rollout = sampled(n=4)
    mine = operator(scope="group", keeps=keeps)(easy)
    left = select(rollout, where=mine(scored(rollout)), refill=True)
    return graph_of(left, clipped_policy_loss(compared(left, reward(exact, left, name="again"))))


def test_declared_whole_groups_are_not_ragged() -> None:
    check(baseline_after("groups"), headers)
    with pytest.raises(GraphError, match="groups may have lost rows"):
        check(baseline_after(None), headers)
