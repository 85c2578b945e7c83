"""Cost formulas, against published parameter counts and numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from dataflow.errors import PlanError
from dataflow.schema import Rollout
from engine.plan.cost import memory
from engine.plan.cost.column_bytes import column_bytes, data_bytes, value_bytes
from engine.plan.cost.lengths import ASSUMED_PROMPT, Lengths, of_rollout
from engine.plan.cost.memory import Work
from engine.plan.cost.models import Shape, model_cost
from engine.plan.cost.static_decode import sampled_bytes, static_decode_parts
from tests.kit.turns import example_count

HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 2}
SHAPE = Shape(layers=2, hidden=8, intermediate=24, **HEADS, vocabulary=10, context=64, tied=False)
TOKEN = 2 * SHAPE.layers * SHAPE.kv * 4
"""Bytes of a token in the cache, in float32."""

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("intermediate_size", "vocab_size")


def config(kind: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """config.json of this kind of model, with these SIZES."""
    named = dict(zip(SIZES, sizes, strict=True))
    return {"model_type": kind, **named, "max_position_embeddings": 4096, **more}


TIED = {"tie_word_embeddings": True}
SMALL = config("qwen2", 8, 2, 4, 2, 24, 10)
PUBLISHED = {
    "Qwen2-0.5B": (config("qwen2", 896, 24, 14, 2, 4864, 151936, **TIED), 494_032_768),
    "Llama-3.1-8B": (config("llama", 4096, 32, 32, 8, 14336, 128256), 8_030_261_248),
    "Mistral-7B-v0.1": (config("mistral", 4096, 32, 32, 8, 14336, 32000), 7_241_732_096),
    "Qwen3-0.6B": (
        config("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, **TIED),
        596_049_920,
    ),
}


def saved(folder: Path, settings: dict[str, Any], **tensors: tuple[int, ...]) -> str:
    """A model directory; with tensors it has weights, of zeros."""
    (folder / "config.json").write_text(json.dumps(settings))
    zeros = {name.replace("__", "."): np.zeros(tensors[name], np.float32) for name in tensors}
    if zeros:
        save_file(zeros, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_formula_gives_the_published_number_of_parameters(name: str, tmp_path: Path) -> None:
    settings, parameters = PUBLISHED[name]
    found = model_cost(saved(tmp_path, settings))
    assert (found.parameters, found.why) == (parameters, "by formula from config.json")


def test_a_scalar_head_is_a_vector_and_a_bias_instead_of_the_vocabulary(tmp_path: Path) -> None:
    base = saved(tmp_path, SMALL)
    language, scalar = model_cost(base).parameters, model_cost(base, "scalar").parameters
    assert scalar == language - 10 * 8 + 8 + 1


LARGE, HEAD = (10, 8), {"lm_head__weight": (10, 8)}


@pytest.mark.parametrize(("settings", "tensors", "head", "count"), [
    (SMALL, {"model__rotary_emb__inv_freq": (4,), **HEAD}, "lm", 160),
    (SMALL, HEAD, "scalar", 80 + 9),
    (SMALL | TIED, HEAD, "lm", 80),
], ids=["its own head", "a scalar head", "a tied head that the file has twice"])  # fmt: skip
def test_headers_are_counted_exactly_and_go_before_the_formula(
    tmp_path: Path, settings: Any, tensors: Any, head: Any, count: int
) -> None:
    base = saved(tmp_path, settings, model__embed=LARGE, **tensors)
    assert model_cost(base, head).parameters == count


def test_a_changed_directory_is_read_again(tmp_path: Path) -> None:
    base = saved(tmp_path, SMALL, model__embed=(10, 8))
    assert model_cost(base).parameters == 80
    saved(tmp_path, SMALL, model__embed=(10, 8), model__norm=(8,))
    assert model_cost(base).parameters == 88


@pytest.mark.parametrize(
    "base, why",
    [("some/hub-name", "base is not a local directory"), ("empty", "no config.json in its base")],
)
def test_what_is_not_here_is_unknown(
    base: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert (model_cost(base).parameters, model_cost(base).why) == (None, why)


def test_another_architecture_without_weights_is_unknown(tmp_path: Path) -> None:
    found = model_cost(saved(tmp_path, {"model_type": "gpt2", "n_embd": 8}))
    assert found.parameters is None
    assert "gpt2" in found.why


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    base = saved(tmp_path, SMALL)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 32)
    with pytest.raises(PlanError, match=r"model\.safetensors: expected a safetensors file"):
        model_cost(base)


@pytest.mark.parametrize(
    ("name", "size"),
    [("prompt_ids", 8 + 5 * 4), ("completion_mask", 8 + 7), ("sampler_logprobs", 8 + 7 * 4)],
)
def test_token_columns_have_an_offset_and_a_value_a_token(name: str, size: int) -> None:
    assert column_bytes(Rollout.columns[name], Lengths(prompt=5, completion=7)) == size


@pytest.mark.parametrize(
    "kind, size",
    [(pa.int64(), 8), (pa.float32(), 4), (pa.uint8(), 1), (pa.bool_(), 1), (pa.timestamp("us"), 8)],
)
def test_plain_values_have_their_width(kind: pa.DataType, size: int) -> None:
    assert value_bytes(kind) == size


def test_text_of_a_prompt_grows_with_it_and_other_text_does_not() -> None:
    short, long = Lengths(prompt=5), Lengths(prompt=500)
    assert data_bytes("prompt", pa.utf8(), long) > data_bytes("prompt", pa.utf8(), short)
    assert data_bytes("answer", pa.utf8(), long) == data_bytes("answer", pa.utf8(), short)


def test_a_prompt_without_a_bound_is_assumed_and_fits_the_context() -> None:
    assumed, stated = of_rollout(32, None), of_rollout(32, 100)
    assert assumed.prompt == ASSUMED_PROMPT
    assert "max_prompt_tokens" in assumed.bound
    assert assumed.clip(128).prompt == 96
    assert (assumed.limit, assumed.clip(128).limit) == (None, 96), "a guess limits nothing"
    assert (stated.prompt, stated.bound, stated.limit) == (100, "", 100)
    assert (stated.clip(64).prompt, stated.clip(64).limit) == (100, 32)


@pytest.mark.parametrize(("dtype", "optimizer", "gradients"), [
    ("float32", 80, 40), ("bfloat16", 120, 60),
])  # fmt: skip
def test_optimizer_and_gradients_of_narrow_weights_are_wide(
    dtype: str, optimizer: int, gradients: int
) -> None:
    assert memory.optimizer_bytes(10, dtype) == optimizer
    assert memory.gradient_bytes(10, dtype) == gradients


@pytest.mark.parametrize(
    "prompts, slots, rows", [(3, 256, 24), (100, 16, 16)], ids=["all rows", "as many as slots"]
)
def test_the_cache_holds_a_prompt_once_for_all_rows(prompts: int, slots: int, rows: int) -> None:
    lengths = Lengths(prompt=10, completion=4)
    work = Work(lengths=lengths, prompts=prompts, rows=8 * prompts, slots=slots)
    assert memory.kv_bytes(SHAPE, work, "float32") == TOKEN * (3 * 10 + rows * 8)


@pytest.mark.parametrize(
    "tokens, room", [(1, 8), (8, 8), (9, 16), (512, 512), (513, 1024), (20480, 32768)]
)
def test_the_cache_has_room_in_powers_of_two(tokens: int, room: int) -> None:
    one = Work(lengths=Lengths(prompt=0, completion=tokens), prompts=1, rows=1)
    assert memory.kv_bytes(SHAPE, one, "float32") == TOKEN * room


@pytest.mark.parametrize(("row", "room"), [(20, 64), (96, 96), (97, 128), (600, 768)])
def test_on_a_gpu_each_row_has_a_copy_of_its_prompt_in_a_room_of_few_sizes(
    row: int, room: int
) -> None:
    work = Work(lengths=Lengths(prompt=10, completion=row - 10), prompts=20, rows=160, slots=100)
    parts = static_decode_parts(SHAPE, work, "float32")
    logits = sampled_bytes(SHAPE, 128, "float32")
    step = logits + 128 * memory.token_forward(SHAPE, "float32")
    assert parts["cache"] == TOKEN * 128 * room + step
    assert logits == 128 * SHAPE.vocabulary * 4 * 4
    layer = SHAPE.kv * 4 * 128 * room
    assert parts["activations"] == 200 * (memory.token_pass(SHAPE, "float32") + TOKEN) + layer
    assert "cache" in memory.LASTING


def test_logits_are_held_in_chunks() -> None:
    tokens = 10 * memory.CHUNK_LOGITS // SHAPE.vocabulary
    assert memory.logit_bytes(SHAPE, tokens, backward=False) == 4 * memory.CHUNK_LOGITS


# SHAPE's token: residual 2 x 8; attention 4 x 8 and (3 + 2 x gathered) x 4 numbers; MLP 3 x 24.
ATTENTION, MLP = 4 * 8 + 5 * 4, 3 * 24


def test_a_pass_without_gradient_takes_both_parts_of_a_layer_side_by_side() -> None:
    assert memory.token_forward(SHAPE, "float32") == 4 * (16 + MLP), "tensors at once: the widest"
    assert memory.token_pass(SHAPE, "float32") == 4 * (16 + ATTENTION + MLP)
    assert memory.token_pass(SHAPE, "bfloat16", 3.0) == 2 * (16 + ATTENTION + 2 * 2 * 4 + MLP)


def test_a_prefill_counts_beside_the_cache_that_grows_after_it() -> None:
    work = Work(lengths=Lengths(prompt=10, completion=16), prompts=3, rows=24)
    parts = memory.decode_parts(SHAPE, work, "float32")
    layer_before = 2 * SHAPE.kv * 4 * 24 * 8
    assert parts["activations"] == 3 * 10 * 4 * (16 + ATTENTION + MLP) + layer_before
    assert parts["kv_cache"] == TOKEN * (3 * 10 + 24 * 16)


@pytest.mark.parametrize(
    ("vocabulary", "logits"),
    [(10, 0), (1000, 2 * 4 * 10 * 1000 - 4 * 30 * (54.25 + MLP))],
    ids=["less than the last layer has freed", "more"],
)
def test_logits_of_a_forward_pass_count_beyond_what_its_last_layer_has_freed(
    vocabulary: int, logits: float
) -> None:
    """Of two rows of 10 + 5 tokens 30 are fed; blocks of 40 gather 1 + 3/4 x 15/40 keys a query."""
    work = Work(lengths=Lengths(prompt=10, completion=5), prompts=2, rows=2)
    assert 4 * 8 + (3 + 2 * memory.gathered_keys(15)) * 4 == 54.25
    shape = replace(SHAPE, vocabulary=vocabulary)
    assert memory.forward_parts(shape, work, "float32", "lm")["logits"] == logits


def test_the_peak_of_nodes_that_take_turns() -> None:
    decoding = {"outbox": 2, "kv_cache": 3, "logits": 1}
    nodes = [{"weights": 5, "activations": 7}, decoding, {"optimizer": 10}]
    assert memory.peak(nodes) == 5 + 2 + 10 + 7
    assert memory.peak(nodes, without=memory.HOST_PARTS) == 5 + 10 + 7


def test_workers_of_a_host_add_up_but_for_those_that_take_turns() -> None:
    workers = {
        "gen": [{"weights": 5, "kv_cache": 40, "outbox": 1}],
        "train": [{"weights": 5, "optimizer": 10, "activations": 30, "snapshot": 2}],
        "other": [{"weights": 3, "logits": 4}],
    }
    turns = [("gen", "train")]
    assert memory.host_peak(workers) == 46 + 47 + 7
    assert memory.host_peak(workers, turns) == (6 + 17 + 40) + 7, "what lasts stays on a host"
    on_gpu = memory.host_peak(workers, turns, without=memory.HOST_PARTS, gives_back=True)
    assert on_gpu == max(45, 45) + 7


works = st.builds(
    Work,
    lengths=st.builds(Lengths, prompt=st.integers(1, 300), completion=st.integers(1, 300)),
    prompts=st.integers(1, 64),
    rows=st.integers(64, 512),
    budget=st.integers(1, 20_000),
    slots=st.integers(1, 300),
)


PARTS = {
    "decode": lambda work: memory.decode_parts(SHAPE, work, "float32"),
    "decode on a GPU": lambda work: static_decode_parts(SHAPE, work, "float32"),
    "forward": lambda work: memory.forward_parts(SHAPE, work, "float32", "lm"),
    "train": lambda work: memory.train_parts(1000, SHAPE, work, "float32", "lm"),
}


@pytest.mark.parametrize("kind", PARTS)
@settings(max_examples=example_count(50))
@given(works, st.integers(1, 100))
def test_longer_rows_never_need_less(kind: str, work: Work, more: int) -> None:
    short = work.lengths
    lengths = Lengths(prompt=short.prompt + more, completion=short.completion + more)
    longer = PARTS[kind](replace(work, lengths=lengths))
    assert sum(longer.values()) >= sum(PARTS[kind](work).values())


@settings(max_examples=example_count(50))
@given(works)
def test_a_micro_batch_is_within_its_budget_or_one_row(work: Work) -> None:
    assert work.at_once <= max(work.budget, work.lengths.row)
    assert work.at_once <= work.fed_tokens
