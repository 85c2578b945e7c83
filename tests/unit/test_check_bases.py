"""The check of Models' directories: what is wrong is refused by file, node and line.

`GOLDEN=write pytest tests/unit/test_check_bases.py` writes the golden messages anew; read the
difference.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from test_check import graphs_of

from dataflow.check import check
from dataflow.errors import DataError, GraphError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.model_files import end_ids, folder_of, header, positions_of, stored_weights
from dataflow.node import Port
from dataflow.positions import row_positions
from dataflow.schema import MESSAGE, Rollout
from operators.data import demonstrations, prompts
from operators.forward import logprobs, scores
from operators.generate import generate
from operators.losses import clipped_policy_loss, supervised_loss, value_loss
from operators.train import train
from tests.kit.comparison import golden_names, require_golden
from tests.kit.turns import example_count
from tests.wrong_graphs import bases, turns
from tests.wrong_graphs.parts import compared

MADE = (*graphs_of(bases), *graphs_of(turns))
WRONG = [make for make in MADE if not inspect.signature(make).parameters]

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 6,
    "hidden_size": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "max_position_embeddings": 128,
}
TOKENS = {
    "model": {"vocab": {"a": 0, "b": 1, "c": 2}},
    "added_tokens": [{"id": 3, "content": "<eos>", "special": True}],
}
SPOKEN = {"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
WEIGHTS = {
    "model.embed_tokens.weight": (6, 2),
    "model.layers.0.norm.weight": (2,),
    "model.layers.1.norm.weight": (2,),
}


def save_weights(path: Path, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """A file of zeros."""
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, path)


def base(
    folder: Path,
    *,
    config: Mapping[str, Any] = MappingProxyType({}),
    weights: Mapping[str, tuple[int, ...]] | None = WEIGHTS,
    tokens: Mapping[str, Any] = TOKENS,
    spoken: Mapping[str, Any] = SPOKEN,
) -> Path:
    """A model directory as far as the check looks. config: fields that differ."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    (folder / "tokenizer_config.json").write_text(json.dumps(spoken))
    if weights is not None:
        save_weights(folder / "model.safetensors", weights)
    return folder


TYPES = ("jais2", "bert", "bloom", "gemma3", "gptj", "llama4_text", "mamba", "t5")
CONFIGS = {
    "good": {},
    "untyped": {"model_type": None},
    "quantised": {"quantization_config": {"quant_method": "awq"}},
    "hybrid": {"layer_types": ["full_attention", "linear_attention"]},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "spiral": {"rope_scaling": {"rope_type": "spiral"}},
    "fewer_layers": {"num_hidden_layers": 3},
    "other_embedding": {"vocab_size": 8},
    "short": {"max_position_embeddings": 48},
    **{kind: {"model_type": kind} for kind in TYPES},
}
"""Directories whose config.json alone differs."""


