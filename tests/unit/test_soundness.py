"""Weights that transformers would invent, skip or accept unchecked are refused at loading."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dataflow.batch import Batch
from dataflow.errors import DataError, KernelError
from dataflow.model import Model
from operators.kernels.torch import soundness
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.models import find_position_limit, load_model
from tests.kit.kernels import open_kernel, prompt_chunk
from tests.kit.models import save_tiny

Weights = dict[str, torch.Tensor]
Spoilt = Callable[..., str]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny(tmp_path_factory.mktemp("sound") / "good", layers=1))


@pytest.fixture
def spoilt(good: Path, tmp_path: Path) -> Spoilt:
    """Saves the model with changed weights, and with changed fields of a file of its settings."""

    def save(
        change: Callable[[Weights], Weights] = lambda w: w, file: str = "config.json", **fields: Any
    ) -> str:
        folder = tmp_path / "base"
        shutil.copytree(good, folder)
        weights = change(load_file(folder / "model.safetensors"))
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        content = json.loads((folder / file).read_text()) | fields
        (folder / file).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
        return str(folder)

    return save


def refusal(base: str, **given: Any) -> str:
    with pytest.raises(KernelError) as caught:
        load_model(Model("m", base, **given), "cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


NORM = "model.norm.weight"


def with_number(value: float) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {NORM: torch.tensor([1.0] * 31 + [value])}


OTHER = "model.layers.1.mlp.up_proj.weight"


def head(rows: int, value: float) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {"score.weight": torch.full((rows, 32), value)}


@pytest.mark.parametrize(("change", "kind", "told"), [
    (
        with_number(float("nan")),
        "lm",
        "expected finite weights at {base}, found nan at model.norm.weight[31] (1 ",
    ),
    (with_number(float("-inf")), "lm", "found -inf at model.norm.weight[31] (1 there)"),
    (
        lambda w: {k: v for k, v in w.items() if k != NORM},
        "lm",
        "expected all weights at {base}, found none for model.norm.weight",
    ),
    (
        lambda w: w | {NORM: w[NORM][:31]},
        "lm",
        "expected model.norm.weight of shape (32,) at {base}, found (31,)",
    ),
    (
        lambda w: w | {OTHER: torch.ones(2)},
        "lm",
        f"expected only weights of this model at {{base}}, found {OTHER} too",
    ),
    (head(1, 0.0), "scalar", "score.weight that is all zeros"),
    (head(2, 0.5), "scalar", "found (2, 32)"),
], ids=[
    "nan", "infinite", "one is missing", "one is too short", "one too many",
    "a head that nobody trained", "a head of two numbers",
])  # fmt: skip
def test_weights_that_are_not_whole_are_refused(
    spoilt: Spoilt, change: Callable[[Weights], Weights], kind: str, told: str
) -> None:
    base = spoilt(change)
    assert told.format(base=base) in refusal(base, head=kind)


@pytest.mark.parametrize(("fields", "told"), [
    ({"hidden_act": "foo"}, "KeyError: 'foo'"),
    ({"num_hidden_layers": 2}, "num_hidden_layers"),
    ({"dtype": "float15"}, "float15"),
])  # fmt: skip
def test_a_configuration_that_transformers_chokes_on_is_one_line(
    spoilt: Spoilt, fields: dict[str, Any], told: str
) -> None:
    said = refusal(spoilt(**fields))
    assert told in said
    assert "expected a model that can be loaded at" in said


def test_a_pickle_is_refused_without_a_word_on_how_to_run_it(good: Path) -> None:
    with pytest.raises(KernelError) as refused, soundness.loading_errors("policy", str(good)):
        raise pickle.UnpicklingError("Weights only load failed. Set `weights_only` to `False`.")
    assert "found a file of weights that is damaged, or has more than tensors in it. Fix: " in str(
        refused.value
    )
    assert "weights_only" not in str(refused.value)


def test_only_what_is_trained_may_begin_with_a_new_head(good: Path) -> None:
    assert "expected a trained score head (score.weight)" in refusal(str(good), head="scalar")
    critic = Model("critic", str(good), trainable=True, head="scalar")
    for model in (critic, Model("slow", str(good), head="scalar", follows=critic)):
        assert not load_model(model, "cpu").get_parameter("score.weight").any()


def test_a_trained_head_is_read_and_the_head_that_is_not_wanted_is_left(spoilt: Spoilt) -> None:
    base = spoilt(head(1, 0.5))
    scores = load_model(Model("rm", base, head="scalar"), "cpu")
    assert (scores.get_parameter("score.weight") == 0.5).all()
    load_model(Model("policy", base), "cpu")


def opened(base: str, **params: Any) -> TorchGenerate:
    return open_kernel(TorchGenerate(), base, **{"n": 1, "max_tokens": 4} | params)


def answers(kernel: TorchGenerate, *prompts: str) -> list[Batch]:
    return list(kernel.run(prompt_chunk(prompts)))


def test_an_answer_that_cannot_end_is_refused_when_the_kernel_opens(spoilt: Spoilt) -> None:
    base = spoilt(file="generation_config.json", eos_token_id=None)
    settings = Path(base) / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": None}))
    told = "rollout: Model 'policy': expected a token that ends an answer"
    with pytest.raises(DataError, match=told):
        opened(base)
    opened(base, stop=("\n",))


@pytest.mark.parametrize(
    ("end", "told"), [(151645, "below its vocabulary of 98, found"), ("</s>", "to be token ids")]
)
def test_an_end_that_the_model_cannot_write_is_refused(spoilt: Spoilt, end: Any, told: str) -> None:
    base = spoilt(file="generation_config.json", eos_token_id=end)
    with pytest.raises(DataError, match=told):
        opened(base)


def test_positions_are_those_of_the_file_and_none_where_it_has_none(spoilt: Spoilt) -> None:
    base = spoilt(max_position_embeddings=None)
    assert find_position_limit(base) is None
    assert len(answers(opened(base, max_tokens=2), "a" * 700)) == 1


def test_prompts_beyond_the_positions_are_not_answered(spoilt: Spoilt) -> None:
    base = spoilt(max_position_embeddings=16)
    prompts = ["a" * 12, "b" * 13]
    told = r"row \(1, 0, 0\): expected at most 12 prompt tokens \(Model 'policy' has 16 pos"
    with pytest.raises(DataError, match=told):
        answers(opened(base), *prompts)
    (left,) = answers(opened(base, overlong_prompt="drop", n=2), *prompts)
    assert left.keys.rows() == [(0, 0, 0), (0, 1, 0)]
    assert not answers(opened(base, overlong_prompt="drop"), prompts[1])


def test_a_prompt_with_an_id_beyond_the_embedding_is_refused(spoilt: Spoilt) -> None:
    """As of models whose tokenizer has tokens for other media."""
    rows = "model.embed_tokens.weight"
    base = spoilt(
        lambda weights: weights | {rows: weights[rows][:90]},
        vocab_size=90,
        pad_token_id=1,
        eos_token_id=2,
    )
    (Path(base) / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    message = r"row \(1, 0, 0\): expected token ids below the 90 that Model 'policy' knows"
    with pytest.raises(DataError, match=message):
        answers(opened(base), "ab", "~")
