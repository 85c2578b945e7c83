"""Distillation and regression against plain Python (loops and `math`), in the train kernel too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dataflow.batch import Batch
from dataflow.check import check
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.loss import LossTerm, Now, Tensors, Terms
from dataflow.model import Model
from dataflow.schema import Logprobs, Reward, Rollout, Values
from dataflow.top_logprobs import TopLogprobs
from dataflow.user import Columns
from operators import advantage_formulas, losses
from operators import loss_formulas as formulas
from operators.advantage import teacher_advantage
from operators.data import prompts
from operators.forward import logprobs, scores, values
from operators.generate import generate
from operators.kernels.torch import attention, heads
from operators.kernels.torch.forward import TorchLogprobs, TorchScores
from operators.losses import (
    clipped_policy_loss,
    distillation_loss,
    entropy_loss,
    kl_loss,
    policy_gradient_loss,
    regression_loss,
)
from operators.train import train
from tests.kit.kernels import open_kernel, rows_chunk
from tests.kit.plans import headers
from tests.kit.rows import padded_logits, plain, random_rows
from tests.kit.training import assignment, loss_of, opened, token_column
from tests.kit.training import weights_of as weights_of

VOCABULARY = 6
TAILS = ("bucket", "drop", "renormalise")


def log_softmax(logits: list[float]) -> list[float]:
    most = max(logits)
    total = most + math.log(sum(math.exp(x - most) for x in logits))
    return [x - total for x in logits]


def rest(logprobs: list[float]) -> list[float]:
    return [*logprobs, math.log(max(1e-7, 1 - math.fsum(math.exp(x) for x in logprobs)))]


def divergence(student: list[float], teacher: list[float], direction: str, tail: str) -> float:
    """Of two distributions over some of the vocabulary."""
    if tail == "renormalise":
        student, teacher = log_softmax(student), log_softmax(teacher)
    elif tail == "bucket" and len(student) < VOCABULARY:
        student, teacher = rest(student), rest(teacher)
    p, q = (teacher, student) if direction == "forward" else (student, teacher)
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def slope(student: list[float], teacher: list[float], direction: str, tail: str) -> list[float]:
    """The derivative by each of the student's log-probs, as if these were free."""
    if tail == "renormalise":
        own, other = log_softmax(student), log_softmax(teacher)
        if direction == "forward":
            return [math.exp(s) - math.exp(t) for s, t in zip(own, other, strict=True)]
        whole = divergence(student, teacher, direction, tail)
        return [math.exp(s) * (s - t - whole) for s, t in zip(own, other, strict=True)]
    bucket = tail == "bucket" and len(student) < VOCABULARY
    last, last_t = rest(student)[-1], rest(teacher)[-1]
    found = []
    for s, t in zip(student, teacher, strict=True):
        if direction == "forward":
            found.append(-math.exp(t) + bucket * math.exp(s + last_t - last))
        else:
            found.append(math.exp(s) * (s - t + 1 - bucket * (last - last_t + 1)))
    return found


@st.composite
def distributions(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]], list[float], int]:
    """Log-probs of student and teacher for some tokens, over the whole vocabulary; mask; k."""
    size = draw(st.integers(1, 4))
    row = st.lists(st.floats(-4, 4).map(lambda x: round(x, 6)), min_size=6, max_size=6)
    student, teacher = (
        [log_softmax(logits) for logits in draw(st.lists(row, min_size=size, max_size=size))]
        for _ in range(2)
    )
    mask = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=size, max_size=size))
    return student, teacher, mask, draw(st.integers(1, VOCABULARY))


def now_of(mask: list[float], kind: Any = torch.float64, **given: Any) -> Now:
    """One row of these tokens."""
    where = torch.zeros(len(mask), dtype=torch.int64)
    sizes = {"rows": 1, "groups": 1, "row": where, "group": where, "row_group": where[:1]}
    return Now(mask=torch.tensor(mask, dtype=kind), step=1, vocabulary=VOCABULARY, **sizes, **given)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("tail", TAILS)
