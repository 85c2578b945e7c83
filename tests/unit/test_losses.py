"""Formulas against plain loops over rows and tokens, and the identities that tie them together."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dataflow.errors import GraphError
from dataflow.loss import Now, Tensors, Terms
from dataflow.model import linear
from dataflow.node import Node, Port
from dataflow.operator import Nothing, Operator
from dataflow.schema import Advantage, Logprobs, Preference, Returns, Reward, Rollout, Values
from operators import loss_formulas, losses, policy_formulas
from operators.importance import Importance

LENGTHS = [3, 1, 4, 2]
ROW_GROUP = [0, 0, 1, 1]
TOKENS = sum(LENGTHS)
MASK = np.array([1, 0, 1, 1, 1, 1, 0, 1, 1, 1], dtype=np.float32)
ROW = np.repeat(np.arange(4), LENGTHS)


def drawn(seed: int, low: float = -2.0, high: float = 0.0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, TOKENS).astype(np.float32)


def now(**given: Any) -> Now:
    row, row_group = torch.from_numpy(ROW), torch.tensor(ROW_GROUP)
    logprobs, sampler = torch.from_numpy(drawn(0)).requires_grad_(), torch.from_numpy(drawn(1))
    where = {"row": row, "group": row_group[row], "row_group": row_group, "rows": 4, "groups": 2}
    fields = {"logprobs": logprobs, "sampler_logprobs": sampler} | given
    return Now(mask=torch.from_numpy(MASK), step=1, **where, **fields)


def port(**columns: np.ndarray) -> Tensors[Any]:
    return Tensors({name: torch.from_numpy(values) for name, values in columns.items()})


def by_token(formula: Callable[[int], float]) -> np.ndarray:
    return np.array([formula(t) for t in range(TOKENS)])


def same_where_trained(found: Tensor, wanted: np.ndarray) -> None:
    np.testing.assert_allclose((found.detach().numpy() * MASK), wanted * MASK, rtol=2e-5, atol=1e-6)


def gradient(terms: Terms, of: Now) -> np.ndarray:
    given = of.logprobs if of.logprobs is not None else of.values
    assert given is not None
    weight = of.mask if len(terms.loss) == TOKENS else torch.ones_like(terms.loss)
    (found,) = torch.autograd.grad((terms.loss * weight).sum(), given)
    return found.numpy()


@pytest.mark.parametrize("clip", [0.2, (0.1, 0.3)])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dual", [None, 1.5])
def test_clipped_policy_by_hand(clip: Any, kl: str, dual: float | None) -> None:
    gain, old, reference, is_now = drawn(2, -1, 1), drawn(3), drawn(4), now()
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    assert is_now.logprobs is not None
    logprobs = is_now.logprobs.detach().numpy()
    held = 0

    def formula(t: int) -> float:
        nonlocal held
        ratio = math.exp(logprobs[t] - old[t])
        free, bound = -gain[t] * ratio, -gain[t] * min(max(ratio, 1 - low), 1 + high)
        loss = max(free, bound)
        held += int(bound > free) * int(MASK[t])
        if dual is not None and gain[t] < 0:
            loss = min(loss, -gain[t] * dual)
        d = logprobs[t] - reference[t]
        return loss + 0.3 * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kl]

    wanted = by_token(formula)
    ports = port(advantage=gain), port(logprobs=old), port(logprobs=reference)
    terms = policy_formulas.clipped_policy(
        is_now, *ports, clip=clip, beta=0.3, kl=kl, dual_clip=dual
    )
    same_where_trained(terms.loss, wanted)
    total, count = terms.metrics["policy/clip_fraction"]
    assert (float(total), float(count)) == (held, MASK.sum())
    assert "policy/kl_reference" in terms.metrics


def test_old_none_is_what_the_sampler_recorded() -> None:
    is_now, gain = now(), port(advantage=drawn(2, -1, 1))
    assert is_now.sampler_logprobs is not None
    given = policy_formulas.clipped_policy(
        is_now, gain, Tensors({"logprobs": is_now.sampler_logprobs})
    )
    assert torch.equal(policy_formulas.clipped_policy(is_now, gain).loss, given.loss)
    with pytest.raises(GraphError, match=r"clipped_policy_loss: expected the sampler's log-probs"):
        policy_formulas.clipped_policy(now(sampler_logprobs=None), gain)


def test_at_ratio_one_the_clipped_gradient_is_the_policy_gradient() -> None:
    is_now, gain = now(), drawn(2, -1, 1)
    assert is_now.logprobs is not None
    same = Tensors({"logprobs": is_now.logprobs.detach()})
    clipped = gradient(policy_formulas.clipped_policy(is_now, port(advantage=gain), same), is_now)
    plain = gradient(policy_formulas.policy_gradient(is_now, port(advantage=gain)), is_now)
    np.testing.assert_allclose(clipped, plain, atol=1e-6)
    np.testing.assert_allclose(plain, -gain * MASK, atol=1e-6)


def test_decoupled_policy_by_hand() -> None:
    gain, near = drawn(2, -1, 1), drawn(3)
    is_now = now(sampler_logprobs=torch.from_numpy(drawn(5, -4, 0)))
    assert is_now.logprobs is not None
    assert is_now.sampler_logprobs is not None
    logprobs, sampled = is_now.logprobs.detach().numpy(), is_now.sampler_logprobs.numpy()

    def formula(t: int, over: str) -> float:
        weight = math.exp(near[t] - sampled[t])
        if weight > 2.0:
            weight = 0.0 if over == "mask" else 2.0
        u = math.exp(logprobs[t] - near[t])
        return weight * max(-gain[t] * u, -gain[t] * min(max(u, 0.8), 1.2))

    ports = port(advantage=gain), port(logprobs=near)
    for over in ("mask", "truncate"):
        correction = Importance(above=2.0, over=over)
        terms = policy_formulas.decoupled_policy(is_now, *ports, correction=correction)
        same_where_trained(terms.loss, by_token(lambda t, over=over: formula(t, over)))
    assert 0 < float(terms.metrics["policy/importance_bounded"][0]) < MASK.sum()


def test_decoupled_with_the_sampler_as_proximal_is_ppo() -> None:
    is_now, gain = now(), port(advantage=drawn(2, -1, 1))
    assert is_now.sampler_logprobs is not None
    near = Tensors({"logprobs": is_now.sampler_logprobs})
    ours, ppo = (
        policy_formulas.decoupled_policy(is_now, gain, near),
        policy_formulas.clipped_policy(is_now, gain),
    )
    assert torch.allclose(ours.loss, ppo.loss)
    np.testing.assert_allclose(gradient(ours, is_now), gradient(ppo, is_now), atol=1e-7)


def test_decoupled_at_the_proximal_policy_has_the_weighted_gradient() -> None:
    is_now, gain = now(), drawn(2, -1, 1)
    assert is_now.logprobs is not None
    assert is_now.sampler_logprobs is not None
    near = is_now.logprobs.detach()
    weight = (near - is_now.sampler_logprobs).exp().numpy()
    ports = port(advantage=gain), Tensors({"logprobs": near})
    terms = policy_formulas.decoupled_policy(is_now, *ports, correction=Importance(above=None))
    np.testing.assert_allclose(gradient(terms, is_now), -weight * gain * MASK, rtol=1e-5, atol=1e-6)


def test_value_by_hand() -> None:
    values, goal, old = drawn(0), drawn(2, -1, 1), drawn(3)
    is_now = now(logprobs=None, values=torch.from_numpy(values).requires_grad_())

    def formula(t: int, clip: float | None) -> float:
        free = (values[t] - goal[t]) ** 2
        if clip is None:
            return free / 2
        held = old[t] + min(max(values[t] - old[t], -clip), clip)
        return max(free, (held - goal[t]) ** 2) / 2

    for clip in (None, 0.3):
        terms = loss_formulas.value(is_now, port(returns=goal), port(values=old), clip=clip)
        same_where_trained(terms.loss, by_token(lambda t, clip=clip: formula(t, clip)))


def test_entropy_and_supervised_by_hand() -> None:
    spread = drawn(6, 0, 3)
    is_now = now(entropy=torch.from_numpy(spread))
    same_where_trained(loss_formulas.entropy(is_now).loss, -spread)
    total, count = loss_formulas.entropy(is_now).metrics["policy/entropy"]
    mean = float((spread * MASK).sum() / MASK.sum())
    assert float(total) / float(count) == pytest.approx(mean, rel=1e-5)
    same_where_trained(loss_formulas.supervised(is_now).loss, -drawn(0))


def row_margins(logprobs: np.ndarray, reference: np.ndarray) -> list[float]:
    gaps = (logprobs - reference) * MASK
    return [sum(gaps[t] for t in range(TOKENS) if ROW[t] == r) for r in range(4)]


def test_dpo_by_hand() -> None:
    is_now, reference, sign = now(), drawn(4), [1, -1, -1, 1]
    assert is_now.logprobs is not None
    margins = row_margins(is_now.logprobs.detach().numpy(), reference)
    pairs = Tensors[Preference]({"sign": torch.tensor(sign, dtype=torch.int8)})
    terms = loss_formulas.dpo(is_now, pairs, port(logprobs=reference), beta=0.5)
    logits = [0.5 * sum(margins[r] * sign[r] for r in members) for members in ((0, 1), (2, 3))]
    wanted = [math.log1p(math.exp(-x)) for x in logits]
    np.testing.assert_allclose(terms.loss.detach().numpy(), wanted, rtol=1e-5)
    assert float(terms.metrics["dpo/accuracy"][0]) == sum(x > 0 for x in logits)


def test_dpo_of_a_huge_margin_is_finite() -> None:
    is_now = now()
    pairs = Tensors[Preference]({"sign": torch.tensor([1, -1, -1, 1])})
    terms = loss_formulas.dpo(is_now, pairs, port(logprobs=drawn(4)), beta=1e6)
    assert torch.isfinite(terms.loss).all()
    assert np.isfinite(gradient(terms, is_now)).all()


def test_trajectory_balance_by_hand_and_its_gradient() -> None:
    is_now, reference, beta = now(), drawn(4), 0.7
    score = np.array([1.0, 0.0, 0.5, -1.0], dtype=np.float32)
    assert is_now.logprobs is not None
    margins = row_margins(is_now.logprobs.detach().numpy(), reference)
    gaps = [m - s / beta for m, s in zip(margins, score, strict=True)]
    ports = port(reward=score), port(logprobs=reference)
    terms = loss_formulas.trajectory_balance(is_now, *ports, beta=beta)
    mean = [sum(gaps[:2]) / 2, sum(gaps[2:]) / 2]
    squares = [(gaps[r] - mean[ROW_GROUP[r]]) ** 2 for r in range(4)]
    wanted = [sum(squares[:2]) / 2, sum(squares[2:]) / 2]
    np.testing.assert_allclose(terms.loss.detach().numpy(), wanted, rtol=1e-4)
    # On the group, -(2 / beta) mean(A grad log pi) with A = beta * (mean gap - gap).
    advantage = [beta * (mean[ROW_GROUP[r]] - gaps[r]) for r in range(4)]
    by_hand = [-(2 / beta) * advantage[ROW[t]] / 2 * MASK[t] for t in range(TOKENS)]
    np.testing.assert_allclose(gradient(terms, is_now), by_hand, rtol=1e-4, atol=1e-5)


INFINITE = port(logprobs=np.where(MASK == 0, -np.inf, drawn(3)).astype(np.float32))
GAIN, ONES = port(advantage=drawn(2)), np.ones(4, dtype=np.float32)


@pytest.mark.parametrize("formula", [
    lambda n: policy_formulas.clipped_policy(n, GAIN, INFINITE, INFINITE, beta=0.1),
    lambda n: policy_formulas.decoupled_policy(n, GAIN, INFINITE),
    lambda n: loss_formulas.dpo(n, port(sign=np.array([1, -1, 1, -1])), INFINITE),
    lambda n: loss_formulas.trajectory_balance(n, port(reward=ONES), INFINITE, beta=1.0),
    lambda n: policy_formulas.policy_gradient(n, GAIN),
])  # fmt: skip
def test_a_masked_token_gives_no_gradient_even_where_its_columns_are_infinite(
    formula: Callable[[Now], Terms],
) -> None:
    is_now = now()
    found = gradient(formula(is_now), is_now)
    assert np.isfinite(found).all()
    assert (found[MASK == 0] == 0).all()
    assert (found[MASK == 1] != 0).any()


def port_of(schema: Any, name: str = "x") -> Port[Any]:
    operator = Operator(path="t:T", name=name, work="host", rows=Nothing(), outputs=(schema,))
    return Node(operator, name).port()


def test_constructors_name_ports_and_parameters() -> None:
    params = {"clip": (0.2, 0.28), "beta": linear(0.1, 0.0, 5)}
    clipped = losses.clipped_policy_loss(port_of(Advantage), reference=port_of(Logprobs), **params)
    loss = clipped + 0.01 * losses.entropy_loss()
    bound, inputs = loss.bound()
    assert set(inputs) == {"clipped_policy_loss.advantage", "clipped_policy_loss.reference"}
    assert [t.weight for t in bound.terms] == [1.0, 0.01]
    assert dict(bound.terms[0].params)["clip"] == (0.2, 0.28)
    assert bound.terms[1].function.entropy
    assert bound.terms[0].function.recorded
    assert bound.terms[0].function.zero == (("reference", "beta"),)
    value = losses.value_loss(port_of(Returns), old=port_of(Values), clip=0.2)
    balance = losses.trajectory_balance_loss(port_of(Reward), reference=port_of(Logprobs), beta=0.1)
    pairs = losses.dpo_loss(port_of(Preference), reference=port_of(Logprobs))
    assert value.terms[0].function.head == "scalar"
    assert balance.terms[0].function.scope == pairs.terms[0].function.scope == "group"


def test_every_parameter_of_a_formula_is_given_by_its_constructor() -> None:
    every = [
        losses.clipped_policy_loss(port_of(Advantage)),
        losses.policy_gradient_loss(port_of(Advantage)),
        losses.decoupled_policy_loss(port_of(Advantage), proximal=port_of(Logprobs)),
        losses.entropy_loss(),
        losses.supervised_loss(),
        losses.value_loss(port_of(Returns)),
        losses.dpo_loss(port_of(Preference), reference=port_of(Logprobs)),
        losses.trajectory_balance_loss(port_of(Reward), reference=port_of(Logprobs), beta=0.1),
    ]
    for (term,) in (loss.terms for loss in every):
        assert {name for name, _ in term.params} == set(term.function.parameters)
        assert term.function.name.endswith("_loss")


def test_wrong_calls_say_the_nearest_fix() -> None:
    told = r"beta=0.04 needs reference=, none given\. Fix: reference=logprobs"
    with pytest.raises(GraphError, match=told):
        losses.clipped_policy_loss(port_of(Advantage), beta=0.04)
    with pytest.raises(GraphError, match=r"unknown parameter 'epsilon'.*clip="):
        losses.clipped_policy_loss(port_of(Advantage), epsilon=0.1)  # type: ignore[call-arg]
    with pytest.raises(GraphError, match=r"clip=0\.2 needs old="):
        losses.value_loss(port_of(Returns), clip=0.2)
    with pytest.raises(GraphError, match=r"expected Port\[Advantage\]"):
        losses.policy_gradient_loss(Rollout)  # type: ignore[arg-type]
    assert not dict(losses.CLIPPED_POLICY.limits)["kl"].accepts("k4")


def test_the_formulas_load_no_torch() -> None:
    code = "import sys, operators.losses, operators.optimizers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
