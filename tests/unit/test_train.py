"""The train kernel: the update of a naive padded forward, however the rows are cut and packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dataflow.batch import Batch
from dataflow.kernel import Assignment
from dataflow.loss import Loss, Now, Tensors, Terms, loss_function
from dataflow.model import Model, linear
from dataflow.schema import Reward
from operators import losses
from operators.kernels.torch.generate import TorchGenerate
from operators.optimizers import AdamW
from tests.kit.kernels import FakeSession, open_kernel, prompt_chunk
from tests.kit.rows import padded_logprobs, plain, random_rows, rollout, token_column, with_tokens
from tests.kit.training import (
    CLIPPED,
    PG,
    PPO,
    assignment,
    distance,
    loss_of,
    opened,
    weights_of,
    with_advantage,
)


def naive_gradients(
    base: str, rows: Batch, loss_of: Callable[[list[Tensor]], Tensor]
) -> dict[str, Tensor]:
    """Of a loss over the rows' log-probs from one padded forward of transformers."""
    module = plain(base)
    loss_of(padded_logprobs(module, rows)).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


Gradients = Callable[..., dict[str, Tensor]]


@pytest.fixture
def gradients(base: str, monkeypatch: pytest.MonkeyPatch) -> Gradients:
    """What a kernel hands to its optimizer in a Step of one update."""

    def of(loss: Loss, given: Assignment, **params: Any) -> dict[str, Tensor]:
        kernel = opened(base, loss, **params)
        handed: dict[str, Tensor] = {}

        def keep(lr: float, norm: Tensor) -> None:
            named = kernel._module.named_parameters()
            handed.update({name: p.grad.clone() for name, p in named if p.grad is not None})
            kernel._optimizer.clear()

        monkeypatch.setattr(kernel._optimizer, "step", keep)
        kernel.step(given)
        return handed

    return of


def masks(rows: Batch) -> list[Tensor]:
    mask = rows.ragged("completion_mask")
    return [torch.from_numpy(mask[i].astype(np.float32)) for i in range(len(rows))]


def sums(x: list[Tensor], mask: list[Tensor]) -> list[Tensor]:
    return [(a * b).sum() for a, b in zip(x, mask, strict=True)]


def live(mask: list[Tensor]) -> Any:
    return sum(m.sum() > 0 for m in mask)


AGGREGATES = {
    "token_mean": lambda x, m: sum(sums(x, m)) / sum(b.sum() for b in m),
    "sequence_mean": lambda x, m: (
        sum(s / b.sum() for s, b in zip(sums(x, m), m, strict=True) if b.sum()) / live(m)
    ),
    "sequence_sum": lambda x, m: sum(sums(x, m)) / live(m),
    "constant": lambda x, m: sum(sums(x, m)) / (9 * 20),
}


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("tokens", [16384, 24])
def test_gradients_are_those_of_a_padded_forward_with_a_loop_over_rows(
    base: str, gradients: Gradients, aggregate: str, tokens: int
) -> None:
    rows = random_rows(4, 3)
    step = with_advantage(rows, name="clipped_policy_loss")
    gain = step.inputs["clipped_policy_loss.advantage"].ragged("advantage")
    old = rows.ragged("sampler_logprobs")

    def loss_of(logprobs: list[Tensor]) -> Tensor:
        terms = []
        for i, now in enumerate(logprobs):
            ratio = (now - torch.from_numpy(old[i].copy())).exp()
            a = torch.from_numpy(gain[i].copy())
            terms.append(torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)))
        return AGGREGATES[aggregate](terms, masks(rows))

    expected = naive_gradients(base, rows, loss_of)
    handed = gradients(PPO, step, aggregate=aggregate, tokens=tokens, max_tokens=9, step_rows=20)
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 1e-4
    for name, gradient in expected.items():
        assert float((handed[name] - gradient).abs().max()) < 1e-5 * max(1.0, largest), name


