"""Packing: every prefix once, which tokens see which, and micro-batches under their budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.errors import DataError
from operators.kernels.torch import packing
from operators.kernels.torch.attention_kind import AttentionKind
from operators.kernels.torch.shared_attention import TreePass, cut_evenly, cut_long_branches
from tests.kit.rows import ragged
from tests.kit.turns import example_count

Row = tuple[list[int], list[int]]
TOKEN = st.integers(0, 2)
ROWS = st.lists(
    st.tuples(st.lists(TOKEN, min_size=1, max_size=4), st.lists(TOKEN, max_size=4)),
    min_size=1,
    max_size=7,
)


def pack_all(rows: list[Row], *, whole: bool = False) -> packing.Packed:
    prompts, answers = ragged([p for p, _ in rows]), ragged([a for _, a in rows])
    return packing.pack(prompts, answers, np.arange(len(rows)), whole=whole)


@settings(max_examples=example_count(60))
@given(rows=ROWS, whole=st.booleans())
def test_every_prefix_is_fed_once_and_every_row_finds_its_own_path(
    rows: list[Row], whole: bool
) -> None:
    packed = pack_all(rows, whole=whole)
    fed = [prompt + (answer if whole else answer[:-1]) for prompt, answer in rows]
    prefixes = {tuple(row[: k + 1]) for row in fed for k in range(len(row))}
    assert len(packed.ids) == len(prefixes)
    for i, row in enumerate(fed):
        path = packed.path[i, : len(row)]
        assert packed.ids[path].tolist() == row
        assert packed.positions[path].tolist() == list(range(len(row)))
        assert [j for j in range(len(packed.ids)) if j <= path[-1] < packed.end[j]] == path.tolist()
        assert packed.last[i] == path[-1]
    assert packed.path[packed.owner, packed.positions].tolist() == list(range(len(packed.ids)))


@settings(max_examples=30)
@given(rows=ROWS)
def test_each_completion_token_is_predicted_from_the_token_before_it(rows: list[Row]) -> None:
    packed = pack_all(rows)
    wanted = [
        (row, packed.path[row, len(prompt) + place - 1])
        for row, (prompt, answer) in enumerate(rows)
        for place in range(len(answer))
    ]
    assert list(zip(packed.row, packed.source, strict=True)) == wanted
    assert packed.tokens.tolist() == list(range(len(wanted)))


def test_a_row_without_a_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="row 1: expected a prompt"):
        pack_all([([1], [2]), ([], [3])])


def require_tree_attention(
    packed: packing.Packed,
    block: int | None,
    seed: int,
    *,
    window: int | None = None,
    capped: bool = False,
) -> Any:
    """Attention in blocks is plain attention under the tree's mask, gradients included."""
    count = len(packed.ids)
    make = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(count, heads, 8, generator=make).requires_grad_() for heads in (4, 2, 2)
    )
    tree = TreePass(packed, block=None if block is None else min(block, count))
    sinks = torch.randn(4, generator=make).requires_grad_()
    more: dict[str, Any] = {"softcap": 0.8, "sinks": sinks} if capped else {}
    attended = tree.attend(0, query, key, value, AttentionKind(scaling=0.3, window=window, **more))
    at, end = torch.arange(count), torch.from_numpy(packed.end)
    mask = (at[None] <= at[:, None]) & (at[:, None] < end[None])
    scores = torch.einsum("ihd,jhd->hij", query, key.repeat_interleave(2, 1)) * 0.3
    if window is not None:
        depth = torch.from_numpy(packed.positions)
        mask &= depth[:, None] - depth[None] < window
    if capped:
        scores = 0.8 * torch.tanh(scores / 0.8)
        mask = torch.cat([mask, mask.new_ones(count, 1)], 1)
        scores = torch.cat([scores, sinks.view(4, 1, 1).expand(-1, count, -1)], 2)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)[..., :count]
    wanted = torch.einsum("hij,jhd->ihd", weights, value.repeat_interleave(2, 1))
    assert torch.allclose(attended, wanted, atol=1e-5)
    upstream = torch.randn(wanted.shape, generator=make)
    inputs = (query, key, value, sinks) if capped else (query, key, value)
    ours, plain = (torch.autograd.grad(out, inputs, upstream) for out in (attended, wanted))
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(ours, plain, strict=True))
    return tree._blocks[window]


