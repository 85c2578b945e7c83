"""Advantages within a group, against exact fractions: every baseline, scale and dialect.

The reference knows groups as lists of numbers and nothing of columns; only its square roots are
floats.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar, get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys, Ragged
from dataflow.check import check
from dataflow.convention import DIALECTS
from dataflow.errors import DataError
from dataflow.graph import Graph
from dataflow.schema import Completion, Reward, Schema
from dataflow.user import Columns
from operators import advantage_formulas as formulas
from operators.advantage import Baseline, Scale, group_advantage, whiten
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train
from tests.kit.plans import headers
from tests.kit.rewards import exact
from tests.right_graphs import policy, sampled

S = TypeVar("S", bound=Schema)
Groups = Sequence[Sequence[float]]
WAYS = [(b, s) for b in get_args(Baseline) for s in get_args(Scale)]
EPSILON = {"trl": 1e-4, "verl": 1e-6, "openrlhf": 1e-9, "nemo_rl": 1e-6}


def deviation(values: Sequence[Fraction]) -> float:
    """Unbiased; 0 of fewer than two."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


def expected(
    rewards: Sequence[float], tokens: Sequence[int], i: int, baseline: str, scale: str, peer: str
) -> float:
    """The advantage of row i of a group."""
    exactly = [Fraction(r) for r in rewards]
    own, others = exactly[i], exactly[:i] + exactly[i + 1 :]
    mean, lone = sum(exactly) / len(exactly), not others
    compared = {
        "mean": mean,
        "leave_one_out": sum(others) / max(len(others), 1),
        "length_weighted": sum(map(Fraction.__mul__, exactly, map(Fraction, tokens)))
        / max(sum(tokens), 1),
        "none": Fraction(0),
    }[baseline]
    if lone and (baseline, scale) != ("none", "none"):
        compared = Fraction(0) if peer == "verl" else own
    centred = own - compared
    if scale == "none":
        return float(centred)
    if scale == "mean":
        return float(centred / mean) if mean else 0.0
    spread = deviation(exactly if scale == "std" else others)
    if lone and peer == "verl" and scale == "std":
        spread = 1.0
    undivided = spread == 0 and (scale == "leave_one_out_std" or peer == "nemo_rl")
    epsilon = EPSILON[peer] if scale == "std" else EPSILON["nemo_rl"]
    return float(centred) if undivided else float(centred) / (spread + epsilon)


def columns(
    schema: type[S], keys: Keys, masks: Sequence[Sequence[int]] = (), **given: np.ndarray
) -> Columns[S]:
    whole: dict[str, object] = dict(given)
    if masks:
        offsets = np.concatenate([[0], np.cumsum([len(m) for m in masks])]).astype(np.int64)
        flat = np.array(list(itertools.chain(*masks)), np.uint8)
        whole["completion_mask"] = Ragged(flat, offsets)
    return Columns(Batch.make(keys, whole, schema), schema)


def found(
    rewards: Sequence[float],
    labels: Sequence[int],
    masks: Sequence[Sequence[int]],
    baseline: str,
    scale: str,
    dialect: str,
) -> list[list[float]]:
    """The operator's advantages by row, whose group is the one of its label."""
    keys = Keys.of(labels, [list(labels[:i]).count(g) for i, g in enumerate(labels)])
    rollout = columns(Completion, keys, masks)
    score = columns(Reward, keys, reward=np.array(rewards, np.float32))
    made = formulas.group_advantage(
        rollout, score, baseline=baseline, scale=scale, ragged=True, dialect=dialect
    )["advantage"]
    return [row.tolist() for row in np.split(made.values, made.offsets[1:-1])]


ordinary = st.floats(-10, 10, width=32)
extreme = st.sampled_from([0.0, 1.0, -1.0, 0.1, 1e9, -1e9, 1e28, 1e-30, 1e-7, 3e-5])
masks = st.lists(st.integers(0, 1), min_size=1, max_size=4)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Groups, Sequence[Sequence[Sequence[int]]]]:
    """Rewards and masks by group; float32, ragged, groups of one and groups that all agree."""
    one = draw(st.sampled_from([ordinary, extreme, st.one_of(ordinary, extreme)]))
    groups = draw(st.lists(st.lists(one, min_size=1, max_size=6), min_size=1, max_size=4))
    same = draw(st.booleans())
    groups = [[group[0]] * len(group) if same else group for group in groups]
    exactly = [[float(np.float32(r)) for r in group] for group in groups]
    return exactly, [[draw(masks) for _ in group] for group in exactly]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("baseline", "scale"), WAYS)
