"""Critics and reward models of every form of a head: their numbers are those of transformers, and
what is saved can be read again, by transformers too where it has a class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPT2ForTokenClassification,
)

from dataflow.errors import KernelError
from dataflow.model import Model
from dataflow.schema import Returns
from operators import losses
from operators.kernels.torch.heads import predict_values_and_scores
from operators.kernels.torch.models import load_model, pieces
from operators.kernels.torch.packing import pack
from operators.kernels.torch.saving import save_model
from operators.kernels.torch.scalar import scalar_head
from tests.kit import training
from tests.kit.architectures import ARCHITECTURES, tiny
from tests.kit.differences import ROOM, randomise
from tests.kit.models import character_tokenizer
from tests.kit.rows import ragged, random_rows, token_column

FORMS = (
    "cohere2", "gemma2", "gpt2", "gpt_neox", "gpt_oss", "granite", "llama", "olmo2", "opt", "phi",
    "qwen3_moe",
)  # fmt: skip
"""One of each form of a head; the page of models has the numbers of all (test_architectures.py)."""

ROWS = [([3, 1, 4, 1], [8, 9, 7, 9, 3, 2, 3]), ([5, 9, 2, 6, 5, 3, 5], [1, 2, 3, 4])]
AUTO = (AutoModelForTokenClassification, AutoModelForSequenceClassification)
SCORED = [n for n in FORMS if AUTO[1]._model_mapping.get(type(ARCHITECTURES[n]()), None)]
"""Those of which transformers has reward models."""


def numbers(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Values of all answers, and scores, of ROWS."""
    prompts, answers = map(ragged, zip(*ROWS, strict=True))
    packed = pack(prompts, answers, np.arange(len(ROWS)), whole=True)
    values, scores = torch.zeros(len(answers.values)), torch.zeros(len(ROWS))
    with torch.no_grad():
        value, score = predict_values_and_scores(module, packed, torch.device("cpu"))
    values[torch.from_numpy(packed.tokens)] = value
    scores[torch.from_numpy(packed.rows)] = score
    return values, scores


def eager(folder: Path, head: nn.Module) -> tuple[Tensor, Tensor]:
    """The same by transformers' backbone and this linear, one row at a time."""
    body = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        each = [head(body(torch.tensor([a + b])).last_hidden_state)[0, :, 0] for a, b in ROWS]
    values = [said[len(a) - 1 : -1] for said, (a, _) in zip(each, ROWS, strict=True)]
    return torch.cat(values), torch.stack([said[-1] for said in each])


def require_close(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def randomised(module: nn.Module) -> Any:
    randomise(scalar_head(module))
    return module


@pytest.mark.long
@pytest.mark.parametrize("name", FORMS)
def test_a_critic_of_each_architecture_is_trained_saved_and_read_back(
    tmp_path: Path, name: str
) -> None:
    base = tiny(name, tmp_path / "base", **ROOM.get(name, {}))
    critic = load_model(Model("critic", str(base), head="scalar", trainable=True), "cpu")
    assert all(not said.any() for said in numbers(critic))
    randomised(critic)
    save_model(critic, tmp_path / "saved")
    require_close(numbers(critic), eager(tmp_path / "saved", scalar_head(critic)))
    again = load_model(Model("critic", str(tmp_path / "saved"), head="scalar"), "cpu")
    for one, other in zip(pieces(critic), pieces(again), strict=True):
        assert one.name == other.name
        assert torch.equal(one.data, other.data)
    known = [auto._model_mapping.get(type(critic.config), None) for auto in AUTO]
    if any(known):  # else its class is made here
        assert type(critic) in known
        told = type(critic).from_pretrained(tmp_path / "saved", output_loading_info=True)[1]
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]


@pytest.mark.long
@pytest.mark.parametrize("name", SCORED)
def test_a_reward_model_of_transformers_says_the_same(tmp_path: Path, name: str) -> None:
    tiny(name, tmp_path, **ROOM.get(name, {}))
    torch.manual_seed(1)
    theirs = AUTO[1].from_pretrained(tmp_path, num_labels=1, attn_implementation="eager")
    randomised(theirs).save_pretrained(tmp_path)
    ours = load_model(Model("rm", str(tmp_path), head="scalar"), "cpu")
    with torch.no_grad():
        wanted = [theirs(torch.tensor([a + b])).logits[0, 0] for a, b in ROWS]
    torch.testing.assert_close(numbers(ours)[1], torch.stack(wanted), atol=1e-5, rtol=1e-5)
    save_model(ours, tmp_path / "saved")
    read = AUTO[1].from_pretrained(tmp_path / "saved")
    for one, other in zip(read.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_weights_lie_where_an_allocator_would_have_them(tmp_path: Path) -> None:
    # From a file's memory at an odd address a head has other bits on some processors.
    base = str(tiny("qwen2", tmp_path / "base"))
    critic = load_model(Model("critic", base, head="scalar", trainable=True), "cpu")
    nn.init.normal_(scalar_head(critic).weight)
    save_model(critic, tmp_path / "critic")
    read_back = load_model(Model("critic", str(tmp_path / "critic"), head="scalar"), "cpu")
    assert {weight.data_ptr() % 64 for weight in read_back.parameters()} == {0}


def test_a_token_classifier_with_another_name_for_its_head_is_read(tmp_path: Path) -> None:
    base = tiny("gpt2", tmp_path / "base")
    theirs = GPT2ForTokenClassification.from_pretrained(base, num_labels=1)
    theirs.save_pretrained(tmp_path / "rm")
    character_tokenizer().save_pretrained(tmp_path / "rm")
    ours = load_model(Model("rm", str(tmp_path / "rm"), head="scalar"), "cpu")
    require_close(numbers(ours), eager(tmp_path / "rm", theirs.classifier))


def test_a_head_that_is_missing_is_refused_in_a_class_that_is_made_here(tmp_path: Path) -> None:
    base = str(tiny("granite", tmp_path))
    with pytest.raises(KernelError, match=r"expected a trained score head \(score.weight\)"):
        load_model(Model("rm", base, head="scalar"), "cpu")


@pytest.mark.parametrize("name", ["granite", "opt"])
def test_a_critic_is_trained_and_goes_on_with_the_same_bits(tmp_path: Path, name: str) -> None:
    base, rows = str(tiny(name, tmp_path / "base")), random_rows(4, 2)
    loss = training.loss_of(losses.VALUE, clip=None)
    returns = token_column(rows, "returns", schema=Returns)
    first, second = (training.opened(base, loss, head="scalar") for _ in range(2))
    before = training.weights_of(first)
    first.step(training.assignment(rows, 1, value_loss__returns=returns))
    first.save(tmp_path / "saved")
    second.restore(tmp_path / "saved")
    for kernel in (first, second):
        kernel.step(training.assignment(rows, 2, value_loss__returns=returns))
    found = training.weights_of(first)
    assert training.distance(found, training.weights_of(second)) == 0.0
    assert all(not torch.equal(found[n], before[n]) for n in found if "score" in n)
