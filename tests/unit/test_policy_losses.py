"""Policy losses against plain Python (loops and `math`), at kinks and extremes, and as graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.check import check
from dataflow.diff import diff
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.loss import Loss, Now, Tensors, Terms
from dataflow.model import Model, linear
from dataflow.node import Node
from dataflow.snapshot import from_json, to_json
from operators import policy_formulas as formulas
from operators.advantage import group_advantage
from operators.data import demonstrations, prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.importance import Importance, importance
from operators.kernels.torch.train import resolved
from operators.losses import (
    clipped_policy_loss,
    clipped_weight_loss,
    decoupled_policy_loss,
    kl_loss,
    policy_gradient_loss,
    soft_clipped_policy_loss,
)
from operators.reward import reward
from operators.train import train
from tests.kit.plans import headers
from tests.kit.rewards import exact


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens of some rows, as Python numbers; now, old, sampler: log-probs."""

    lengths: list[int]
    mask: list[float]
    now: list[float]
    old: list[float]
    sampler: list[float]
    gain: list[float]

    @property
    def rows(self) -> list[list[int]]:
        """The trained tokens of each row."""
        starts = [sum(self.lengths[:r]) for r in range(len(self.lengths))]
        spans = (range(s, s + n) for s, n in zip(starts, self.lengths, strict=True))
        return [[t for t in span if self.mask[t]] for span in spans]


@st.composite
def drawn(draw: st.DrawFn, far: float = 2.0) -> Drawn:
    """Rows of 1 to 5 tokens with holes, some without a trained token; far: largest log ratio."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    size = sum(lengths)

    def numbers(low: float, high: float) -> list[float]:
        each = st.floats(low, high, allow_nan=False).map(lambda x: round(x, 6))
        return draw(st.lists(each, min_size=size, max_size=size))

    now = numbers(-5.0, 0.0)
    old = [a - x for a, x in zip(now, numbers(-far, far), strict=True)]
    sampler = [a - x for a, x in zip(old, numbers(-far, far), strict=True)]
    mask = draw(st.lists(st.sampled_from([0.0, 1.0, 1.0]), min_size=size, max_size=size))
    return Drawn(lengths, mask, now, old, sampler, numbers(-2.0, 2.0))


def found(d: Drawn, formula: Any, kind: Any = torch.float64, **how: Any) -> tuple[Any, Any, Terms]:
    """The loss of each token where trained, and its gradient, as lists; foreign columns are nan."""
    row = torch.repeat_interleave(torch.arange(len(d.lengths)), torch.tensor(d.lengths))
    mask = torch.tensor(d.mask, dtype=kind)

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=kind).masked_fill(mask == 0, math.nan)

    said = torch.tensor(d.now, dtype=kind).requires_grad_()
    now = Now(
        mask=mask, row=row, group=row, row_group=torch.arange(len(d.lengths)), rows=len(d.lengths),
        groups=len(d.lengths), step=1, logprobs=said, sampler_logprobs=column(d.sampler),
    )  # fmt: skip
    ports = Tensors({"advantage": column(d.gain)}), Tensors({"logprobs": column(d.old)})
    terms = formula(now, *ports, **how)
    kept = terms.loss.masked_fill(mask == 0, 0.0)
    (gradient,) = torch.autograd.grad(kept.sum(), said)
    return kept.tolist(), gradient.tolist(), terms


def exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf


def weight(d: Drawn, row: list[int], t: int, how: Importance | None) -> float:
    """The weight of token t of these trained tokens."""
    if how is None:
        return 1.0
    logs = [d.old[s] - d.sampler[s] for s in row]
    total = {"token": d.old[t] - d.sampler[t], "sequence": sum(logs)}
    w = exp(total.get(how.level, sum(logs) / len(logs)))
    low, high = how.below or 0.0, math.inf if how.above is None else how.above
    assert isinstance(low, float)
    assert isinstance(high, float)
    if how.over == "mask":
        return w if low <= w <= high else 0.0
    return min(max(w, low), high)


def clipped_by_hand(
    d: Drawn, level: str, clip: tuple[float, float], dual: float | None, how: Importance | None
) -> tuple[list[float], list[float]]:
    """Loss and gradient of each token: GSPO's equations 5, 7 and 13, and token ratios."""
    loss, slope = [0.0] * len(d.now), [0.0] * len(d.now)
    for row in d.rows:
        mean = sum(d.now[t] - d.old[t] for t in row) / max(1, len(row))
        for t in row:
            r = exp(d.now[t] - d.old[t] if level == "token" else mean)
            a, w = d.gain[t], weight(d, row, t, how)
            held = -a * min(max(r, 1 - clip[0]), 1 + clip[1])
            worst = max(-a * r, held)
            free = -a * r >= held
            if dual is not None and a < 0 and worst > -a * dual:
                worst, free = -a * dual, False
            loss[t] = w * worst
            for s in row if level == "sequence" else [t]:
                slope[s] += free * w * -a * r / (len(row) if level == "sequence" else 1)
    return loss, slope