@settings(max_examples=8, deadline=None)
@given(batch=batches())
@example(batch=([[1e6, 0.1, 0.2, 0.25]], [[[1], [1], [1], [1]]]))  # the others, beside one far off
@example(batch=([[1e9] * 3, [0.1] * 3], [[[1]] * 3, [[1]] * 3]))
@example(batch=([[0.0, -1.0, 1e-30]], [[[0], [1], [0]]]))
def test_every_way_is_its_formula(
    dialect: str, baseline: str, scale: str, batch: tuple[Groups, Sequence[Sequence[Sequence[int]]]]
) -> None:
    groups, written = batch
    groups = [[float(np.float32(abs(r) if scale == "mean" else r)) for r in g] for g in groups]
    rows = [(g, i) for g, group in enumerate(groups) for i in range(len(group))]
    wanted = [
        expected(groups[g], [sum(m) for m in written[g]], i, baseline, scale, dialect)
        for g, i in rows
    ]
    got = found(
        [groups[g][i] for g, i in rows],
        [5 * g + 3 for g, _ in rows],
        [written[g][i] for g, i in rows],
        baseline,
        scale,
        dialect,
    )
    for (g, i), row, number in zip(rows, got, wanted, strict=True):
        close = pytest.approx(number, rel=1e-6, abs=1e-6)
        assert row == [close if m else 0.0 for m in written[g][i]]


@pytest.mark.parametrize(("baseline", "scale"), WAYS)
@settings(max_examples=10, deadline=None)
@given(batch=batches(), order=st.randoms(use_true_random=False), labels=st.permutations(range(9)))
def test_neither_the_order_of_rows_nor_the_names_of_groups_matter(
    baseline: str,
    scale: str,
    batch: tuple[Groups, Sequence[Sequence[Sequence[int]]]],
    order: object,
    labels: list[int],
) -> None:
    groups, written = batch
    rows = [(g, i) for g, group in enumerate(groups) for i in range(len(group))]
    moved = list(rows)
    order.shuffle(moved)  # type: ignore[attr-defined]

    def by_row(rows: list[tuple[int, int]], names: Sequence[int]) -> dict[tuple[int, int], object]:
        got = found(
            [abs(groups[g][i]) for g, i in rows],
            [names[g] for g, _ in rows],
            [written[g][i] for g, i in rows],
            baseline,
            scale,
            "openrlhf",
        )
        return dict(zip(rows, got, strict=True))

    here, there = by_row(rows, range(9)), by_row(moved, labels)
    for row in rows:
        assert there[row] == pytest.approx(here[row], rel=1e-6, abs=1e-6)


def one_group(
    baseline: str,
    scale: str,
    rewards: Sequence[float],
    *,
    dialect: str = "trl",
    tokens: Sequence[int] = (),
) -> list[float]:
    written = [[1] * n for n in tokens or [1] * len(rewards)]
    return [row[0] for row in found(rewards, [0] * len(rewards), written, baseline, scale, dialect)]


def test_maximum_likelihood_divides_by_the_share_that_succeeded() -> None:
    """One of four: (1 - 1/4) / (1/4) = 3, and -1 for the others."""
    assert one_group("mean", "mean", [1, 0, 0, 0]) == [3.0, -1.0, -1.0, -1.0]
    assert one_group("mean", "mean", [1, 1, 1, 1]) == [0.0] * 4
    assert one_group("mean", "mean", [0, 0, 0, 0]) == [0.0] * 4


def test_a_scale_by_the_mean_refuses_what_would_turn_its_sign() -> None:
    told = (
        r"expected rewards >= 0 for scale='mean', found -0.5 in row \(position, sample, attempt\)"
        r" \(0, 1, 0\)\. Fix: a reward from 0 on, or scale='std'\."
    )
    with pytest.raises(DataError, match=told):
        one_group("mean", "mean", [1, -0.5, 0])


def test_a_length_weighted_baseline_by_hand() -> None:
    """(1*2 + 0*6) / 8 = 0.25."""
    assert one_group("length_weighted", "none", [1, 0], tokens=[2, 6]) == [0.75, -0.25]
    assert one_group("length_weighted", "none", [1, 0], tokens=[3, 3]) == [0.5, -0.5]


def test_the_deviation_of_the_others_by_hand() -> None:
    """Of [3, 0, 1, 2]: without 3 the deviation is 1; without 0 too; epsilon is nemo_rl's."""
    first, second, *_ = one_group("leave_one_out", "leave_one_out_std", [3, 0, 1, 2])
    assert first == pytest.approx((3 - 1) / (1 + 1e-6), rel=1e-7)
    assert second == pytest.approx((0 - 2) / (1 + 1e-6), rel=1e-7)


def test_where_the_others_agree_or_are_one_nothing_is_divided() -> None:
    assert one_group("leave_one_out", "leave_one_out_std", [1, 0, 0, 0])[0] == 1.0
    assert one_group("leave_one_out", "leave_one_out_std", [1, 0]) == [1.0, -1.0]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_huge_rewards_that_agree_have_no_advantage(dialect: str) -> None:
    for scale in ("std", "leave_one_out_std", "mean", "none"):
        assert one_group("mean", scale, [123456792.0] * 7, dialect=dialect) == [0.0] * 7


def test_a_whitened_advantage_of_undivided_groups_is_normalised_once() -> None:
    """REINFORCE++-baseline: the group's mean, then the Step's deviation."""
    rollout = sampled()
    advantage = group_advantage(rollout, reward(exact, rollout), scale="none")
    loss = clipped_policy_loss(whiten(advantage, rollout))
    sink = train(policy, rollout, loss=loss, lr=1e-6)
    assert not check(Graph("reinforce_pp_baseline", sink), headers).warnings
