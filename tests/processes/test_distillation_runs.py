"""Runs that distil a teacher's likeliest tokens: against a plain loop, apart, split, resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dataflow.graph import Graph
from dataflow.model import Model
from engine.api import resume
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import distillation_loss
from operators.optimizers import AdamW
from operators.train import train
from tests.kit import plain_loop as loop
from tests.kit import runs
from tests.kit.models import save_tiny
from tests.kit.rows import padded_logits, plain
from tests.kit.run_graphs import policy_and_prompts
from tests.kit.tiny_runs import TinyRuns

pytestmark = pytest.mark.timeout(240)
LR, T, K = 2e-3, 0.8, 7


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A teacher of another depth."""
    return save_tiny(tmp_path_factory.mktemp("large") / "model", layers=3)


def distilled(folder: Path, large: str, *, top_k: int = K, max_lag: int = 0, **how: Any) -> Graph:
    policy, asked = policy_and_prompts(folder)
    rollout = generate(
        policy, asked, n=2, max_tokens=5, temperature=T, max_lag=max_lag, name="rollout"
    )
    teacher = logprobs(Model("teacher", large), rollout, top_k=top_k)
    loss = distillation_loss(teacher, **how)
    adam = AdamW(eps=loop.EPS)
    return Graph("distilled", train(policy, rollout, loss=loss, lr=LR, optimizer=adam))


def divergence(student: Tensor, teacher: Tensor, direction: str, k: int) -> Tensor:
    """[tokens]: from logits, with what is left as one token."""
    own, told = ((x / T).log_softmax(-1) for x in (student, teacher))
    best = told.topk(k).indices
    p, q = (x.gather(1, best) for x in (own, told))
    if k < own.shape[1]:
        p, q = (torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], 1) for x in (p, q))
    p, q = (q, p) if direction == "forward" else (p, q)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize(("direction", "top_k"), [
    ("reverse", K), pytest.param("forward", 98, marks=pytest.mark.long),
])  # fmt: skip
def test_a_run_is_the_plain_loops(
    tiny: TinyRuns, large: str, monkeypatch: pytest.MonkeyPatch, direction: Any, top_k: int
) -> None:
    steps = loop.watched(monkeypatch)
    graph = distilled(tiny.folder, large, direction=direction, top_k=top_k)
    result = tiny.run(graph, 3, inproc=True)
    base = str(tiny.folder / "model")
    learner, teacher = loop.policy(base, LR), plain(large)
    assert len(steps) == 3
    for step in steps:
        now = padded_logits(learner.module, step.rows)
        with torch.no_grad():
            told = padded_logits(teacher, step.rows)
        parts = [divergence(a, b, direction, top_k) for a, b in zip(now, told, strict=True)]
        (update,) = step.updates
        learner.update(loop.token_mean(parts), update, loop.by_row(parts))
        learner.end_step()
    saved, moved = load_file(Path(result.trained["policy"]) / "model.safetensors"), 0.0
    for name, weight in learner.module.named_parameters():
        if name in saved:
            loop.require_close([saved[name]], [weight.detach()], name)
            moved = max(moved, float((weight.detach() - learner.versions[0][name]).abs().max()))
    assert moved > 1e-4
    mass = runs.column(result, "distill/teacher_mass")
    assert all(0 < m < 1 for m in mass) if top_k < 98 else mass == pytest.approx([1.0] * 3)


@pytest.mark.long
def test_apart_and_resumed_it_has_the_same_bits(tiny: TinyRuns, large: str) -> None:
    make = partial(distilled, large=large)
    one = tiny.run(make, 4, name="one", checkpoint_every=2)
    apart = tiny.run(make, 2, name="apart", checkpoint_every=2, pin={"teacher": "other"})
    resume(apart.folder, steps=4)
    require_alike(apart, one, rel=0.0)
    assert runs.weights(apart) == runs.weights(one)


def require_alike(found: Any, wanted: Any, rel: float) -> None:
    for name in ("loss/distillation_loss", "distill/student_mass", "optim/grad_norm"):
        one, other = runs.column(found, name), runs.column(wanted, name)
        assert one == pytest.approx(other, rel=rel, abs=0.0), name


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ranks", "tensor"])
def test_two_ranks_distil_as_one_does(tiny: TinyRuns, large: str, kind: str) -> None:
    make = partial(distilled, large=large)
    one = tiny.run(make, name="one")
    ranks: dict[str, Any] = {kind: {"train_policy": 2}}
    require_alike(tiny.run(make, name="two", **ranks), one, rel=1e-4)
