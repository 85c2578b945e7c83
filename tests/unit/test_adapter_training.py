"""Training of adapters and subsets, against plain torch; what stays as it is, what is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dataflow import Model, lora, subset
from dataflow.batch import Batch
from operators.kernels.torch.adapters import find_trained_names, named_trained
from operators.kernels.torch.train import TorchTrain
from tests.kit.kernels import FakeSession
from tests.kit.training import (
    LR,
    assignment,
    distance,
    open_supervised,
    steps_of_rows,
    weights_of,
)

peft: Any = pytest.importorskip("peft")
PARTS = {
    "adapter": {"trainable": True, "adapter": lora(rank=4)},
    "subset": {"trainable": subset(last=1)},
    "norms": {"trainable": subset(parts=("norm",))},
}


def mean_loss(module: Any, rows: Batch) -> Tensor:
    """Minus the mean log-prob of the trained tokens, row by row in plain transformers."""
    prompts, answers = rows.ragged("prompt_ids"), rows.ragged("completion_ids")
    mask = rows.ragged("completion_mask")
    losses: list[Tensor] = []
    for row in range(len(rows)):
        prompt, answer = torch.tensor(prompts[row]), torch.tensor(answers[row])
        logits = module(input_ids=torch.cat([prompt, answer])[None].long()).logits[0]
        predicted = logits[len(prompt) - 1 : -1].log_softmax(-1)
        logprobs = predicted.gather(1, answer[:, None].long())[:, 0]
        losses.append(-logprobs[torch.tensor(mask[row]) > 0])
    return torch.cat(losses).mean()


def train_plainly(module: Any, name: Callable[[str], str]) -> dict[str, Tensor]:
    """The trained weights after all Steps, by the names that a weight edge has."""
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    for rows in steps_of_rows():
        mean_loss(module, rows).backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name(n): p.detach() for n, p in trained.items()}


def train_here(kernel: TorchTrain) -> dict[str, Tensor]:
    for step, rows in enumerate(steps_of_rows(), start=1):
        kernel.step(assignment(rows, step))
    return weights_of(kernel)


def test_an_adapter_is_trained_as_by_peft(base: str, tmp_path: Path) -> None:
    kernel = open_supervised(Model("policy", base, **PARTS["adapter"]))
    kernel.save_weights(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path, is_trainable=True).eval()
    plain_weights = train_plainly(
        theirs, lambda n: n.removeprefix("base_model.model.").replace(".default.", ".")
    )
    assert distance(train_here(kernel), plain_weights) < 1e-5


@pytest.mark.parametrize("part", ["subset", "norms"])
def test_a_subset_is_trained_as_with_requires_grad_off(base: str, part: str) -> None:
    model = Model("policy", base, **PARTS[part])
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    trained_names = find_trained_names(plain, model)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name in trained_names)
    plain_weights = train_plainly(plain, str)
    assert distance(train_here(open_supervised(model)), plain_weights) < 1e-5


@pytest.mark.parametrize("part", PARTS)
def test_what_is_not_trained_stays_to_the_bit(base: str, part: str) -> None:
    session = FakeSession(seed=5, node="train_policy")
    kernel = open_supervised(Model("policy", base, **PARTS[part]), session)
    module = session.modules["policy"]
    trained_ids = {id(p) for _, p in named_trained(module)}
    before = {n: p.clone() for n, p in module.named_parameters() if id(p) not in trained_ids}
    train_here(kernel)
    for name, parameter in module.named_parameters():
        if id(parameter) not in trained_ids:
            assert torch.equal(parameter, before[name])
            assert parameter.grad is None


@pytest.mark.parametrize("part", PARTS)
def test_layers_that_are_computed_again_change_no_bit(base: str, part: str) -> None:
    model = Model("policy", base, **PARTS[part])
    assert (
        distance(
            train_here(open_supervised(model)),
            train_here(open_supervised(model, recompute="layers")),
        )
        == 0
    )


@pytest.mark.parametrize("part", PARTS)
def test_a_saved_state_goes_on_to_the_bit(base: str, part: str, tmp_path: Path) -> None:
    model = Model("policy", base, **PARTS[part])
    first, second = open_supervised(model), open_supervised(model)
    *earlier, last = enumerate(steps_of_rows(), start=1)
    for step, rows in earlier:
        first.step(assignment(rows, step))
    first.save(tmp_path)
    second.restore(tmp_path)
    for kernel in (first, second):
        kernel.step(assignment(last[1], last[0]))
    assert distance(weights_of(first), weights_of(second)) == 0


def test_the_metrics_say_how_far_an_adapter_is_from_its_base(base: str) -> None:
    kernel = open_supervised(Model("policy", base, **PARTS["adapter"]))
    rows = steps_of_rows()
    metrics = [kernel.step(assignment(rows[step], step + 1)) for step in range(2)]
    weights = weights_of(kernel)
    seconds = [weight for name, weight in weights.items() if ".lora_B." in name]
    expected = torch.cat([weight.flatten() for weight in seconds]).norm()
    assert metrics[1]["adapter/norm"] == pytest.approx(float(expected), rel=1e-6)
    assert 0.0 < metrics[0]["adapter/norm"] < metrics[1]["adapter/norm"]
    numbers = sum(weight.numel() for weight in weights.values())
    assert metrics[0]["adapter/bytes"] == 4 * numbers


def test_a_subset_has_no_metrics_of_an_adapter(base: str) -> None:
    metrics = open_supervised(Model("policy", base, **PARTS["subset"])).step(
        assignment(steps_of_rows()[0])
    )
    assert not [name for name in metrics if name.startswith("adapter/")]
