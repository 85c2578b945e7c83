"""The gradients of a Step's parts add up to those of all rows at once, for every loss, however the
Step is cut into whole groups, and in any order of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.loss import Loss
from operators import losses
from operators.kernels.torch.reduce import AGGREGATES
from operators.kernels.torch.train import TorchTrain
from tests.kit.models import save_critic, save_tiny
from tests.kit.rows import random_rows, with_tokens
from tests.kit.step_parts import (
    cut_step,
    declared_losses,
    find_distance,
    keeping_gradients,
    make_double_session,
    make_loss_of,
    make_step,
    rows_for,
    train_in_parts,
)
from tests.kit.training import (
    CLIPPED,
    OWN,
    SHOWN,
    assert_metrics_alike,
    loss_of,
    opened,
    with_own,
)
from tests.kit.turns import example_count

Open = Callable[..., TorchTrain]
CLOSE = {"float32": 1e-6, "float64": 1e-12}
"""How far gradients may be from those of the Step at once, by the dtype of the weights."""
CUTS = st.lists(st.integers(0, 3), min_size=5, max_size=5)
"""Of each of five groups, which part it is in: in any order, and some parts may have no row."""
SCALAR = ("RANK", "VALUE", "ROW_REGRESSION", "TOKEN_REGRESSION")


@pytest.fixture(scope="module")
def open_as(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens a kernel with weights of a dtype, once; a budget of few tokens makes several
    micro-batches of a part. The weights are small, as of a real model before training: of large
    ones a float32 gradient is itself no nearer than 3e-6 to that in float64.
    """
    folder = tmp_path_factory.mktemp("small weights")
    base = save_tiny(folder / "qwen2", "qwen2", initializer_range=0.05)
    bases = {"lm": base, "scalar": save_critic(folder / "critic", base)}

    @cache
    def open_kernel_of(loss: Loss, dtype: str, head: str, *params: tuple[str, Any]) -> TorchTrain:
        session = make_double_session(bases[head], head) if dtype == "float64" else None
        return opened(bases[head], loss, tokens=40, head=head, session=session, **dict(params))

    return open_kernel_of


def require_same_gradients(kernel: TorchTrain, whole: Any, cut: list[int], dtype: str) -> None:
    with keeping_gradients(kernel) as expected:
        wanted = dict(kernel.step(whole))
    with keeping_gradients(kernel) as summed:
        metrics = train_in_parts(kernel, cut_step(whole, cut))
    assert len(summed) == len(expected) > 0
    assert find_distance(expected, summed) <= CLOSE[dtype]
    assert_metrics_alike(metrics, wanted, 1e-5)
    assert all(weight.grad is None for weight in kernel._module.parameters())


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", sorted(declared_losses()))
def test_parts_have_the_gradient_of_the_step(open_as: Open, name: str, dtype: str) -> None:
    head = "scalar" if name in SCALAR else "lm"
    scope = declared_losses()[name].scope
    kernel = open_as(make_loss_of(name), dtype, head)
    assert (scope == "group") == (name in ("DPO", "TRAJECTORY_BALANCE"))

    @settings(max_examples=example_count(12), deadline=None)
    @given(cut=CUTS, seed=st.integers(0, 5))
    def holds(cut: list[int], seed: int) -> None:
        require_same_gradients(kernel, make_step(name, rows_for(name, seed)), cut, dtype)

    holds()


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("masked_rows", ["skip", "count"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_whatever_a_term_is_divided_by(
    open_as: Open, aggregate: str, masked_rows: str, dtype: str
) -> None:
    params = {"max_tokens": 6, "step_rows": 20, "clip_norm": 0.1}
    params |= {"aggregate": aggregate, "masked_rows": masked_rows}
    kernel = open_as(make_loss_of("CLIPPED_POLICY"), dtype, "lm", *params.items())

    @settings(max_examples=example_count(9), deadline=None)
    @given(cut=CUTS, muted=st.sets(st.integers(0, 14), max_size=9))
    def holds(cut: list[int], muted: set[int]) -> None:
        rows = random_rows(5, 3)
        ids = rows.ragged("completion_ids")
        is_heard = ~np.isin(ids.segments(), list(muted))
        mask = rows.ragged("completion_mask").values * is_heard
        heard = with_tokens(rows, completion_mask=mask.astype(np.uint8))
        require_same_gradients(kernel, make_step("CLIPPED_POLICY", heard), cut, dtype)

    holds()


@pytest.mark.parametrize("dtype", CLOSE)
def test_terms_with_rows_of_their_own_have_sums_of_their_own(open_as: Open, dtype: str) -> None:
    loss = loss_of(losses.CLIPPED_POLICY, label="loss", **CLIPPED) + 0.3 * SHOWN
    loss += 0.01 * loss_of(losses.ENTROPY)
    own_rows = {OWN: {"temperature": 1.0}}
    kernel = open_as(
        loss, dtype, "lm", ("temperature", 0.7), ("own_rows", _CachedParameter(own_rows))
    )

    @settings(max_examples=example_count(12), deadline=None)
    @given(cut=st.lists(st.integers(0, 3), min_size=8, max_size=8), demos=st.integers(1, 4))
    def holds(cut: list[int], demos: int) -> None:
        shown = random_rows(demos, 1, seed=50)
        shown = shown.take(np.arange(demos))
        whole = with_own(make_step("CLIPPED_POLICY", random_rows(5, 3)), shown)
        require_same_gradients(kernel, whole, cut[: max(5, demos)], dtype)

    holds()


class _CachedParameter(dict[str, Any]):
    """A parameter that can be a key of a cache."""

    def __hash__(self) -> int:  # type: ignore[override]
        return 0


def test_narrow_weights_are_summed_in_float32(base: str) -> None:
    """Each row is a micro-batch, and a mean over 16 rows changes no digit of what it computes."""
    params = {"aggregate": "sequence_mean", "masked_rows": "count", "tokens": 1}
    kernel = opened(base, make_loss_of("SUPERVISED"), dtype="bfloat16", **params)
    whole = make_step("SUPERVISED", random_rows(4, 4))
    with keeping_gradients(kernel) as expected:
        kernel.step(whole)
    with keeping_gradients(kernel) as summed:
        train_in_parts(kernel, cut_step(whole, [0, 1, 2, 1]))
    assert {each.dtype for each in summed} == {torch.float32}
    assert 0.0 < find_distance(expected, summed) < 1e-6