CORRECTIONS = [
    None,
    importance(),
    importance(above=1.5, below=0.5, over="mask"),
    importance("sequence", above=3.0),
    importance("sequence", above=3.0, below=0.3, over="mask"),
    importance("geometric", above=1.2, below=0.8),
    importance("geometric", above=1.2, over="mask"),
    importance(above=None),
]


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("dual", [None, 1.5])
@settings(max_examples=25, deadline=None)
@given(d=drawn(), how=st.sampled_from(CORRECTIONS))
def test_clipped_ratios_of_tokens_and_rows(
    d: Drawn, how: Importance | None, level: str, dual: float | None
) -> None:
    given = {"clip": (0.2, 0.28), "level": level, "dual_clip": dual, "correction": how}
    loss, gradient, terms = found(d, formulas.clipped_policy, **given)
    wanted, slope = clipped_by_hand(d, level, (0.2, 0.28), dual, how)
    assert loss == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert gradient == pytest.approx(slope, rel=1e-6, abs=1e-9)
    if how is not None:
        used = [weight(d, row, t, how) for row in d.rows for t in row]
        total, count = terms.metrics["policy/importance_weight"]
        assert (float(total), float(count)) == pytest.approx((sum(used), len(used)), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    d=drawn(), how=st.sampled_from(CORRECTIONS), bounds=st.sampled_from([(0.0, 2.0), (0.8, 1.3)])
)
def test_clipped_weights(d: Drawn, how: Importance | None, bounds: tuple[float, float]) -> None:
    low, high = bounds
    own = {"cap": high} if low == 0.0 else {"clip": (1 - low, high - 1)}
    loss, gradient, terms = found(d, formulas.clipped_weight, correction=how, **own)
    clipped = 0
    for row in d.rows:
        for t in row:
            r = exp(d.now[t] - d.old[t])
            clipped += r < low or r > high
            push = -min(max(r, low), high) * weight(d, row, t, how) * d.gain[t]
            assert gradient[t] == pytest.approx(push, rel=1e-9, abs=1e-12)
            assert loss[t] == pytest.approx(push * d.now[t], rel=1e-9, abs=1e-12)
    assert float(terms.metrics["policy/clip_fraction"][0]) == clipped


