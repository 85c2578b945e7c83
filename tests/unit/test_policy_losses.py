"""Policy losses against plain Python (loops and `math`), at kinks and extremes, and as graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.check import check
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.loss import Loss, Now, Tensors, Terms
from dataflow.model import linear
from dataflow.snapshot import from_json, to_json
from operators import policy_formulas as formulas
from operators.advantage import group_advantage
from operators.data import demonstrations
from operators.forward import logprobs
from operators.importance import Importance, importance
from operators.kernels.torch.loss_call import resolve_parameter
from operators.losses import (
    clipped_policy_loss,
    clipped_weight_loss,
    decoupled_policy_loss,
    policy_gradient_loss,
    soft_clipped_policy_loss,
)
from operators.reward import reward
from tests.kit.graphs import compared, graph_of, policy, sampled
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
    if how.over == "mask":
        return w if low <= w <= high else 0.0
    return min(max(w, low), high)


def clipped_by_hand(
    d: Drawn, level: str, clip: tuple[float, float], dual: float | None, how: Importance | None
) -> tuple[list[float], list[float], int]:
    """Loss and gradient of each token, and how many the clip holds: GSPO's equations 5, 7 and 13,
    and token ratios. `decoupled` is `token` with `old` for the proximal policy (AReaL).
    """
    loss, slope, clipped = [0.0] * len(d.now), [0.0] * len(d.now), 0
    for row in d.rows:
        mean = sum(d.now[t] - d.old[t] for t in row) / max(1, len(row))
        for t in row:
            r = exp(mean if level.startswith("sequence") else d.now[t] - d.old[t])
            a, w = d.gain[t], weight(d, row, t, how)
            held = -a * min(max(r, 1 - clip[0]), 1 + clip[1])
            worst = max(-a * r, held)
            free = -a * r >= held
            clipped += not free
            if dual is not None and a < 0 and worst > -a * dual:
                worst, free = -a * dual, False
            loss[t] = w * worst
            for s in row if level == "sequence" else [t]:
                slope[s] += free * w * -a * r / (len(row) if level == "sequence" else 1)
    return loss, slope, clipped


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


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token", "decoupled"])
@pytest.mark.parametrize("dual", [None, 1.5])
@settings(max_examples=25)
@given(d=drawn(), how=st.sampled_from(CORRECTIONS))
def test_clipped_ratios_of_tokens_and_rows(
    d: Drawn, how: Importance | None, level: str, dual: float | None
) -> None:
    given = {"clip": (0.2, 0.28), "dual_clip": dual, "correction": how}
    if level == "decoupled":
        loss, gradient, terms = found(d, formulas.decoupled_policy, **given)
    else:
        loss, gradient, terms = found(d, formulas.clipped_policy, level=level, **given)
    wanted, slope, clipped = clipped_by_hand(d, level, (0.2, 0.28), dual, how)
    assert loss == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert gradient == pytest.approx(slope, rel=1e-6, abs=1e-9)
    assert float(terms.metrics["policy/clip_fraction"][0]) == clipped
    if how is not None:
        used = [weight(d, row, t, how) for row in d.rows for t in row]
        total, count = terms.metrics["policy/importance_weight"]
        assert (float(total), float(count)) == pytest.approx((sum(used), len(used)), rel=1e-9)


# Without rows or corrections of rows: test_loss_numbers.py.
FORMULAS = {
    "sequence": (formulas.clipped_policy, {"level": "sequence", "dual_clip": 3.0}),
    "sequence_token": (formulas.clipped_policy, {"level": "sequence_token", "dual_clip": 3.0}),
    "gradient": (formulas.policy_gradient, {}),
    "decoupled": (formulas.decoupled_policy, {"dual_clip": 3.0}),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=30)
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


TWO = replace(ONE, sampler=[-1.0 - math.log(2.0)])  # a weight of 2 up to its last digit
HALF = replace(ONE, sampler=[-1.0 + math.log(2.0)])
EXACTLY = math.exp(TWO.old[0] - TWO.sampler[0])


@pytest.mark.parametrize(("rows", "how", "wanted", "bounded"), [
    (TWO, importance(above=EXACTLY, over="mask"), EXACTLY, 0.0),
    (TWO, importance(above=EXACTLY * (1 - 1e-12), over="mask"), 0.0, 1.0),
    (TWO, importance(above=1.5), 1.5, 1.0),
    (HALF, importance(below=0.6, over="mask"), 0.0, 1.0),
    (HALF, importance(below=0.6), 0.6, 1.0),
], ids=["at the bound", "masked above", "cut above", "masked below", "raised below"])  # fmt: skip
def test_a_weight_at_its_bound_stays_and_one_beyond_is_masked_or_truncated(
    rows: Drawn, how: Importance, wanted: float, bounded: float
) -> None:
    _, gradient, terms = found(rows, formulas.policy_gradient, correction=how)
    assert gradient == pytest.approx([-wanted], rel=1e-9)
    assert float(terms.metrics["policy/importance_bounded"][0]) == bounded


def test_a_token_without_probability_that_nothing_pushes_gives_no_gradient() -> None:
    lost = replace(ONE, now=[-math.inf])
    assert found(lost, formulas.clipped_weight, cap=5.0)[1] == [0.0]  # its ratio is 0
    assert found(replace(lost, gain=[0.0]), formulas.policy_gradient)[1] == [0.0]


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_at_the_bounds_of_a_row_the_ratio_still_follows_the_model(level: str) -> None:
    rows = Drawn([2], [1.0] * 2, [-1.0, -2.0], [-1.25, -2.25], [-1.0, -2.0], [1.0, 1.0])
    bound = math.exp(0.25) - 1.0
    _, at, _ = found(rows, formulas.clipped_policy, level=level, clip=(0.2, bound))
    assert at == pytest.approx([-(1 + bound)] * 2)
    _, beyond, _ = found(rows, formulas.clipped_policy, level=level, clip=(0.2, bound - 1e-9))
    assert beyond == [0.0, 0.0]


ROLLOUT = sampled(n=2, max_lag=1)
ADVANTAGE, OLD = compared(ROLLOUT), logprobs(policy, ROLLOUT, name="old")


def graph(correction: Importance | None = None) -> Graph:
    loss = clipped_policy_loss(ADVANTAGE, old=OLD, correction=correction)
    return graph_of(ROLLOUT, loss, minibatches=2)


HOW = importance("sequence", above=linear(4.0, 2.0, 100), below=0.5, over="mask")


def test_a_correction_is_a_value_of_the_graph() -> None:
    mine = graph(HOW)
    again = from_json(to_json(mine))
    assert again == mine != graph()
    check(again, headers)


def test_what_is_no_correction_in_a_snapshot_is_refused() -> None:
    wrong = to_json(graph(importance())).replace('"above": 2.0', '"above": "much"')
    with pytest.raises(GraphError, match=r"expected Importance\.above to be"):
        from_json(wrong, imports=False)
    with pytest.raises(GraphError, match=r"expected correction to be importance\(\) or None"):
        check(graph(2.0), headers)  # type: ignore[arg-type]


def test_bounds_may_be_schedules() -> None:
    assert resolve_parameter(HOW, 50) == replace(HOW, above=linear(4.0, 2.0, 100).at(50))
    plainly = importance()
    assert resolve_parameter(plainly, 3) is plainly


@pytest.mark.parametrize(
    "make",
    [clipped_policy_loss, policy_gradient_loss, clipped_weight_loss, soft_clipped_policy_loss],
)
def test_a_correction_needs_the_logprobs_before_the_step(make: Callable[..., Loss]) -> None:
    told = r"correction=importance\(\) needs old=, none given.*Fix: old=logprobs\(policy"
    with pytest.raises(GraphError, match=rf"{make.__name__}: {told}"):
        make(ADVANTAGE, correction=importance())


@pytest.mark.parametrize(("make", "params", "told"), [
    (
        policy_gradient_loss,
        {"advantage": ADVANTAGE, "old": OLD},
        r"old= is read by a correction.*importance\(\), or leave",
    ),
    (
        clipped_weight_loss,
        {"advantage": ADVANTAGE, "cap": 3.0, "clip": 0.2},
        r"expected cap= or clip=, found cap=3\.0 and clip=0\.2",
    ),
    (importance, {"level": "row"}, r"expected level to be 'token' or .*'sequence'"),
    (importance, {"below": 1, "above": 1}, r"expected below < above, found below=1 and above=1"),
    (importance, {"above": 0.2}, r"expected above to be a number >= 1 or None, found 0\.2"),
    (importance, {"below": 1.2}, r"expected below to be a number in \(0, 1\] or None, found 1\.2"),
])  # fmt: skip
def test_calls_that_make_no_sense_say_the_fix(
    make: Callable[..., Any], params: dict[str, Any], told: str
) -> None:
    with pytest.raises(GraphError, match=told):
        make(**params)


def test_a_correction_needs_rows_with_the_samplers_record() -> None:
    demos = demonstrations("demos.jsonl", batch=4)
    score = reward(exact, demos)
    advantage = group_advantage(demos, score, ragged=True, baseline="none", scale="none")
    old = logprobs(policy, demos, name="old")
    loss = policy_gradient_loss(advantage, old=old, correction=importance())
    message = "for its correction it needs the sampler's log-probs(.|\n)*rows that generate made"
    with pytest.raises(GraphError, match=message):
        check(graph_of(demos, loss), headers)


def test_a_correction_needs_the_samplers_record_at_the_temperature_of_training() -> None:
    rollout = sampled(n=2, temperature=0.7)
    old = logprobs(policy, rollout, temperature=1.0, name="old")
    loss = clipped_policy_loss(compared(rollout), old=old, correction=importance())
    with pytest.raises(GraphError, match=r"recorded at temperature=0\.7"):
        check(graph_of(rollout, loss, temperature=1.0), headers)


def test_a_corrected_policy_gradient_is_right_for_stale_rows_but_not_for_a_second_update() -> None:
    def warned(loss: Loss, **how: Any) -> bool:
        warnings = check(graph_of(ROLLOUT, loss, **how), headers).warnings
        return "no_ratio" in [warning.rule for warning in warnings]

    corrected = policy_gradient_loss(ADVANTAGE, old=OLD, correction=importance("sequence"))
    assert warned(policy_gradient_loss(ADVANTAGE))
    assert not warned(corrected)
    assert warned(corrected, minibatches=2)


def test_corrections_and_caps_that_nobody_gave() -> None:
    assert dict(clipped_weight_loss(ADVANTAGE).terms[0].params)["cap"] == 5.0
    near = decoupled_policy_loss(ADVANTAGE, proximal=OLD)
    assert dict(near.terms[0].params)["correction"] == importance(above=5.0, over="mask")