@pytest.fixture(scope="module", autouse=True)
def directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`./bases` of the wrong graphs; the working directory is theirs meanwhile."""
    root = tmp_path_factory.mktemp("check_bases")
    folder = root / "bases"
    for name, config in CONFIGS.items():
        base(folder / name, config=config)
    (folder / "model.gguf").write_text("GGUF")
    (folder / "empty").mkdir()
    (base(folder / "broken_config") / "config.json").write_text('{"model_type"')
    base(folder / "weightless", weights=None)
    cut = base(folder / "cut_short") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-8])
    pointer = base(folder / "pointer") / "model.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    shards = base(folder / "shards", weights=None)
    save_weights(shards / "model-1.safetensors", WEIGHTS)
    places = dict.fromkeys(WEIGHTS, "model-1.safetensors")
    places["lm_head.weight"] = "model-2.safetensors"
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (base(folder / "speechless") / "tokenizer.json").unlink()
    base(folder / "endless", spoken={"eos_token": None})
    two_words = WEIGHTS | {"model.embed_tokens.weight": (2, 2)}
    base(folder / "wordy", config={"vocab_size": 2}, weights=two_words)
    (base(folder / "odd_end") / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    base(folder / "scored", weights=WEIGHTS | {"score.weight": (1, 2)})
    base(folder / "two_scores", weights=WEIGHTS | {"score.weight": (2, 2)})
    with contextlib.chdir(root):
        yield


def headers(data: str, split: str | None) -> dict[str, pa.DataType]:
    text = {"prompt": pa.utf8(), "answer": pa.utf8(), "completion": pa.utf8()}
    return text | {"prompt": pa.list_(MESSAGE)} if "messages" in data else text


@pytest.mark.parametrize("make", WRONG)
def test_a_wrong_base_is_refused_with_this_message(make: Callable[[], Graph]) -> None:
    with pytest.raises(GraphError) as caught:
        check(make(), headers)
    require_golden(f"check_bases/{make.__name__}.txt", f"{caught.value}\n")


def test_every_golden_message_has_its_graph() -> None:
    assert golden_names("check_bases") == {make.__name__ for make in WRONG}


def accepted(graph: Graph) -> None:
    check(graph, headers)


def test_right_bases_pass() -> None:
    accepted(bases.grpo_on(bases.GOOD))
    accepted(bases.grpo_on("some/hub-name"))
    accepted(bases.grpo_on("./bases/endless", stop=("\n",)))
    accepted(bases.grpo_on(bases.GOOD, max_tokens=64, max_prompt_tokens=64))


def test_answers_may_be_continued_as_far_as_the_positions_reach() -> None:
    accepted(turns.two_turns(100, 27))
    accepted(turns.two_turns(100, 28, overlong_prompt="drop"))


def rolled_out() -> tuple[Model, Port[Rollout]]:
    """A policy that has all it needs, and its answers."""
    policy = Model("policy", bases.GOOD, trainable=True)
    prompt = prompts("data/train.parquet", batch=8)
    return policy, generate(policy, prompt, n=4, max_tokens=8, name="rollout")


def test_a_trained_critic_may_begin_with_a_new_head_and_a_follower_has_its_leaders() -> None:
    critic = Model("critic", bases.GOOD, trainable=True, head="scalar")
    slow = Model("slow", bases.GOOD, head="scalar", follows=critic, rate=0.1)
    policy, rollout = rolled_out()
    advantage = bases.gae(rollout, bases.reward(bases.exact, rollout), bases.values(slow, rollout))
    first = train(policy, rollout, loss=bases.policy_gradient_loss(advantage), lr=1e-6)
    accepted(Graph("g", first, train(critic, rollout, loss=value_loss(advantage), lr=1e-5)))


def test_a_reward_model_with_its_head_passes() -> None:
    policy, rollout = rolled_out()
    judge = Model("judge", "./bases/scored", head="scalar")
    advantage = bases.gae(rollout, scores(judge, rollout), bases.values(judge, rollout))
    loss = bases.policy_gradient_loss(advantage)
    accepted(Graph("g", train(policy, rollout, loss=loss, lr=1e-6)))


def test_a_chat_template_is_found_in_its_file_or_in_the_settings(tmp_path: Path) -> None:
    messages = prompts("data/messages.parquet", batch=64)
    (base(tmp_path / "file") / "chat_template.jinja").write_text("{{ messages }}")
    accepted(bases.grpo_on(str(tmp_path / "file"), messages))
    inside = base(tmp_path / "inside", spoken=SPOKEN | {"chat_template": "{{ messages }}"})
    accepted(bases.grpo_on(str(inside), messages))


def test_special_tokens_of_other_media_may_lie_beyond_the_embedding(tmp_path: Path) -> None:
    image = {"id": 9, "content": "<image>", "special": True}
    tokens = TOKENS | {"added_tokens": [*TOKENS["added_tokens"], image]}
    accepted(bases.grpo_on(str(base(tmp_path / "seeing", tokens=tokens))))


WIDTH = {"max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize("config,limit", [
    (WIDTH, 512),
    ({"n_positions": 1024}, 1024),
    ({}, None),
    ({"max_position_embeddings": -1}, None),
    ({"max_position_embeddings": None, "rope_parameters": {"rope_type": "default"}}, None),
    (WIDTH | {"rope_scaling": {"type": "linear", "factor": 2.0}}, 1024),
    (WIDTH | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 512),
    (WIDTH | {"rope_parameters": YARN}, 1024),
    (WIDTH | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 512),
    (WIDTH | {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64}, 64),
    (WIDTH | {"rope_parameters": {"rope_type": "longrope"}}, 512),
    (
        WIDTH
        | {"model_type": "phi3", "rope_scaling": {"type": "su"}}
        | {"original_max_position_embeddings": 64},
        64,
    ),
    (WIDTH | {"rope_parameters": {"a": YARN, "b": {"rope_type": "default"}}}, 512),
    ({"text_config": {"max_position_embeddings": 64}}, 64),
])  # fmt: skip
def test_positions_of_a_configuration(config: dict[str, Any], limit: int | None) -> None:
    assert positions_of(config) == limit


def test_rows_are_as_long_as_the_least_of_their_readers_can_read() -> None:
    policy, rollout = rolled_out()
    reference = logprobs(Model("reference", "./bases/short"), rollout)
    loss = clipped_policy_loss(compared(rollout), reference=reference, beta=0.1)
    found = row_positions(Graph("g", train(policy, rollout, loss=loss, lr=1e-6)))["rollout"]
    assert (found.limit, found.model, found.node.name) == (48, "reference", "reference")
    student = Model("student", "./bases/short", trainable=True)
    rows = demonstrations("data/demos.jsonl", batch=8)
    sft = Graph("g", train(student, rows, loss=supervised_loss(), lr=1e-6))
    assert row_positions(sft)["demonstrations"].limit == 48


def test_the_header_of_a_file_says_its_tensors() -> None:
    stored = header(Path("bases/good/model.safetensors"))
    assert {name: tensor.shape for name, tensor in stored.items()} == WEIGHTS
    assert stored_weights(Path("bases/good")) == stored


@settings(
    max_examples=example_count(60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_file_of_weights_is_a_data_error_and_nothing_else(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Cut anywhere, or a byte of its header changed: read as it was, or refused."""
    changed = bytearray(Path("bases/good/model.safetensors").read_bytes())
    size, end = len(changed), 8 + int.from_bytes(changed[:8], "little")
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(0, size - 1)) :]
    else:
        changed[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path / f"{hash(bytes(changed))}.safetensors"
    file.write_bytes(changed)
    refused = ""
    try:
        header(file)
    except DataError as error:
        refused = str(error)
    if refused:
        assert refused.startswith(f"{file}: expected ")
        assert ". Fix: " in refused
    else:
        assert len(changed) == size


def test_a_hub_name_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert folder_of("owner/name") is None
    cached = tmp_path / "models--owner--name"
    snapshot = base(cached / "snapshots/abc")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    assert folder_of("owner/name") == snapshot
    assert end_ids(snapshot) == {3}
    with pytest.raises(GraphError, match="'policy' has 128 positions, and max_tokens=500"):
        check(bases.grpo_on("owner/name", max_tokens=500), headers)