@settings(max_examples=example_count(40))
@given(
    rows=ROWS,
    block=st.integers(1, 9),
    seed=st.integers(0, 9),
    window=st.sampled_from([None, 1, 2, 3, 5, 9]),
    capped=st.booleans(),
)
def test_attention_in_blocks_is_plain_attention_with_windows_caps_and_sinks_too(
    rows: list[Row], block: int, seed: int, window: int | None, capped: bool
) -> None:
    require_tree_attention(pack_all(rows, whole=True), block, seed, window=window, capped=capped)


@pytest.mark.parametrize("block", [8, 24])
def test_attention_over_rows_of_very_different_length(block: int) -> None:
    draw = np.random.default_rng(0)
    answers = [draw.integers(0, 9, n).tolist() for n in (400, 3, 250, 60, 5, 120)]
    packed = pack_all(list(zip([[1, 2, 3]] * 3 + [[1, 4, 4]] * 3, answers, strict=True)))
    assert len(require_tree_attention(packed, block, 0)._buckets) > 2


@pytest.mark.parametrize("window", [None, 1, 30, 150])
@pytest.mark.parametrize("capped", [False, True])
def test_blocks_begin_where_a_long_row_leaves_the_others(window: int | None, capped: bool) -> None:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 2, 60).tolist() for _ in range(3)]
    rows = [(prompt, draw.integers(0, 2, 150).tolist()) for prompt in prompts for _ in range(4)]
    packed = pack_all(rows)
    blocks = require_tree_attention(packed, None, 0, window=window, capped=capped)
    branches = np.flatnonzero(np.diff(packed.owner)) + 1
    even = cut_evenly(len(packed.ids), blocks.block)
    cut = cut_long_branches(packed, even)
    assert cut.by_branch
    assert set(branches) <= set(cut.first.tolist())
    assert int(cut.size.sum()) == len(packed.ids)


def test_short_rows_are_cut_regardless_of_rows() -> None:
    packed = pack_all([([1, 2, 3], [answer] * 20) for answer in range(8)])
    even = cut_evenly(len(packed.ids), 40)
    assert cut_long_branches(packed, even) is even


@settings(max_examples=example_count(60))
@given(sizes=st.lists(st.integers(1, 30), max_size=40), capacity=st.integers(5, 40))
def test_bins_hold_everything_once_within_capacity(sizes: list[int], capacity: int) -> None:
    bins = packing.first_fit_decreasing(sizes, capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    for b in bins:
        assert sum(sizes[i] for i in b) <= capacity or len(b) == 1


def test_bins_are_close_to_the_lower_bound_on_long_tails() -> None:
    draws = np.random.default_rng(0).lognormal(np.log(3000), 0.9, 512)
    lengths = np.clip(draws, 1, 20000).astype(int).tolist()
    assert len(packing.first_fit_decreasing(lengths, 32768)) <= 1.1 * np.ceil(sum(lengths) / 32768)


def test_micro_batches_split_a_group_only_where_it_exceeds_the_budget() -> None:
    prompts = ragged([[1, 2, 3]] * 4 + [[4, 5, 6]] * 2)
    answers = ragged([[7] * 6] * 4 + [[8] * 3] * 2)
    groups = packing.prompt_groups(np.array([0] * 4 + [1] * 2), prompts)
    parts = packing.micro_batches(prompts, answers, np.arange(6), groups, tokens=14, atomic=False)
    assert sorted(i for p in parts for i in p.tolist()) == list(range(6))
    assert [4, 5] in [p.tolist() for p in parts]
    for part in parts:
        assert len(packing.pack(prompts, answers, part).ids) <= 14
    whole = packing.micro_batches(prompts, answers, np.arange(6), groups, tokens=14, atomic=True)
    assert sorted(p.tolist() for p in whole) == [[0, 1, 2, 3], [4, 5]]


def test_prompt_groups_need_position_and_prompt_to_agree() -> None:
    prompts = ragged([[1], [1], [2], [1]])
    assert packing.prompt_groups(np.array([5, 5, 5, 6]), prompts).tolist() == [0, 0, 1, 2]
