"""Distillation and regression against their textbook forms, in the train kernel too."""

from __future__ import annotations

import math
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
from dataflow.loss import Now, Tensors
from dataflow.model import Model
from dataflow.schema import Logprobs, Reward, Rollout, Values
from dataflow.top_logprobs import TopLogprobs
from dataflow.user import Columns
from operators import advantage_formulas, losses
from operators import loss_formulas as formulas
from operators.data import prompts
from operators.forward import logprobs, scores, values
from operators.generate import generate
from operators.kernels.torch import attention, heads
from operators.kernels.torch.forward import TorchLogprobs, TorchScores
from operators.losses import distillation_loss, regression_loss
from operators.train import train
from tests.kit.graphs import graph_of, sampled
from tests.kit.kernels import open_kernel, rows_chunk
from tests.kit.plans import headers
from tests.kit.rows import padded_logits, plain, random_rows
from tests.kit.training import assignment, loss_of, opened, token_column

VOCABULARY = 6
TAILS = ("bucket", "drop", "renormalise")


def with_rest(logprobs: Tensor) -> Tensor:
    """One more: what is left of the vocabulary."""
    left = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=1e-7)
    return torch.cat([logprobs, left.log()], -1)


def divergence(
    student: Tensor, teacher: Tensor, direction: str, tail: str, vocabulary: int = VOCABULARY
) -> Tensor:
    """[tokens]: of two distributions over some of the vocabulary."""
    if tail == "renormalise":
        student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    elif tail == "bucket" and student.shape[1] < vocabulary:
        student, teacher = with_rest(student), with_rest(teacher)
    p, q = (teacher, student) if direction == "forward" else (student, teacher)
    return (p.exp() * (p - q)).sum(-1)


@st.composite
def distributions(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    """Log-probs of student and teacher for some tokens, over the whole vocabulary; mask; k."""
    size = draw(st.integers(1, 4))
    row = st.lists(st.floats(-4, 4), min_size=VOCABULARY, max_size=VOCABULARY)
    logits = st.lists(row, min_size=size, max_size=size)
    student, teacher = (
        torch.tensor(draw(logits), dtype=torch.float64).log_softmax(-1) for _ in range(2)
    )
    mask = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=size, max_size=size))
    return student, teacher, torch.tensor(mask), draw(st.integers(1, VOCABULARY))


def now_of(mask: list[float], kind: Any = torch.float64, **given: Any) -> Now:
    """One row of these tokens."""
    where = torch.zeros(len(mask), dtype=torch.int64)
    sizes = {"rows": 1, "groups": 1, "row": where, "group": where, "row_group": where[:1]}
    return Now(mask=torch.tensor(mask, dtype=kind), step=1, vocabulary=VOCABULARY, **sizes, **given)


def require_alike(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], **how: float) -> None:
    """The same losses, and the same slopes of them. Each: a loss, and what it is a function of."""
    slopes = [torch.autograd.grad(loss.sum(), of)[0] for loss, of in (ours, theirs)]
    torch.testing.assert_close(ours[0], theirs[0], **how)
    torch.testing.assert_close(*slopes, **how)


@pytest.mark.long
@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("tail", TAILS)
@settings(max_examples=25)
@given(drawn=distributions())
def test_the_divergence_of_the_likeliest_tokens(drawn: Any, tail: Any, direction: Any) -> None:
    student, teacher, mask, k = drawn
    ids = teacher.topk(k).indices
    likeliest = teacher.gather(1, ids)
    ours, theirs = (student.gather(1, ids).requires_grad_() for _ in range(2))
    foreign = mask[:, None] == 0
    ports = Tensors[TopLogprobs]({"top_logprobs": likeliest.masked_fill(foreign, math.nan)})
    now = now_of(mask.tolist(), at_ids=ours)
    terms = formulas.distillation(now, ports, direction=direction, tail=tail)
    exact = divergence(theirs, likeliest, direction, tail) * mask
    require_alike((terms.loss, ours), (exact, theirs), rtol=1e-6, atol=1e-8)
    total, count = terms.metrics["distill/teacher_mass"]
    mass = float((likeliest.exp().sum(-1) * mask).sum())
    assert (float(total), float(count)) == pytest.approx((mass, float(mask.sum())), abs=1e-9)