@settings(max_examples=60, deadline=None)
@given(d=drawn(), how=st.sampled_from(CORRECTIONS), tau=st.sampled_from([(1.0, 1.05), (5.0, 0.2)]))
def test_soft_clips(d: Drawn, how: Importance | None, tau: tuple[float, float]) -> None:
    own = {"tau_pos": tau[0], "tau_neg": tau[1], "correction": how}
    loss, gradient, _ = found(d, formulas.soft_clipped_policy, **own)
    for row in d.rows:
        for t in row:
            r, k = exp(d.now[t] - d.old[t]), tau[0] if d.gain[t] > 0 else tau[1]
            gate = 1 / (1 + math.exp(-k * (r - 1)))
            push = -d.gain[t] * weight(d, row, t, how)
            assert loss[t] == pytest.approx(push * gate * 4 / k, rel=1e-9, abs=1e-12)
            slope = push * 4 * gate * (1 - gate) * r
            assert gradient[t] == pytest.approx(slope, rel=1e-6, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(d=drawn(), how=st.sampled_from(CORRECTIONS))
def test_weighted_policy_gradients(d: Drawn, how: Importance | None) -> None:
    loss, gradient, _ = found(d, formulas.policy_gradient, correction=how)
    for row in d.rows:
        for t in row:
            push = -weight(d, row, t, how) * d.gain[t]
            assert gradient[t] == pytest.approx(push, rel=1e-9, abs=1e-12)
            assert loss[t] == pytest.approx(push * d.now[t], rel=1e-9, abs=1e-12)


FORMULAS: dict[str, tuple[Any, dict[str, Any]]] = {
    "clipped": (formulas.clipped_policy, {"clip": 0.2, "dual_clip": 3.0}),
    "sequence": (formulas.clipped_policy, {"level": "sequence", "dual_clip": 3.0}),
    "sequence_token": (formulas.clipped_policy, {"level": "sequence_token", "dual_clip": 3.0}),
    "weight": (formulas.clipped_weight, {"cap": 5.0}),
    "soft": (formulas.soft_clipped_policy, {}),
    "gradient": (formulas.policy_gradient, {}),
    "decoupled": (formulas.decoupled_policy, {"dual_clip": 3.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=30, deadline=None)
@given(d=drawn(far=400.0), how=st.sampled_from(CORRECTIONS[1:-1]))
def test_extreme_ratios_leave_loss_and_gradient_finite_and_masked_tokens_alone(
    name: str, d: Drawn, how: Importance
) -> None:
    formula, own = FORMULAS[name]
    loss, gradient, terms = found(d, formula, torch.float32, correction=how, **own)
    assert np.isfinite(loss).all()
    assert np.isfinite(gradient).all()
    assert all(g == 0 for g, m in zip(gradient, d.mask, strict=True) if not m)
    assert all(math.isfinite(float(total)) for total, _ in terms.metrics.values())


ONE = Drawn([1], [1.0], [-1.0], [-1.0], [-1.0], [1.0])


@pytest.mark.parametrize("name", FORMULAS)
def test_on_policy_every_one_of_them_is_the_policy_gradient(name: str) -> None:
    formula, own = FORMULAS[name]
    rows = Drawn([2, 1], [1.0] * 3, [-1.0] * 3, [-1.0] * 3, [-1.0] * 3, [0.5, 0.5, -2.0])
    _, gradient, _ = found(rows, formula, correction=importance(), **own)
    assert gradient == pytest.approx([-0.5, -0.5, 2.0], rel=1e-12)


def test_a_weight_at_its_bound_stays_and_one_beyond_is_masked_or_truncated() -> None:
    rows = replace(ONE, sampler=[-1.0 - math.log(2.0)])  # a weight of 2 up to its last digit
    exactly = math.exp(rows.old[0] - rows.sampler[0])
    for above, over, wanted in (
        (exactly, "mask", exactly),
        (exactly * (1 - 1e-12), "mask", 0.0),
        (1.5, "truncate", 1.5),
    ):
        how = importance(above=above, over=over)  # type: ignore[arg-type]
        _, gradient, terms = found(rows, formulas.policy_gradient, correction=how)
        assert gradient == pytest.approx([-wanted], rel=1e-9)
        assert float(terms.metrics["policy/importance_bounded"][0]) == (wanted != exactly)
    low = replace(ONE, sampler=[-1.0 + math.log(2.0)])
    masked = importance(below=0.6, over="mask")
    assert found(low, formulas.policy_gradient, correction=masked)[1] == [0.0]
    raised = importance(below=0.6)
    assert found(low, formulas.policy_gradient, correction=raised)[1] == pytest.approx([-0.6])


def test_a_token_without_probability_that_nothing_pushes_gives_no_gradient() -> None:
    lost = replace(ONE, now=[-math.inf])
    assert found(lost, formulas.clipped_weight, cap=5.0)[1] == [0.0]  # its ratio is 0
    assert found(replace(lost, gain=[0.0]), formulas.policy_gradient)[1] == [0.0]


def test_at_the_bounds_of_a_row_the_ratio_still_follows_the_model() -> None:
    rows = Drawn([2], [1.0] * 2, [-1.0, -2.0], [-1.25, -2.25], [-1.0, -2.0], [1.0, 1.0])
    bound = math.exp(0.25) - 1.0
    for level, share in (("sequence", 1.0), ("sequence_token", 1.0)):
        at = {"level": level, "clip": (0.2, bound)}
        assert found(rows, formulas.clipped_policy, **at)[1] == pytest.approx(
            [-share * (1 + bound)] * 2
        )
        beyond = {"level": level, "clip": (0.2, bound - 1e-9)}
        assert found(rows, formulas.clipped_policy, **beyond)[1] == [0.0, 0.0]


@settings(max_examples=30, deadline=None)
@given(d=drawn())
def test_rows_of_one_advantage_have_one_gradient_by_either_sequence_level(d: Drawn) -> None:
    """arXiv:2507.18071, section 4.3: GSPO-token then equals GSPO."""
    gain = [d.gain[sum(d.lengths[:r])] for r, n in enumerate(d.lengths) for _ in range(n)]
    same = replace(d, gain=gain)
    one, other = (
        found(same, formulas.clipped_policy, level=level)[1]
        for level in ("sequence", "sequence_token")
    )
    assert one == pytest.approx(other, rel=1e-9, abs=1e-12)


policy = Model("policy", "tiny", trainable=True)


def graph(correction: Importance | None = None, **how: Any) -> Graph:
    rollout = generate(policy, prompts("d.jsonl", batch=4), n=2, max_tokens=8, max_lag=1)
    advantage = group_advantage(rollout, reward(exact, rollout))
    old = logprobs(policy, rollout, name="old")
    loss = clipped_policy_loss(advantage, old=old, correction=correction, **how)
    return Graph("g", train(policy, rollout, loss=loss, lr=1e-6, minibatches=2))


HOW = importance("sequence", above=linear(4.0, 2.0, 100), below=0.5, over="mask")


@pytest.mark.parametrize("imports", [True, False])
def test_a_correction_is_a_value_of_the_graph(imports: bool) -> None:
    mine = graph(HOW)
    again = from_json(to_json(mine), imports=imports)
    assert to_json(again) == to_json(mine)
    check(again, headers)
    assert not diff(mine, again)
    shown = str(diff(graph(), graph(importance(above=3.0))))
    assert "clipped_policy_loss.correction: None -> importance(above=3.0)" in shown
    assert graph().digest != graph(importance()).digest != graph(importance(above=3.0)).digest


def test_what_is_no_correction_in_a_snapshot_is_refused() -> None:
    text = to_json(graph(importance()))
    wrong = text.replace('"above": 2.0', '"above": "much"')
    assert wrong != text
    with pytest.raises(GraphError, match=r"expected Importance\.above to be"):
        from_json(wrong, imports=False)
    for made in (graph(2.0), graph("token")):  # type: ignore[arg-type]
        with pytest.raises(GraphError, match=r"expected correction to be importance\(\) or None"):
            check(made, headers)


def test_bounds_may_be_schedules() -> None:
    assert resolved(HOW, 50) == replace(HOW, above=linear(4.0, 2.0, 100).at(50))
    plainly = importance()
    assert resolved(plainly, 3) is plainly


def test_calls_that_make_no_sense_say_the_fix() -> None:
    rollout = generate(policy, prompts("d.jsonl", batch=4), n=2, max_tokens=8)
    advantage = group_advantage(rollout, reward(exact, rollout))
    old = logprobs(policy, rollout, name="old")
    every = (
        clipped_policy_loss,
        policy_gradient_loss,
        clipped_weight_loss,
        soft_clipped_policy_loss,
    )
    for make in every:
        told = r"correction=importance\(\) needs old=, none given.*Fix: old=logprobs\(policy"
        with pytest.raises(GraphError, match=rf"{make.__name__}: {told}"):
            make(advantage, correction=importance())
    with pytest.raises(GraphError, match=r"old= is read by a correction.*importance\(\), or leave"):
        policy_gradient_loss(advantage, old=old)
    with pytest.raises(GraphError, match=r"expected cap= or clip=, found cap=3\.0 and clip=0\.2"):
        clipped_weight_loss(advantage, cap=3.0, clip=0.2)
    with pytest.raises(GraphError, match=r"expected level to be 'token' or .*'sequence'"):
        importance("row")  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"expected below < above, found below=2\.0"):
        importance(below=2.0)
    with pytest.raises(GraphError, match=r"expected above to be a number > 0 or None, found 0"):
        importance(above=0)
    with pytest.raises(GraphError, match=r"unknown parameter 'epsilon_high' \(TRL's name\)"):
        clipped_weight_loss(advantage, epsilon_high=5.0)  # type: ignore[call-arg]


def refusal(rows: Any, loss: Loss, **how: Any) -> str:
    with pytest.raises(GraphError) as caught:
        check(Graph("g", train(policy, rows, loss=loss, lr=1e-6, **how)), headers)
    return str(caught.value)


def test_a_correction_needs_the_samplers_record_at_the_temperature_of_training() -> None:
    demos = demonstrations("demos.jsonl", batch=4)
    old = logprobs(policy, demos, name="old")
    given = from_answers(demos)
    told = refusal(demos, policy_gradient_loss(given, old=old, correction=importance()))
    assert "for its correction it needs the sampler's log-probs" in told
    assert "rows that generate made" in told
    rollout = generate(policy, prompts("d.jsonl", batch=4), n=2, max_tokens=8, temperature=0.7)
    advantage = group_advantage(rollout, reward(exact, rollout))
    old = logprobs(policy, rollout, temperature=1.0, name="old")
    loss = clipped_policy_loss(advantage, old=old, correction=importance())
    told = refusal(rollout, loss, temperature=1.0)
    assert "recorded at temperature=0.7" in told


def from_answers(rows: Any) -> Any:
    return group_advantage(rows, reward(exact, rows), ragged=True, baseline="none", scale="none")


def warned(loss: Any, **how: Any) -> list[str]:
    rollout = generate(policy, prompts("d.jsonl", batch=4), n=2, max_tokens=8, max_lag=1)
    advantage = group_advantage(rollout, reward(exact, rollout))
    old = logprobs(policy, rollout, name="old")
    node: Node = train(policy, rollout, loss=loss(advantage, old), lr=1e-6, **how)
    return [w.rule for w in check(Graph("g", node), headers).warnings]


def test_a_corrected_policy_gradient_is_right_for_stale_rows_but_not_for_a_second_update() -> None:
    def corrected(advantage: Any, old: Any) -> Loss:
        return policy_gradient_loss(advantage, old=old, correction=importance("sequence"))

    assert "no_ratio" in warned(lambda advantage, old: policy_gradient_loss(advantage))
    assert "no_ratio" not in warned(corrected)
    assert "no_ratio" in warned(corrected, minibatches=2)


def test_terms_add_and_show_their_parameters() -> None:
    rollout = generate(policy, prompts("d.jsonl", batch=4), n=2, max_tokens=8)
    advantage = group_advantage(rollout, reward(exact, rollout))
    reference = logprobs(Model("reference", "tiny"), rollout)
    loss = clipped_weight_loss(advantage, clip=(1.0, 4.0)) + 0.04 * kl_loss(reference, kind="k2")
    assert [t.weight for t in loss.terms] == [1.0, 0.04]
    assert dict(clipped_weight_loss(advantage).terms[0].params)["cap"] == 5.0
    near = decoupled_policy_loss(advantage, proximal=logprobs(policy, rollout, name="proximal"))
    assert dict(near.terms[0].params)["correction"] == importance(above=5.0, over="mask")