@pytest.mark.parametrize(
    ("tokens", "epochs", "minibatches"), [(15, 1, 1), (25, 2, 1), (15, 2, 3), (25, 2, 3)]
)
def test_micro_batches_do_not_change_the_weights(
    base: str, tokens: int, epochs: int, minibatches: int
) -> None:
    rows = random_rows(6, 3)
    params = {"epochs": epochs, "minibatches": minibatches, "optimizer": AdamW(eps=1e-3)}
    loss = PPO + 0.1 * loss_of(losses.ENTROPY)
    whole, cut = opened(base, loss, **params), opened(base, loss, tokens=tokens, **params)
    before = weights_of(whole)
    for step in (1, 2):
        given = with_advantage(rows, step, name="clipped_policy_loss", seed=step)
        one, many = whole.step(given), cut.step(given)
        assert many["train/micro_batches"] > one["train/micro_batches"]
        # A prompt that several rows share is computed again in each micro-batch.
        assert many["train/fed_tokens"] > one["train/fed_tokens"]
        for name in (
            "loss/clipped_policy_loss",
            "loss/entropy_loss",
            "policy/entropy",
            "optim/grad_norm",
            "policy/clip_fraction",
        ):
            assert many[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert distance(weights_of(whole), weights_of(cut)) < 1e-6
    assert distance(weights_of(whole), before) > 1e-4


def by_row(now: Now) -> Terms:
    return Terms(-now.row_sum(now.logprobs).square())


def by_group(now: Now) -> Terms:
    return Terms(now.group_sum(now.row_sum(now.logprobs)).square())


@pytest.mark.parametrize(("scope", "fn", "wanted"), [
    ("sequence", by_row, lambda sums: sum(-s.square() for s in sums) / 8),
    ("group", by_group, lambda s: sum((s[g] + s[g + 1]).square() for g in (0, 2, 4, 6)) / 4),
], ids=["sequence", "group"])  # fmt: skip
def test_scopes_reduce_over_rows_and_groups(
    base: str, gradients: Gradients, scope: Any, fn: Any, wanted: Any
) -> None:
    rows = random_rows(4, 2)
    assert all(m.sum() for m in masks(rows))
    loss = loss_of(loss_function(fn, scope=scope, name=scope))
    expected = naive_gradients(base, rows, lambda logprobs: wanted(sums(logprobs, masks(rows))))
    largest = max(float(g.abs().max()) for g in expected.values())
    for tokens in (16384, 22):
        assert distance(gradients(loss, assignment(rows), tokens=tokens), expected) < 3e-5 * largest


def test_now_has_the_segments_of_its_micro_batch(base: str) -> None:
    seen: list[Now] = []

    def look(now: Now, score: Tensors[Reward]) -> Terms:
        seen.append(now)
        assert score["reward"].tolist() == [1.0, 3.0]
        return Terms(now.logprobs * score["reward"][now.row])

    drawn = rollout([4, 4, 9], [[1, 2], [1, 2], [3]], [[5, 6], [7], [8, 9, 10]])
    # Nothing of the second row is trained.
    rows = with_tokens(drawn, completion_mask=np.array([1, 0, 0, 1, 1, 1], np.uint8))
    score = Batch.make(rows.keys, {"reward": np.array([1.0, 2.0, 3.0], np.float32)}, Reward)
    kernel = opened(base, loss_of(loss_function(look, name="look")))
    kernel.step(assignment(rows, 3, look__score=score))
    (now,) = seen
    assert (now.rows, now.step, now.row.tolist()) == (2, 3, [0, 0, 1, 1, 1])
    assert now.sampler_logprobs is not None
    assert now.version.dtype == torch.int32


def test_old_that_the_plan_answers_with_now_is_ratio_one(gradients: Gradients) -> None:
    rows = random_rows(3, 2)
    clipped = loss_of(losses.CLIPPED_POLICY, now=("old",), **CLIPPED)
    a = gradients(clipped, with_advantage(rows, name="clipped_policy_loss"))
    assert distance(a, gradients(PG, with_advantage(rows))) < 1e-6


def test_schedules_are_read_at_the_step(base: str) -> None:
    rows = random_rows(2, 2)
    loss = loss_of(losses.SUPERVISED, weight=linear(2.0, 0.0, 3))
    kernel = opened(base, loss, lr=linear(1e-3, 0.0, 3))
    rates = [kernel.step(assignment(rows, step))["optim/lr"] for step in (1, 2, 3)]
    assert rates == [1e-3, 5e-4, 0.0]
    before = weights_of(kernel)
    kernel.step(assignment(rows, 4))
    assert distance(before, weights_of(kernel)) == 0.0


def test_a_scheduled_beta_reaches_the_formula(gradients: Gradients) -> None:
    rows = random_rows(2, 2)
    ports = {
        "clipped_policy_loss__advantage": token_column(rows, "advantage"),
        "clipped_policy_loss__reference": token_column(rows, "logprobs", low=-5.0, high=-4.0),
    }
    scheduled = {"beta": linear(0.4, 0.2, 2), "clip": (linear(0.1, 0.3, 2), 0.3)}
    a, b = (
        gradients(loss_of(losses.CLIPPED_POLICY, **CLIPPED | of), assignment(rows, 2, **ports))
        for of in (scheduled, {"beta": 0.2, "clip": (0.3, 0.3)})
    )
    assert distance(a, b) < 1e-7


def test_nothing_to_train_is_counted_and_changes_nothing(base: str) -> None:
    kernel = opened(base, PG, minibatches=2)
    before = weights_of(kernel)
    rows = rollout([1, 2], [[1], [2]], [[], []])
    metrics = kernel.step(with_advantage(rows))
    assert (metrics["optim/updates"], metrics["optim/skipped"]) == (0.0, 2.0)
    assert kernel.step(with_advantage(rows.take(np.zeros(2, dtype=bool))))["optim/updates"] == 0.0
    rows = random_rows(2, 2)
    masked = with_tokens(rows, completion_mask=np.zeros_like(rows.ragged("completion_mask").values))
    assert kernel.step(with_advantage(masked))["optim/skipped"] == 2.0
    assert distance(before, weights_of(kernel)) == 0.0


def test_steps_before_start_consume_without_training(base: str) -> None:
    rows = random_rows(2, 2)
    kernel = opened(base, PG, start=3)
    before = weights_of(kernel)
    updates = [kernel.step(with_advantage(rows, s))["optim/updates"] for s in (1, 2, 3)]
    assert updates == [0.0, 0.0, 1.0]
    assert distance(before, weights_of(kernel)) > 0.0


def test_the_gradient_is_clipped_to_its_norm(base: str) -> None:
    rows, settings = random_rows(2, 2), AdamW(eps=1e3, betas=(0.0, 0.0))
    moves = []
    for clip in (1e-3, 2e-3):
        kernel = opened(base, PG, clip_norm=clip, optimizer=settings, lr=1.0)
        before = weights_of(kernel)
        assert kernel.step(with_advantage(rows))["optim/grad_norm"] > 2e-3
        after = weights_of(kernel)
        moves.append(np.sqrt(sum(float((after[n] - before[n]).square().sum()) for n in after)))
    assert moves[1] == pytest.approx(2 * moves[0], rel=1e-2)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_module_that_generates_and_trains_is_consistent(base: str, temperature: float) -> None:
    how = {"session": FakeSession(seed=5), "temperature": temperature}
    model = Model("policy", base, trainable=True)
    sampler = open_kernel(TorchGenerate(), model, n=3, max_tokens=8, **how)
    trainer = opened(base, PPO, lr=1e-2, **how)
    prompts = prompt_chunk(["reverse abc", "reverse xy", "add 1 2"])

    def trained(rows: Batch, step: int) -> Mapping[str, float]:
        return trainer.step(with_advantage(rows, step, name="clipped_policy_loss"))

    first = Batch.concat(list(sampler.run(prompts))).sort()
    metrics = trained(first, 1)
    assert abs(metrics["policy/mismatch_kl"]) < 1e-6
    assert metrics["policy/clip_fraction"] == 0.0
    sampler.load([], 1)
    assert trained(first, 2)["policy/mismatch_kl"] > 1e-4
    sampler.load([], 2)
    fresh = Batch.concat(list(sampler.run(prompts))).sort()
    assert abs(trained(fresh, 3)["policy/mismatch_kl"]) < 1e-6
