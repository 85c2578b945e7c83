"""Attention over a prefix tree by FlexAttention: its masks by blocks, its values and gradients by a
dense reference, what torch compiles, and a whole model, all as by the dense path; on a GPU the
compiled kernels themselves.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from dataflow.model import Model
from operators.kernels.torch.attention import AttentionPass
from operators.kernels.torch.attention_kind import AttentionKind
from operators.kernels.torch.flex_pass import (
    FlexPass,
    attend_blocks,
    compile_attention,
    make_block_mask,
)
from operators.kernels.torch.heads import predictions
from operators.kernels.torch.models import load_model
from operators.kernels.torch.packed_pass import PackedPass, shares_prefix
from operators.kernels.torch.packing import Packed, pack
from operators.kernels.torch.shared_attention import TreePass
from operators.kernels.torch.varlen_pass import VarlenPass
from tests.kit.architectures import tiny
from tests.kit.dense_flex import by_token, dense_kernel, listed_blocks, visible_tokens
from tests.kit.rows import ragged
from tests.kit.turns import example_count

on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HEADS, KEY_HEADS = 4, 2
WINDOWS = st.sampled_from([None, 1, 2, 3, 5, 9])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
TREES = st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=7).map(
    lambda rows: pack_rows([prompt for prompt, _ in rows], [answer for _, answer in rows])
)
"""Trees of rows that often begin alike."""


def pack_rows(prompts: list[list[int]], answers: list[list[int]]) -> Packed:
    return pack(ragged(prompts), ragged(answers), np.arange(len(prompts)), whole=True)


def draw_tree(groups: int, samples: int, longest: int, *, seed: int = 0) -> Packed:
    """Prompts of up to `longest` tokens, each with some answers as long."""
    draw = np.random.default_rng(seed)
    prompts, answers = [], []
    for _ in range(groups):
        prompt = draw.integers(0, 9, draw.integers(1, longest + 1)).tolist()
        for _ in range(samples):
            prompts.append(prompt)
            answers.append(draw.integers(0, 9, draw.integers(1, longest + 1)).tolist())
    return pack_rows(prompts, answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """What a layer attends with."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor

    def attend_by(self, attention_pass: AttentionPass, kind: AttentionKind) -> Tensor:
        return attention_pass.attend(0, self.query, self.key, self.value, kind)

    def require_grad(self, kind: AttentionKind) -> list[Tensor]:
        """Those that a layer of this kind uses, with a gradient from now on."""
        used = [self.query, self.key, self.value]
        if kind.sinks is not None:
            used.append(self.sinks)
        return [x.requires_grad_() for x in used]


def draw_inputs(
    packed: Packed,
    dim: int,
    value_dim: int,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LayerInputs:
    tokens, draw = len(packed.ids), torch.Generator().manual_seed(len(packed.ids))
    shapes = ((tokens, HEADS, dim), (tokens, KEY_HEADS, dim), (tokens, KEY_HEADS, value_dim))
    drawn = (torch.randn(shape, generator=draw) for shape in (*shapes, (HEADS,)))
    query, key, value, sinks = (x.to(device, dtype) for x in drawn)
    return LayerInputs(query=query, key=key, value=value, sinks=sinks)


def is_visible(packed: Packed, window: int | None) -> Tensor:
    """bool [tokens, tokens]: what each token sees, said of all tokens at once."""
    at, end = torch.arange(len(packed.ids)), torch.from_numpy(packed.end)
    visible = (at[None] <= at[:, None]) & (at[:, None] < end[None])
    if window is not None:
        depth = torch.from_numpy(packed.positions)
        visible &= depth[:, None] - depth[None] < window
    return visible


@settings(max_examples=example_count(120))
@given(packed=TREES, block=st.integers(1, 5), window=WINDOWS)
def test_a_mask_by_blocks_is_the_mask_by_tokens(
    packed: Packed, block: int, window: int | None
) -> None:
    mask = make_block_mask(packed.end, packed.positions, window, torch.device("cpu"), block)
    visible = is_visible(packed, window)
    assert torch.equal(visible_tokens(mask), visible)
    partly, wholly = listed_blocks(mask)
    assert not (partly & wholly).any()
    assert visible[by_token(wholly, block, len(packed.ids))].all()
    if window is None:  # no block is listed in vain
        assert torch.equal(partly | wholly, count_visible(visible, block) > 0)


def count_visible(visible: Tensor, block: int) -> Tensor:
    """int64 [blocks, blocks]: the pairs of tokens of two blocks that see each other."""
    first = np.arange(0, len(visible), block)
    by_query = np.add.reduceat(visible.numpy().astype(np.int64), first, axis=0)
    return torch.from_numpy(np.add.reduceat(by_query, first, axis=1))


def test_a_prompt_is_full_blocks_and_other_answers_are_left_out() -> None:
    draw = np.random.default_rng(0)
    answers = [draw.integers(0, 9, 40).tolist() for _ in range(8)]
    packed = pack_rows([[1] * 40] * 8, answers)
    mask = make_block_mask(packed.end, packed.positions, None, torch.device("cpu"), 8)
    partly, wholly = listed_blocks(mask)
    assert wholly.sum() >= 8 * 4 * 5  # each of 8 answers has blocks of its own, which see 5
    assert (partly | wholly).sum() < len(partly) ** 2 / 4


KINDS = st.fixed_dictionaries({
    "scaling": st.sampled_from([0.3, 1.0]),
    "window": WINDOWS,
    "softcap": st.sampled_from([None, 0.8, 5.0]),
})  # fmt: skip


def require_equal_attention(
    flex: FlexPass, packed: Packed, inputs: LayerInputs, kind: AttentionKind
) -> None:
    """Values and gradients of FlexPass are those of the dense path, to 1e-5."""
    used = inputs.require_grad(kind)
    ours, dense = (inputs.attend_by(each, kind) for each in (flex, TreePass(packed)))
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)
    upstream = torch.linspace(-1.0, 1.0, dense.numel()).view(dense.shape)
    gradients = [torch.autograd.grad(out, used, upstream) for out in (ours, dense)]
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-5)