@settings(max_examples=25, deadline=None)
@given(drawn=distributions())
def test_the_divergence_of_the_likeliest_tokens(drawn: Any, tail: Any, direction: Any) -> None:
    student, teacher, mask, k = drawn
    ids = [sorted(range(VOCABULARY), key=lambda i: -t[i])[:k] for t in teacher]
    own = [[row[i] for i in at] for row, at in zip(student, ids, strict=True)]
    told = [[row[i] for i in at] for row, at in zip(teacher, ids, strict=True)]
    said = torch.tensor(own, dtype=torch.float64).requires_grad_()
    heard = torch.tensor(told, dtype=torch.float64)
    heard = heard.masked_fill(torch.tensor(mask)[:, None] == 0, math.nan)
    ports = Tensors[TopLogprobs]({"top_logprobs": heard})
    now = now_of(mask, at_ids=said)
    terms = formulas.distillation(now, ports, direction=direction, tail=tail)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), said)
    for t, trained in enumerate(mask):
        wanted = divergence(own[t], told[t], direction, tail) if trained else 0.0
        by_id = slope(own[t], told[t], direction, tail) if trained else [0.0] * k
        assert float(terms.loss[t].detach()) == pytest.approx(wanted, rel=1e-6, abs=1e-9)
        assert gradient[t].tolist() == pytest.approx(by_id, rel=1e-6, abs=1e-8)
    total, count = terms.metrics["distill/teacher_mass"]
    mass = [sum(map(math.exp, row)) for row, m in zip(told, mask, strict=True) if m]
    assert (float(total), float(count)) == pytest.approx((sum(mass), len(mass)), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(drawn=distributions())
def test_with_the_whole_vocabulary_every_tail_is_the_exact_divergence(drawn: Any) -> None:
    student, teacher, _, _ = drawn
    said, told = (torch.tensor(x, dtype=torch.float64) for x in (student, teacher))
    now = now_of([1.0] * len(student), at_ids=said)
    for direction, (p, q) in {"forward": (told, said), "reverse": (said, told)}.items():
        wanted = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        for tail in TAILS:
            ports = Tensors[TopLogprobs]({"top_logprobs": told})
            found = formulas.distillation(now, ports, direction=direction, tail=tail).loss
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("far", [0.0, 30.0, 90.0, 1000.0])
def test_sure_distributions_have_finite_numbers(direction: Any, tail: Any, far: float) -> None:
    logits = torch.tensor([[far, 0.0, -far], [0.0, far, 0.0]], requires_grad=True)
    said = logits.log_softmax(-1)[:, :2]
    told = torch.tensor([[-far, far, 0.0], [0.0, far, 0.0]]).log_softmax(-1)[:, :2]
    now = now_of([1.0, 1.0], torch.float32, at_ids=said)
    ports = Tensors[TopLogprobs]({"top_logprobs": told})
    loss = formulas.distillation(now, ports, direction=direction, tail=tail).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()
    assert float(loss[1].detach()) == pytest.approx(0.0, abs=1e-5)  # they agree
    if tail != "drop":  # which is least elsewhere
        assert gradient[1].abs().max() < 1e-5


@pytest.mark.parametrize("huber", [None, 0.5])
@settings(max_examples=40, deadline=None)
@given(error=st.lists(st.floats(-3, 3), min_size=1, max_size=5), hole=st.integers(0, 4))
def test_regression_of_tokens_and_rows(error: list[float], hole: int, huber: float | None) -> None:
    mask = [0.0 if t == hole else 1.0 for t in range(len(error))]
    target = [math.nan if t == hole else 1.5 for t in range(len(error))]

    def wanted(e: float) -> tuple[float, float]:
        if huber is None or abs(e) <= huber:
            return e * e / 2, e
        return huber * (abs(e) - huber / 2), math.copysign(huber, e)

    said = torch.tensor([1.5 + e for e in error], dtype=torch.float64).requires_grad_()
    pairs = zip(said.tolist(), mask, strict=True)
    by_hand = [wanted(x - 1.5) if m else (0.0, 0.0) for x, m in pairs]
    ports = Tensors[Any]({"values": torch.tensor(target, dtype=torch.float64)})
    terms = formulas.token_regression(now_of(mask, values=said), ports, huber=huber)
    require(terms, said, by_hand)
    every = torch.arange(len(error))
    sizes = {"rows": len(error), "groups": len(error), "row": every, "group": every}
    now = Now(mask=torch.tensor(mask), step=1, row_group=every, scores=said, **sizes)  # type: ignore[arg-type]
    given = Tensors[Any]({"reward": torch.tensor(target, dtype=torch.float64)})
    terms = formulas.row_regression(now, given, huber=huber)
    require(terms, said, by_hand)
    assert float(terms.metrics["regression/squared_error"][1]) == sum(mask)


def require(terms: Terms, said: Tensor, wanted: list[tuple[float, float]]) -> None:
    (gradient,) = torch.autograd.grad(terms.loss.sum(), said)
    assert terms.loss.tolist() == pytest.approx([loss for loss, _ in wanted], abs=1e-12)
    assert gradient.tolist() == pytest.approx([slope for _, slope in wanted], abs=1e-12)


def likeliest(base: str, rows: Batch, k: int) -> Batch:
    names = ("logprobs", "top_ids", "top_logprobs")
    kernel = open_kernel(TorchLogprobs(), base, returns=names, top_k=k)
    (batch,) = kernel.run(rows_chunk(rows))
    return batch


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each pass through a model."""
    passes: list[str] = []
    for name in ("forward", "hidden"):
        real: Callable[..., Any] = getattr(attention, name)

        def call(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
            passes.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(heads, name, call)
    return passes


@pytest.mark.parametrize("k", [4, 98])
def test_all_terms_share_one_forward_pass(
    bases: dict[str, str], monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    base, rows = bases["qwen2"], random_rows(3, 3)
    teacher = likeliest(bases["llama"], rows, k)
    distill = loss_of(losses.DISTILLATION, direction="reverse", tail="bucket")
    kl = loss_of(losses.KL, kind="k2", weight=0.1)
    whole = distill + kl + loss_of(losses.ENTROPY, weight=-0.01)
    kernel = opened(base, whole, lr=1e-30, clip_norm=1e9)
    passes = counted(monkeypatch)
    reference = token_column(rows, "logprobs", low=-5.0, high=-3.0)
    ports = {"distillation_loss__teacher": teacher, "kl_loss__reference": reference}
    found = kernel.step(assignment(rows, 1, **ports))
    assert passes == ["forward"]
    # Each term alone, from a padded forward of transformers.
    module = plain(base)
    said = torch.cat(padded_logits(module, rows)).log_softmax(-1)
    mask = torch.from_numpy(rows.ragged("completion_mask").values.astype(np.float32))
    told = torch.cat(padded_logits(plain(bases["llama"]), rows)).log_softmax(-1).detach()
    best = told.topk(k).indices
    both = [x.gather(1, best) for x in (said, told)]
    if k < 98:
        both = [torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], 1) for x in both]
    apart = (both[0].exp() * (both[0] - both[1])).sum(-1)
    written = torch.from_numpy(rows.ragged("completion_ids").values.astype(np.int64))
    own = said.gather(1, written[:, None])
    away = own[:, 0] - torch.from_numpy(reference.ragged("logprobs").values.copy())
    spread = -(said.exp() * said).sum(-1)
    terms = {"distillation_loss": apart, "kl_loss": away.square() / 2, "entropy_loss": -spread}
    means = {name: (x * mask).sum() / mask.sum() for name, x in terms.items()}
    for name, mean in means.items():
        assert found[f"loss/{name}"] == pytest.approx(float(mean.detach()), rel=2e-4), name
    total = means["distillation_loss"] + 0.1 * means["kl_loss"] - 0.01 * means["entropy_loss"]
    total.backward()
    norms = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None])
    assert found["optim/grad_norm"] == pytest.approx(float(norms.norm()), rel=1e-3)


def test_a_row_is_regressed_where_scores_reads_it_in_one_forward_with_its_values(
    bases: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(3, 2)
    kernel = open_kernel(TorchScores(), Model("m", bases["critic"], head="scalar"))
    (batch,) = kernel.run(rows_chunk(rows))
    read = batch.flat("reward").astype(np.float64)
    goal = np.linspace(-1, 1, len(rows))
    target = Batch.make(rows.keys, {"reward": goal}, Reward)
    near = token_column(rows, "values", schema=Values)
    loss = loss_of(losses.ROW_REGRESSION, huber=None) + loss_of(
        losses.TOKEN_REGRESSION, huber=None, label="tokens"
    )
    trainer = opened(bases["critic"], loss, head="scalar", lr=1e-30)
    passes = counted(monkeypatch)
    ports = {"regression_loss__target": target, "tokens__target": near}
    found = trainer.step(assignment(rows, 1, **ports))
    assert passes == ["hidden"]
    live = np.array([rows.ragged("completion_mask")[i].any() for i in range(len(rows))])
    wanted = ((read - goal)[live] ** 2 / 2).mean()
    assert found["loss/regression_loss"] == pytest.approx(wanted, rel=1e-4)


def test_a_reward_model_learns_its_targets(bases: dict[str, str]) -> None:
    rows = random_rows(4, 2)
    target = Batch.make(rows.keys, {"reward": np.linspace(-1, 1, len(rows))}, Reward)
    trainer = opened(
        bases["critic"], loss_of(losses.ROW_REGRESSION, huber=1.0), head="scalar", lr=3e-3
    )
    given = {"regression_loss__target": target}
    curve = [
        trainer.step(assignment(rows, step, **given))["loss/regression_loss"]
        for step in range(1, 30)
    ]
    assert curve[-1] < 0.2 * curve[0]


def test_teacher_advantage_is_the_gap_of_log_probs_where_trained() -> None:
    rows = random_rows(2, 3)
    teacher = token_column(rows, "logprobs", low=-9.0, high=0.0)
    found = advantage_formulas.teacher_advantage(Columns(rows, Rollout), Columns(teacher, Logprobs))
    mask = rows.ragged("completion_mask").values
    sampler, told = rows.ragged("sampler_logprobs").values, teacher.ragged("logprobs").values
    for t, gain in enumerate(found["advantage"].values.tolist()):
        assert gain == pytest.approx(
            float(told[t]) - float(sampler[t]) if mask[t] else 0.0, abs=1e-6
        )


policy = Model("policy", "tiny", trainable=True)
critic = Model("critic", "tiny", trainable=True, head="scalar")


def test_distillation_asks_for_the_teachers_likeliest_tokens() -> None:
    rollout = generate(policy, prompts("d.jsonl", batch=4), n=2, max_tokens=8)
    large = Model("teacher", "large")
    plainly: Any = logprobs(large, rollout)
    told = r"expected TopLogprobs .*Fix: logprobs\(teacher, rollout, top_k=64\)"
    with pytest.raises(GraphError, match=told):
        check(Graph("g", train(policy, rollout, loss=distillation_loss(plainly), lr=1e-6)), headers)
    teacher = logprobs(large, rollout, top_k=8)
    loss = distillation_loss(teacher, direction="forward", tail="drop")
    check(Graph("g", train(policy, rollout, loss=loss, lr=1e-6)), headers)
    for wrong in ({"direction": "both"}, {"tail": "cut"}):
        given = distillation_loss(teacher, **wrong)  # type: ignore[arg-type]
        with pytest.raises(GraphError, match=r"expected (direction|tail) to be '"):
            check(Graph("g", train(policy, rollout, loss=given, lr=1e-6)), headers)
    sampled = policy_gradient_loss(teacher_advantage(rollout, teacher))
    check(Graph("g", train(policy, rollout, loss=sampled, lr=1e-6)), headers)
    both = clipped_policy_loss(teacher_advantage(rollout, teacher)) + 0.1 * kl_loss(teacher)
    check(Graph("g", train(policy, rollout, loss=both + -0.01 * entropy_loss(), lr=1e-6)), headers)


def test_regression_knows_its_target() -> None:
    rollout = generate(policy, prompts("d.jsonl", batch=4), n=2, max_tokens=8)
    slow = Model("slow", "tiny", head="scalar", follows=critic, rate=0.1)
    found: dict[str, LossTerm] = {
        name: regression_loss(target).terms[0]
        for name, target in {"row": scores(slow, rollout), "tokens": values(slow, rollout)}.items()
    }
    assert found["row"].function.scope == "sequence"
    assert found["row"].function.scores
    assert found["tokens"].function.scope == "token"
    for term in found.values():
        assert term.function.head == "scalar"
        assert term.function.name == "regression_loss"
    loss = regression_loss(scores(slow, rollout), huber=1.0)
    kept = logprobs(policy, rollout)
    imitated = policy_gradient_loss(teacher_advantage(rollout, kept))
    sinks = (
        train(critic, rollout, loss=loss, lr=1e-5),
        train(policy, rollout, loss=imitated, lr=1e-6),
    )
    check(Graph("g", *sinks), headers)
    with pytest.raises(GraphError, match=r"expected Reward .*found Logprobs"):
        check(Graph("g", train(critic, rollout, loss=regression_loss(kept), lr=1e-5)), headers)  # type: ignore[arg-type]
