"""The train kernel: the same update as a naive padded forward, however the rows are cut and packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification

from dataflow.batch import Batch
from dataflow.kernel import Assignment, KernelNode, Layout
from dataflow.loss import Loss, Now, Tensors, Terms, loss_function
from dataflow.model import Model, linear
from dataflow.schema import Logprobs, Returns, Reward
from operators import losses
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.train import TorchTrain
from operators.optimizers import AdamW
from tests.kit.kernels import FakeSession, prompt_chunk
from tests.kit.models import save_tiny
from tests.kit.rows import padded_logprobs, plain, random_rows, rollout, token_column
from tests.kit.training import (
    CLIPPED,
    PG,
    PPO,
    assignment,
    distance,
    opened,
    term,
    weights_of,
    with_advantage,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("train") / "qwen2")


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory, base: str) -> str:
    folder = tmp_path_factory.mktemp("train_critic") / "critic"
    save_tiny(folder)
    AutoModelForTokenClassification.from_pretrained(base, num_labels=1).save_pretrained(folder)
    return str(folder)


def naive_gradients(
    base: str, rows: Batch, loss_of: Callable[[list[Tensor]], Tensor]
) -> dict[str, Tensor]:
    """Of a loss over the rows' log-probs from one padded forward of transformers."""
    module = plain(base)
    loss_of(padded_logprobs(module, rows)).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def gradients(
    base: str, monkeypatch: pytest.MonkeyPatch, loss: Loss, given: Assignment, **params: Any
) -> dict[str, Tensor]:
    """What the kernel hands to its optimizer in a Step of one update."""
    kernel = opened(base, loss, **params)
    found: dict[str, Tensor] = {}

    def kept(lr: float, norm: Tensor) -> None:
        found.update(
            {n: p.grad.clone() for n, p in kernel._module.named_parameters() if p.grad is not None}
        )
        kernel._optimizer.clear()

    monkeypatch.setattr(kernel._optimizer, "step", kept)
    kernel.step(given)
    return found


def masks(rows: Batch) -> list[Tensor]:
    mask = rows.ragged("completion_mask")
    return [torch.from_numpy(mask[i].astype(np.float32)) for i in range(len(rows))]


AGGREGATES: dict[str, Callable[[list[Tensor], list[Tensor]], Tensor]] = {
    "token_mean": lambda x, m: (
        sum((a * b).sum() for a, b in zip(x, m, strict=True)) / sum(b.sum() for b in m)
    ),
    "sequence_mean": lambda x, m: (
        sum((a * b).sum() / b.sum() for a, b in zip(x, m, strict=True) if b.sum())
        / sum(b.sum() > 0 for b in m)
    ),
    "sequence_sum": lambda x, m: (
        sum((a * b).sum() for a, b in zip(x, m, strict=True)) / sum(b.sum() > 0 for b in m)
    ),
    "constant": lambda x, m: sum((a * b).sum() for a, b in zip(x, m, strict=True)) / (9 * 20),
}


@pytest.mark.parametrize("aggregate", list(AGGREGATES))
@pytest.mark.parametrize("tokens", [16384, 24])
def test_gradients_are_those_of_a_padded_forward_with_a_loop_over_rows(
    base: str, monkeypatch: pytest.MonkeyPatch, aggregate: str, tokens: int
) -> None:
    rows = random_rows(4, 3)
    given = with_advantage(rows, name="clipped_policy_loss")
    gain, old = (
        given.inputs["clipped_policy_loss.advantage"].ragged("advantage"),
        rows.ragged("sampler_logprobs"),
    )

    def loss_of(logprobs: list[Tensor]) -> Tensor:
        terms = []
        for i, now in enumerate(logprobs):
            ratio = (now - torch.from_numpy(old[i].copy())).exp()
            a = torch.from_numpy(gain[i].copy())
            terms.append(torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)))
        return AGGREGATES[aggregate](terms, masks(rows))

    wanted = naive_gradients(base, rows, loss_of)
    found = gradients(
        base,
        monkeypatch,
        PPO,
        given,
        aggregate=aggregate,
        tokens=tokens,
        max_tokens=9,
        step_rows=20,
    )
    largest = max(float(g.abs().max()) for g in wanted.values())
    assert largest > 1e-4
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).abs().max()) < 1e-5 * max(1.0, largest), name