@settings(max_examples=example_count(90))
@given(packed=TREES, block=st.integers(1, 5), fields=KINDS, has_sinks=st.booleans())
def test_modifications_masks_and_sinks_have_the_values_and_gradients_of_the_dense_path(
    packed: Packed, block: int, fields: dict[str, Any], has_sinks: bool
) -> None:
    inputs = draw_inputs(packed, 8, 6)
    sinks = inputs.sinks if has_sinks else None
    kind = AttentionKind(**fields, sinks=sinks)
    flex = FlexPass(packed, "cpu", kernel=dense_kernel, block=block)
    require_equal_attention(flex, packed, inputs, kind)
    require_equal_attention(flex, packed, inputs, kind)  # by the masks that are there by now


def make_kinds(sinks: Tensor) -> list[AttentionKind]:
    return [
        AttentionKind(scaling=0.3),
        AttentionKind(scaling=0.3, window=30),
        AttentionKind(scaling=0.3, softcap=2.0),
        AttentionKind(scaling=0.3, window=20, softcap=3.0, sinks=sinks),
    ]


@pytest.fixture
def fresh_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """torch has compiled nothing yet, and leaves nothing on the machine."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
    torch._dynamo.reset()
    compile_attention.cache_clear()
    yield
    compile_attention.cache_clear()
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.usefixtures("fresh_compiler")
def test_each_kind_is_compiled_once_for_all_lengths() -> None:
    counter = CompileCounter()
    kernel = torch.compile(attend_blocks, backend=counter, dynamic=True, fullgraph=True)
    trees = [
        draw_tree(3, 3, 40),
        draw_tree(5, 4, 90, seed=1),
        draw_tree(1, 1, 3),
        draw_tree(4, 2, 70),
    ]
    assert len({len(packed.ids) for packed in trees}) == len(trees)
    for number, packed in enumerate(trees):
        inputs = draw_inputs(packed, 16, 24)
        flex, tree = FlexPass(packed, "cpu", kernel=kernel), TreePass(packed)
        # As from a decoder layer that is compiled around it.
        attend_by: Any = torch.compiler.disable(inputs.attend_by)
        for kind in make_kinds(inputs.sinks):
            attended, dense = attend_by(flex, kind), inputs.attend_by(tree, kind)
            torch.testing.assert_close(attended, dense, atol=1e-5, rtol=1e-5)
        assert counter.frame_count == 4, number


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU by g++")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("number", [0, 1, 2], ids=["plain", "window", "softcap"])
def test_the_compiled_kernel_has_the_values_of_the_dense_path(number: int) -> None:
    """On a CPU it has no gradient and no log-sum-exp, so no sinks."""
    for packed in (draw_tree(3, 3, 60), draw_tree(9, 4, 90, seed=1), draw_tree(1, 1, 4)):
        inputs = draw_inputs(packed, 16, 24)
        kind = make_kinds(inputs.sinks)[number]
        attended, dense = (
            inputs.attend_by(each, kind) for each in (FlexPass(packed, "cpu"), TreePass(packed))
        )
        torch.testing.assert_close(attended, dense, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "qwen2"])
def test_a_model_by_flex_has_the_logprobs_and_gradients_of_the_dense_path(
    name: str, tmp_path: Path
) -> None:
    """Windows and caps, windows and sinks, neither."""
    module: Any = load_model(Model("policy", str(tiny(name, tmp_path))), "cpu")
    packed = draw_tree(3, 3, 14)
    written = torch.from_numpy(packed.ids)[torch.from_numpy(packed.source)]
    flex = FlexPass(packed, "cpu", kernel=dense_kernel, block=4)
    gradients = []
    for attention_pass in (flex, None):
        module.zero_grad()
        predicted = predictions(module, packed, written, attention_pass=attention_pass)
        (predicted.logprobs * torch.linspace(-1.0, 1.0, len(written))).mean().backward()
        by_name = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        gradients.append((predicted.logprobs.detach(), by_name))
    (ours, ours_by_name), (dense, dense_by_name) = gradients
    assert ours_by_name.keys() == dense_by_name.keys()
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours_by_name, dense_by_name, atol=1e-5, rtol=1e-4)


def test_on_a_cpu_packed_tokens_take_the_dense_path_to_the_bit() -> None:
    packed = draw_tree(3, 3, 20)
    inputs, kind = draw_inputs(packed, 16, 16), AttentionKind(scaling=0.3)
    chosen, dense = (
        inputs.attend_by(each, kind) for each in (PackedPass(packed, "cpu"), TreePass(packed))
    )
    assert torch.equal(chosen, dense)


def test_rows_share_a_prefix_where_a_token_has_two_successors() -> None:
    assert shares_prefix(pack_rows([[1, 2], [1, 3]], [[4], [5]]))
    assert not shares_prefix(pack_rows([[1, 2], [2, 3]], [[4, 5], [6]]))
    assert not shares_prefix(pack_rows([[1, 2], [1, 2]], [[4, 5], [4]]))  # one goes on the other
    assert not shares_prefix(pack_rows([[1]], [[2]]))


@settings(max_examples=example_count(60))
@given(packed=TREES)
def test_rows_that_share_no_prefix_are_causal_each(packed: Packed) -> None:
    """What VarlenPass says of them by the bounds of rows is what the tree says."""
    bounds = VarlenPass(packed, "cpu").bounds
    row = torch.searchsorted(bounds, torch.arange(len(packed.ids)), right=True)
    is_causal = (row[:, None] == row[None]).tril()
    assert torch.equal(is_causal, is_visible(packed, None)) != shares_prefix(packed)


FLEX, VARLEN = "flex", "varlen"


def draw_rows(count: int) -> Packed:
    """Rows that share no prefix, of very different lengths."""
    draw = np.random.default_rng(count)
    answers = [draw.integers(0, 9, draw.integers(1, 300)).tolist() for _ in range(count)]
    return pack_rows([[10 + row] for row in range(count)], answers)


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize(
    ("dtype", "dims", "numbers"),
    # Each kind of layer takes some seconds to compile, in float32 with wide heads many.
    [(torch.float32, (16, 24), (0, 1, 2, 3)), (torch.bfloat16, (128, 128), (0, 3))],
    ids=["float32", "bfloat16"],
)
def test_compiled_kernels_have_the_values_and_gradients_of_the_dense_path(
    dtype: torch.dtype, dims: tuple[int, int], numbers: tuple[int, ...]
) -> None:
    """Of micro-batches of several lengths. dims: of heads, and of value heads."""
    two_answers = pack_rows([[1, 2]] * 2, [[3], [4, 5]])
    for packed in (draw_tree(3, 3, 60), draw_tree(9, 4, 200, seed=1), two_answers):
        for number in numbers:
            require_path_on_gpu(packed, FLEX, dtype, dims, number)


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("number", [0, 1], ids=["plain", "window"])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_variable_length_attention_has_the_values_and_gradients_of_the_dense_path(
    dim: int, number: int
) -> None:
    for count in (1, 3, 20):
        require_path_on_gpu(draw_rows(count), VARLEN, torch.bfloat16, (dim, dim), number)


def require_path_on_gpu(
    packed: Packed, path: str, dtype: torch.dtype, dims: tuple[int, int], number: int
) -> None:
    """The rule takes this path, whose numbers are those of the dense path in float64, to what the
    dtype has of digits.
    """
    inputs = draw_inputs(packed, *dims, device="cuda", dtype=dtype)
    # Drawn alike, and rounded alike.
    exact = LayerInputs(
        query=inputs.query.double(),
        key=inputs.key.double(),
        value=inputs.value.double(),
        sinks=inputs.sinks.double(),
    )
    kind, exact_kind = make_kinds(inputs.sinks)[number], make_kinds(exact.sinks)[number]
    used, exact_used = inputs.require_grad(kind), exact.require_grad(exact_kind)
    chosen = PackedPass(packed, "cuda")
    attended = inputs.attend_by(chosen, kind)
    assert list(chosen.passes) == [path]
    dense = exact.attend_by(TreePass(packed, "cuda"), exact_kind)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(attended.double(), dense, atol=tolerance, rtol=tolerance)
    upstream = torch.linspace(-1.0, 1.0, dense.numel(), device="cuda").view(dense.shape).to(dtype)
    gradients = torch.autograd.grad(attended, used, upstream)
    exact_gradients = torch.autograd.grad(dense, exact_used, upstream.double())
    for gradient, expected in zip(gradients, exact_gradients, strict=True):
        # Of keys that many queries see they are sums of many numbers: close to the largest.
        error = (gradient.double() - expected).abs().max()
        assert error <= tolerance * max(1.0, float(expected.abs().max()))