@pytest.mark.parametrize("tail", TAILS)
@settings(max_examples=20)
@given(drawn=distributions())
def test_with_the_whole_vocabulary_every_tail_is_the_exact_divergence(
    drawn: Any, tail: Any
) -> None:
    student, teacher, *_ = drawn
    now = now_of([1.0] * len(student), at_ids=student)
    ports = Tensors[TopLogprobs]({"top_logprobs": teacher})
    loss = formulas.distillation(now, ports, direction="forward", tail=tail).loss
    exact = torch.nn.functional.kl_div(student, teacher, reduction="none", log_target=True)
    torch.testing.assert_close(loss, exact.sum(-1), rtol=1e-9, atol=1e-12)


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
@settings(max_examples=20)
@given(error=st.lists(st.floats(-3, 3), min_size=1, max_size=5), hole=st.integers(0, 4))
def test_regression_of_rows(error: list[float], hole: int, huber: float | None) -> None:
    """Of one token each, one of them perhaps not trained. That of tokens: test_loss_numbers.py."""
    each = torch.arange(len(error))
    mask = (each != hole).double()
    said = torch.tensor(error, dtype=torch.float64).requires_grad_()
    sizes = {"rows": len(error), "groups": len(error)}
    now = Now(mask=mask, step=1, row=each, group=each, row_group=each, scores=said, **sizes)
    goal = torch.zeros(len(error), dtype=torch.float64).masked_fill(mask == 0, math.nan)
    terms = formulas.row_regression(now, Tensors[Any]({"reward": goal}), huber=huber)
    squares = torch.nn.functional.huber_loss(
        said, torch.zeros_like(said), delta=huber or 9.0, reduction="none"
    )
    require_alike((terms.loss, said), (squares * mask, said), rtol=0, atol=1e-12)
    assert float(terms.metrics["regression/squared_error"][1]) == float(mask.sum())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each pass through a model."""
    passes: list[str] = []
    for name in ("forward", "compute_hidden"):
        real = getattr(attention, name)

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
    names = ("logprobs", "top_ids", "top_logprobs")
    scorer = open_kernel(TorchLogprobs(), bases["llama"], returns=names, top_k=k)
    (teacher,) = scorer.run(rows_chunk(rows))
    loss = loss_of(losses.DISTILLATION, direction="reverse", tail="bucket")
    loss += loss_of(losses.KL, kind="k2", weight=0.1) + loss_of(losses.ENTROPY, weight=-0.01)
    kernel = opened(base, loss, lr=1e-30, clip_norm=1e9)
    passes = counted(monkeypatch)
    reference = token_column(rows, "logprobs", low=-5.0, high=-3.0)
    ports = {"distillation_loss__teacher": teacher, "kl_loss__reference": reference}
    metrics = kernel.step(assignment(rows, 1, **ports))
    assert passes == ["forward"]
    # Each term alone, from a padded forward of transformers.
    module = plain(base)
    ours = torch.cat(padded_logits(module, rows)).log_softmax(-1)
    theirs = torch.cat(padded_logits(plain(bases["llama"]), rows)).log_softmax(-1).detach()
    best, alike = theirs.topk(k), ("reverse", "bucket", 98)
    written = torch.from_numpy(rows.ragged("completion_ids").values.astype(np.int64))
    near = torch.from_numpy(reference.ragged("logprobs").values.copy())
    away = ours.gather(1, written[:, None])[:, 0] - near
    terms = {
        "distillation_loss": divergence(ours.gather(1, best.indices), best.values, *alike),
        "kl_loss": away.square() / 2,
        "entropy_loss": (ours.exp() * ours).sum(-1),
    }
    mask = torch.from_numpy(rows.ragged("completion_mask").values.astype(np.float32))
    means = {name: (x * mask).sum() / mask.sum() for name, x in terms.items()}
    for name, mean in means.items():
        assert metrics[f"loss/{name}"] == pytest.approx(float(mean.detach()), rel=2e-4), name
    (means["distillation_loss"] + 0.1 * means["kl_loss"] - 0.01 * means["entropy_loss"]).backward()
    norms = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None])
    assert metrics["optim/grad_norm"] == pytest.approx(float(norms.norm()), rel=1e-3)


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
    metrics = trainer.step(assignment(rows, 1, **ports))
    assert passes == ["compute_hidden"]
    trained = [rows.ragged("completion_mask")[i].any() for i in range(len(rows))]
    expected = ((read - goal)[trained] ** 2 / 2).mean()
    assert metrics["loss/regression_loss"] == pytest.approx(expected, rel=1e-4)


def test_teacher_advantage_is_the_gap_of_log_probs_where_trained() -> None:
    rows = random_rows(2, 3)
    teacher = token_column(rows, "logprobs", low=-9.0, high=0.0)
    advantages = advantage_formulas.teacher_advantage(
        Columns(rows, Rollout), Columns(teacher, Logprobs)
    )
    gap = teacher.ragged("logprobs").values - rows.ragged("sampler_logprobs").values
    expected = np.where(rows.ragged("completion_mask").values, gap, 0.0)
    np.testing.assert_allclose(advantages["advantage"].values, expected, atol=1e-6)


def test_distillation_asks_for_the_teachers_likeliest_tokens() -> None:
    rollout, large = sampled(), Model("teacher", "large")

    def check_with(teacher: Any, **how: Any) -> None:
        check(graph_of(rollout, distillation_loss(teacher, **how)), headers)

    with pytest.raises(
        GraphError, match=r"expected TopLogprobs .*Fix: logprobs\(teacher, rollout, top_k=64\)"
    ):
        check_with(logprobs(large, rollout))
    teacher = logprobs(large, rollout, top_k=8)
    check_with(teacher, direction="forward", tail="drop")
    for wrong in ({"direction": "both"}, {"tail": "cut"}):
        with pytest.raises(GraphError, match=r"expected (direction|tail) to be '"):
            check_with(teacher, **wrong)


def test_regression_knows_its_target() -> None:
    sampler = Model("sampler", "tiny")
    rollout = generate(sampler, prompts("d.jsonl", batch=4), n=2, max_tokens=8)
    critic = Model("critic", "tiny", trainable=True, head="scalar")
    slow = Model("slow", "tiny", head="scalar", follows=critic, rate=0.1)

    def check_with(target: Any) -> Any:
        """The function of the loss, once the check has passed."""
        loss = regression_loss(target)
        check(Graph("g", train(critic, rollout, loss=loss, lr=1e-6)), headers)
        return loss.terms[0].function

    assert check_with(scores(slow, rollout)) == losses.ROW_REGRESSION
    assert check_with(values(slow, rollout)) == losses.TOKEN_REGRESSION
    with pytest.raises(GraphError, match=r"expected Reward .*found Logprobs"):
        check_with(logprobs(sampler, rollout))