def test_a_shared_prompt_and_a_repeated_one_have_the_same_gradient(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(3, 4)
    given = with_advantage(rows)
    shared = gradients(base, monkeypatch, PG, given)
    # A budget of one token: each row is a micro-batch of its own, its prompt computed again.
    repeated = gradients(base, monkeypatch, PG, given, tokens=1)
    assert distance(shared, repeated) < 1e-5
    kernel, alone = opened(base, PG), opened(base, PG, tokens=1)
    assert kernel.step(given)["train/fed_tokens"] < alone.step(given)["train/fed_tokens"] / 2


@pytest.mark.parametrize("tokens", [15, 25])
@pytest.mark.parametrize("split", [(1, 1), (2, 1), (2, 3)])
def test_micro_batches_do_not_change_the_weights(
    base: str, tokens: int, split: tuple[int, int]
) -> None:
    rows = random_rows(6, 3)
    params: dict[str, Any] = {
        "epochs": split[0],
        "minibatches": split[1],
        "optimizer": AdamW(eps=1e-3),
        "lr": 1e-3,
    }
    loss = PPO + 0.1 * Loss((term(losses.ENTROPY),))
    whole, cut = opened(base, loss, **params), opened(base, loss, tokens=tokens, **params)
    before = weights_of(whole)
    for step in (1, 2):
        given = with_advantage(rows, step, name="clipped_policy_loss", seed=step)
        one, many = whole.step(given), cut.step(given)
        assert many["train/micro_batches"] > one["train/micro_batches"]
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


def test_scopes_reduce_over_rows_and_groups(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_row(now: Now) -> Terms:
        assert now.logprobs is not None
        return Terms(-now.row_sum(now.logprobs).square())

    def by_group(now: Now) -> Terms:
        assert now.logprobs is not None
        return Terms(now.group_sum(now.row_sum(now.logprobs)).square())

    rows = random_rows(4, 2)

    def sums(x: list[Tensor], m: list[Tensor]) -> list[Tensor]:
        return [(a * b).sum() for a, b in zip(x, m, strict=True)]

    wanted = {
        "sequence": lambda x: sum(-s.square() for s in sums(x, masks(rows))) / 8,
        "group": lambda x: (
            sum(
                (sums(x, masks(rows))[2 * g] + sums(x, masks(rows))[2 * g + 1]).square()
                for g in range(4)
            )
            / 4
        ),
    }
    assert all(m.sum() for m in masks(rows))
    for scope, fn in (("sequence", by_row), ("group", by_group)):
        function = loss_function(fn, scope=scope, name=scope)  # type: ignore[arg-type]
        expected = naive_gradients(base, rows, wanted[scope])
        largest = max(float(g.abs().max()) for g in expected.values())
        for tokens in (16384, 22):
            found = gradients(
                base, monkeypatch, Loss((term(function),)), assignment(rows), tokens=tokens
            )
            assert distance(found, expected) < 3e-5 * largest


def test_now_has_the_segments_of_its_micro_batch(base: str) -> None:
    seen: list[Now] = []

    def look(now: Now, score: Tensors[Reward]) -> Terms:
        seen.append(now)
        assert score["reward"].shape == (now.rows,)
        assert now.logprobs is not None
        return Terms(now.logprobs * score["reward"][now.row])

    rows = rollout([4, 4, 9], [[1, 2], [1, 2], [3]], [[5, 6], [7], [8, 9, 10]])
    rows = rows.with_columns({"completion_mask": rows.array("completion_mask")})
    score = Batch.make(rows.keys, {"reward": np.array([1.0, 2.0, 3.0], dtype=np.float32)}, Reward)
    kernel = opened(base, Loss((term(loss_function(look, name="look")),)))
    kernel.step(assignment(rows, 3, look__score=score))
    (now,) = seen
    live = [i for i, m in enumerate(masks(rows)) if m.sum()]
    assert (now.rows, now.step) == (len(live), 3)
    assert now.row.tolist() == [
        k for k, i in enumerate(live) for _ in rows.ragged("completion_ids")[i]
    ]
    assert now.version is not None
    assert now.sampler_logprobs is not None
    assert now.version.dtype == torch.int32


def test_old_that_the_plan_answers_with_now_is_ratio_one(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(3, 2)
    clipped = Loss((term(losses.CLIPPED_POLICY, now=("old",), **CLIPPED),))
    a = gradients(base, monkeypatch, clipped, with_advantage(rows, name="clipped_policy_loss"))
    b = gradients(base, monkeypatch, PG, with_advantage(rows))
    assert distance(a, b) < 1e-6


def test_the_temperature_of_the_rollout_divides_the_logits(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(2, 2)
    seen: list[Tensor] = []

    def look(now: Now) -> Terms:
        assert now.logprobs is not None
        seen.append(now.logprobs.detach())
        return Terms(now.logprobs)

    opened(base, Loss((term(loss_function(look)),)), temperature=0.6).step(assignment(rows))
    with torch.no_grad():
        wanted = torch.cat(padded_logprobs(plain(base), rows, 0.6))
    assert torch.allclose(seen[0], wanted, atol=2e-5)


def test_schedules_are_read_at_the_step(base: str) -> None:
    rows = random_rows(2, 2)
    loss = linear(2.0, 0.0, 3)
    kernel = opened(base, Loss((term(losses.SUPERVISED, weight=loss),)), lr=linear(1e-3, 0.0, 3))
    assert [kernel.step(assignment(rows, step))["optim/lr"] for step in (1, 2, 3)] == [
        1e-3,
        5e-4,
        0.0,
    ]
    before = weights_of(kernel)
    kernel.step(assignment(rows, 4))
    assert distance(before, weights_of(kernel)) == 0.0


def test_beta_of_a_schedule_reaches_the_formula(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(2, 2)
    ports = {
        "clipped_policy_loss__advantage": token_column(rows, "advantage"),
        "clipped_policy_loss__reference": token_column(rows, "logprobs", low=-5.0, high=-4.0),
    }
    scheduled = Loss(
        (
            term(
                losses.CLIPPED_POLICY,
                **(CLIPPED | {"beta": linear(0.4, 0.2, 2), "clip": (linear(0.1, 0.3, 2), 0.3)}),
            ),
        )
    )
    fixed = Loss((term(losses.CLIPPED_POLICY, **(CLIPPED | {"beta": 0.2, "clip": (0.3, 0.3)})),))
    a = gradients(base, monkeypatch, scheduled, assignment(rows, 2, **ports))
    b = gradients(base, monkeypatch, fixed, assignment(rows, 2, **ports))
    assert distance(a, b) < 1e-7


def test_a_critic_trains_on_returns(critic: str) -> None:
    rows = random_rows(4, 2)
    goal = token_column(rows, "returns", schema=Returns)
    kernel = opened(critic, Loss((term(losses.VALUE, clip=None),)), head="scalar", lr=1e-2)
    found = [
        kernel.step(assignment(rows, s, value_loss__returns=goal))["loss/value_loss"]
        for s in range(1, 15)
    ]
    assert found[-1] < 0.7 * found[0]


def test_supervised_training_learns_its_rows(base: str) -> None:
    rows = random_rows(4, 2)
    kernel = opened(base, Loss((term(losses.SUPERVISED),)), lr=1e-2)
    found = [kernel.step(assignment(rows, s))["loss/supervised_loss"] for s in range(1, 20)]
    assert found[-1] < 0.5 * found[0]


def test_nothing_to_train_is_counted_and_changes_nothing(base: str) -> None:
    kernel = opened(base, PG, minibatches=2)
    before = weights_of(kernel)
    rows = rollout([1, 2], [[1], [2]], [[], []])
    metrics = kernel.step(with_advantage(rows))
    assert (metrics["optim/updates"], metrics["optim/skipped"]) == (0.0, 2.0)
    assert kernel.step(with_advantage(rows.take(np.zeros(2, dtype=bool))))["optim/updates"] == 0.0
    masked = random_rows(2, 2)
    zeros = np.zeros(len(masked.ragged("completion_ids").values), dtype=np.uint8)
    mask = Batch.make(
        masked.keys, {"completion_mask": masked.ragged("completion_ids").like(zeros)}, Reward
    )
    masked = masked.with_columns({"completion_mask": mask.array("completion_mask")})
    assert kernel.step(with_advantage(masked))["optim/skipped"] == 2.0
    assert distance(before, weights_of(kernel)) == 0.0


def test_steps_before_start_consume_without_training(base: str) -> None:
    rows = random_rows(2, 2)
    kernel = opened(base, PG, start=3)
    before = weights_of(kernel)
    assert [kernel.step(with_advantage(rows, s))["optim/updates"] for s in (1, 2, 3)] == [
        0.0,
        0.0,
        1.0,
    ]
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


def test_params_of_the_planner_that_are_not_for_training_are_passed_over(base: str) -> None:
    metrics = opened(base, PG, intake="exact").step(with_advantage(random_rows(2, 2)))
    assert metrics["optim/updates"] == 1.0
    assert metrics["policy/mismatch_kl"] > 0.0
    assert dataclasses.is_dataclass(AdamW())


def test_mismatch_is_zero_where_the_sampler_is_the_trainer(base: str) -> None:
    rows = random_rows(3, 2)
    with torch.no_grad():
        own = torch.cat(padded_logprobs(plain(base), rows)).numpy()
    same = Batch.make(
        rows.keys, {"sampler_logprobs": rows.ragged("completion_ids").like(own)}, Logprobs
    )
    rows = rows.with_columns({"sampler_logprobs": same.array("sampler_logprobs")})
    assert abs(opened(base, PG).step(with_advantage(rows))["policy/mismatch_kl"]) < 1e-6


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_module_that_generates_and_trains_agrees_with_itself(
    base: str, temperature: float
) -> None:
    session, model = FakeSession(seed=5), Model("policy", base, trainable=True)
    sampler, trainer = TorchGenerate(), TorchTrain()
    sampling = {"n": 3, "max_tokens": 8, "temperature": temperature}
    sampler.open(
        KernelNode(name="r", operator="generate", models={"policy": model}, params=sampling),
        Layout(),
        session,
    )
    params = {"loss": PPO, "lr": 1e-2, "temperature": temperature}
    trainer.open(
        KernelNode(name="t", operator="train", models={"model": model}, params=params),
        Layout(),
        session,
    )

    def rows() -> Batch:
        return Batch.concat(
            list(sampler.run(prompt_chunk(["reverse abc", "reverse xy", "add 1 2"])))
        ).sorted()

    first = rows()
    metrics = trainer.step(with_advantage(first, name="clipped_policy_loss"))
    assert abs(metrics["policy/mismatch_kl"]) < 1e-6
    assert metrics["policy/clip_fraction"] == 0.0
    sampler.load([], 1)
    stale = trainer.step(with_advantage(first, 2, name="clipped_policy_loss"))
    assert stale["policy/mismatch_kl"] > 1e-4
    sampler.load([], 2)
    fresh = trainer.step(with_advantage(rows(), 3, name="clipped_policy_loss"))
    assert abs(fresh["policy/mismatch_kl"]) < 1e-6
