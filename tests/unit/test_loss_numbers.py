"""Every loss against its textbook form in float64, on random rows, extreme ones, and at kinks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dataflow.loss import Now, Tensors, Terms
from operators import loss_formulas, policy_formulas
from operators.importance import Importance

LARGEST = 3e38
"""Beyond float32: the loss must be infinite, so that the Step fails."""

FAR = (-200.0, -100.0, -30.0, -1e-4, 0.0, 1e-4, 30.0, 88.5, 100.0, 200.0)
"""Log ratios, of which float32 holds the exponential of those up to 88.7."""


COLUMNS = dict.fromkeys(("old", "proximal", "reference"), "logprobs") | {"old_values": "values"}
"""What a port calls a column of FlatRows, where it calls it otherwise."""


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Some rows, flat by token, in float64; `of` makes what a formula is given."""

    lengths: list[int]
    row_group: list[int]
    mask: Tensor
    columns: dict[str, Tensor]
    by_row: dict[str, Tensor]

    @property
    def row(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))

    def now(self, said: Tensor, made: str = "logprobs", mass: float = 0.0) -> Now:
        """float32, as in training. made: what the model makes of `said`. mass: the log of the part
        of its distribution that the sampler drew from.
        """
        groups, sampler = torch.tensor(self.row_group), self.columns["sampler"].float()
        sizes = {"rows": len(self.lengths), "groups": int(groups.max()) + 1}
        where = {"row": self.row, "group": groups[self.row], "row_group": groups}
        given = {"logprobs": said.detach(), "sampler_logprobs": sampler} | {made: said}
        if mass:
            given["sampler_mass"] = torch.full_like(sampler, mass)
        return Now(mask=self.mask.float(), step=1, **sizes, **where, **given)

    def port(self, source: str) -> Tensors[Any]:
        found = (self.columns | self.by_row)[source]
        return Tensors({COLUMNS.get(source, source): found.float()})


def drawn(seed: int, far: tuple[float, ...] = ()) -> FlatRows:
    """Groups of one and several, one-token rows, holes, untrained rows; foreign tokens have nan.
    far: log ratios to others, else they are near.
    """
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 4, draw.integers(1, 4))
    row_group = np.repeat(np.arange(len(sizes)), sizes).tolist()
    lengths = draw.integers(1, 6, len(row_group)).tolist()
    mask = (draw.random(sum(lengths)) < 0.75).astype(np.float64)
    mask[: lengths[0]] *= draw.random() < 0.5
    size = len(mask)
    now = draw.uniform(-4, 0, size).astype(np.float32).astype(np.float64)
    columns = {"now": now, "values": draw.uniform(-2, 2, size), "entropy": draw.uniform(0, 3, size)}
    given = {name: draw.uniform(-2, 2, size) for name in ("advantage", "returns", "old_values")}
    for name in ("sampler", "old", "reference", "proximal"):
        given[name] = now - draw.choice(far, size) if far else now + draw.uniform(-1, 1, size)
    if far:
        given["advantage"] = draw.choice([-2.0, -1.0, 0.0, 1.0], size)
    for name, values in given.items():
        columns[name] = np.where(mask > 0, values, np.nan)
    signs = np.concatenate([[1.0, -1.0, 1.0][:n] for n in sizes])
    by_row = {"reward": draw.uniform(-1, 1, len(row_group)), "sign": signs}

    def rounded(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
        return {n: torch.from_numpy(a.astype(np.float32)).double() for n, a in arrays.items()}

    return FlatRows(lengths, row_group, torch.from_numpy(mask), rounded(columns), rounded(by_row))


Over = Literal["truncate", "mask"]
Formula = Callable[[FlatRows, Tensor], Terms]
Textbook = Callable[[FlatRows, Tensor], Tensor]


def ours(
    function: Callable[..., Terms], *ports: str, now: dict[str, Any] | None = None, **how: Any
) -> Formula:
    """A formula of ours on these ports; now: what FlatRows.now is told."""

    def terms(rows: FlatRows, said: Tensor) -> Terms:
        return function(rows.now(said, **now or {}), *map(rows.port, ports), **how)

    return terms


def tokens(formula: Callable[..., Tensor], *names: str) -> Textbook:
    """A formula of single tokens, applied to those whose mask is 1; the others are 0."""

    def whole(rows: FlatRows, said: Tensor) -> Tensor:
        kept = rows.mask > 0
        given = [rows.columns[name][kept] for name in names]
        return torch.zeros_like(said).masked_scatter(kept, formula(said[kept], *given))

    return whole


def surrogate(ahead: Tensor, gain: Tensor, low: float, high: float) -> Tensor:
    """arXiv:1707.06347, equation 7, as a loss."""
    ratio = ahead.exp()
    return -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)


def estimate(d: Tensor, kl: str) -> Tensor:
    """joschu.net/blog/kl-approx.html, of KL(now | reference) with d = log now - log reference."""
    return {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[kl]


def clipped(
    low: float, high: float, kl: str, beta: float, dual: float | None
) -> tuple[Formula, Textbook]:
    ports = ("advantage", "old", "reference")
    how = {"clip": (low, high), "kl": kl, "beta": beta, "dual_clip": dual}

    def textbook(now: Tensor, gain: Tensor, old: Tensor, reference: Tensor) -> Tensor:
        loss = surrogate(now - old, gain, low, high)
        if dual is not None:  # arXiv:1912.09729, equation 5
            loss = torch.where(gain < 0, -torch.maximum(-loss, dual * gain), loss)
        return loss + beta * estimate(now - reference, kl) if beta else loss

    return ours(policy_formulas.clipped_policy, *ports, **how), tokens(textbook, *ports)


def decoupled(cap: float | None, over: Over, *, mass: float = 0.0) -> tuple[Formula, Textbook]:
    ports, correction = ("advantage", "proximal"), Importance(above=cap, over=over)
    formula = ours(
        policy_formulas.decoupled_policy, *ports, now={"mass": mass}, correction=correction
    )

    def textbook(now: Tensor, gain: Tensor, near: Tensor, sampler: Tensor) -> Tensor:
        """arXiv:2505.24298, equation 5; the sampler drew from a part of its distribution."""
        weight = (near - (sampler - mass)).exp().detach()
        if cap is not None:
            weight = torch.where(weight > cap, 0.0 if over == "mask" else cap, weight)
        return weight * surrogate(now - near, gain, 0.2, 0.2)

    return formula, tokens(textbook, *ports, "sampler")


def kl(kind: str) -> tuple[Formula, Textbook]:
    def textbook(now: Tensor, reference: Tensor) -> Tensor:
        return estimate(now - reference, kind)

    return ours(loss_formulas.kl, "reference", kind=kind), tokens(textbook, "reference")


def clipped_weight(correction: Importance | None = None) -> tuple[Formula, Textbook]:
    """arXiv:2506.13585, equation 4, with the bound as an absolute number."""

    ports, how = ("advantage", "old"), {"cap": 5.0, "correction": correction}

    def textbook(now: Tensor, gain: Tensor, old: Tensor, sampler: Tensor) -> Tensor:
        weight = (now - old).exp().clamp(max=5.0).detach()
        return -corrected(weight, old - sampler, correction) * gain * now

    return ours(policy_formulas.clipped_weight, *ports, **how), tokens(textbook, *ports, "sampler")


def corrected(weight: Tensor, log_weight: Tensor, correction: Importance | None) -> Tensor:
    """Times exp(log_weight), held between the bounds of a correction of tokens."""
    if correction is None:
        return weight
    low, high = correction.below, correction.above
    return weight * log_weight.exp().clamp(low, high)  # type: ignore[arg-type]


def soft_clipped(correction: Importance | None = None) -> tuple[Formula, Textbook]:
    """arXiv:2511.20347, equations 5 and 6."""

    ports, how = ("advantage", "old"), {"tau_neg": 1.05, "correction": correction}
    formula = ours(policy_formulas.soft_clipped_policy, *ports, tau_pos=1.0, **how)

    def textbook(now: Tensor, gain: Tensor, old: Tensor, sampler: Tensor) -> Tensor:
        tau = torch.where(gain > 0, 1.0, 1.05)
        # exp(200) is finite in float64, its slope times that of the gate 0 times large: 0.
        gate = torch.sigmoid(tau * ((now - old).exp() - 1)) * 4 / tau
        return -corrected(torch.ones_like(gate), old - sampler, correction) * gate * gain

    return formula, tokens(textbook, *ports, "sampler")


def value(clip: float | None) -> tuple[Formula, Textbook]:
    ports = ("returns", "old_values")

    def textbook(v: Tensor, goal: Tensor, old: Tensor) -> Tensor:
        free = (v - goal) ** 2
        if clip is None:
            return free / 2
        return torch.maximum(free, (old + (v - old).clamp(-clip, clip) - goal) ** 2) / 2

    formula = ours(loss_formulas.value, *ports, now={"made": "values"}, clip=clip)
    return formula, tokens(textbook, *ports)


def regression(huber: float | None) -> tuple[Formula, Textbook]:
    """Of tokens (Huber 1964, doi 10.1214/aoms/1177703732)."""

    def textbook(v: Tensor, goal: Tensor) -> Tensor:
        if huber is None:
            return (v - goal) ** 2 / 2
        return torch.nn.functional.huber_loss(v, goal, delta=huber, reduction="none")

    how = {"now": {"made": "values"}, "huber": huber}
    return ours(loss_formulas.token_regression, "old_values", **how), tokens(textbook, "old_values")


def margins(rows: FlatRows, said: Tensor) -> list[Tensor]:
    gap = torch.where(rows.mask > 0, said - torch.nan_to_num(rows.columns["reference"]), 0.0)
    return [part.sum() for part in gap.split(rows.lengths)]


def groups(rows: FlatRows) -> list[list[int]]:
    numbers = range(max(rows.row_group) + 1)
    return [[r for r, g in enumerate(rows.row_group) if g == group] for group in numbers]


def dpo(rows: FlatRows, said: Tensor) -> Tensor:
    """arXiv:2305.18290, equation 7."""
    signed = torch.stack(margins(rows, said)) * rows.by_row["sign"]
    logits = torch.stack([0.3 * signed[members].sum() for members in groups(rows)])
    return -torch.nn.functional.logsigmoid(logits.double())


def trajectory_balance(rows: FlatRows, said: Tensor) -> Tensor:
    """arXiv:2503.18929, equations 4 and 5."""
    gap = torch.stack(margins(rows, said)) - rows.by_row["reward"] / 0.7
    parts = []
    for members in groups(rows):
        log_z = -gap[members].detach().mean()
        parts.append((log_z + gap[members]).square().mean())
    return torch.stack(parts)


CASES: dict[str, tuple[Formula, Textbook]] = {
    "clipped": clipped(0.2, 0.2, "k3", 0.0, None),
    "clipped, k1": clipped(0.2, 0.28, "k1", 0.04, None),
    "clipped, k2": clipped(0.1, 0.3, "k2", 0.04, None),
    "clipped, k3": clipped(0.2, 0.2, "k3", 0.04, None),
    "clipped twice": clipped(0.2, 0.2, "k3", 0.0, 3.0),
    "decoupled, mask": decoupled(5.0, "mask"),
    "decoupled, truncate": decoupled(5.0, "truncate"),
    "decoupled, no cap": decoupled(None, "mask"),
    "decoupled, behind top-p": decoupled(5.0, "mask", mass=math.log(0.3)),
    "clipped weight": clipped_weight(),
    "clipped weight, corrected": clipped_weight(Importance(above=2.0, below=0.5)),
    "softly clipped": soft_clipped(),
    "softly clipped, corrected": soft_clipped(Importance(above=2.0)),
    "kl, k1": kl("k1"),
    "kl, k2": kl("k2"),
    "kl, k3": kl("k3"),
    "policy gradient": (
        ours(policy_formulas.policy_gradient, "advantage"),
        tokens(lambda now, gain: -gain * now, "advantage"),
    ),
    "supervised": (ours(loss_formulas.supervised), tokens(lambda now: -now)),
    "entropy": (
        ours(loss_formulas.entropy, now={"made": "entropy"}),
        tokens(lambda spread: -spread),
    ),
    "value": value(None),
    "value, clipped": value(0.3),
    "regression": regression(None),
    "regression, huber": regression(0.5),
    "dpo": (ours(loss_formulas.dpo, "sign", "reference", beta=0.3), dpo),
    "trajectory balance": (
        ours(loss_formulas.trajectory_balance, "reward", "reference", beta=0.7),
        trajectory_balance,
    ),
}


OF_MODEL = {"entropy": "entropy", "value": "values", "value, clipped": "values"}
OF_MODEL |= {"regression": "values", "regression, huber": "values"}
"""The column that a model makes, where it is not log-probs."""


def term_and_gradient(loss: Tensor, said: Tensor, mask: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Foreign tokens count nothing, as in the reduction; in `loss` they may be anything."""
    kept = loss[mask > 0] if loss.shape == mask.shape else loss
    (gradient,) = torch.autograd.grad(kept.sum(), said)
    return kept.detach().double().numpy(), gradient.double().numpy()


def require_near(found: np.ndarray, wanted: np.ndarray, what: str, atol: float) -> None:
    """Equal to float32's digits; what float32 cannot hold is not finite."""
    fits = np.abs(wanted) < LARGEST
    np.testing.assert_allclose(found[fits], wanted[fits], rtol=2e-5, atol=atol, err_msg=what)
    assert not np.isfinite(found[~fits]).any(), f"{what}: a number where none fits"


def require_alike(
    formula: Formula, textbook: Textbook, rows: FlatRows, *, made: str = "now", atol: float
) -> None:
    """The same loss and gradient. made: the column that a model makes."""
    mask, model = rows.mask, rows.columns[made]
    said32, said64 = model.float().requires_grad_(), model.clone().requires_grad_()
    loss, gradient = term_and_gradient(formula(rows, said32).loss, said32, mask)
    true_loss, true_gradient = term_and_gradient(textbook(rows, said64), said64, mask)
    require_near(loss, true_loss, "loss", atol)
    require_near(gradient, true_gradient, "gradient", atol)
    assert (gradient[mask.numpy() == 0] == 0).all(), "a gradient at a foreign token"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("far", [(), FAR], ids=["near", "far from their sampler"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_random_rows(case: str, far: tuple[float, ...], seed: int) -> None:
    # What is left of a row's sum of several hundred in float32.
    atol = 1e-4 if far and case in ("dpo", "trajectory balance") else 1e-6
    require_alike(*CASES[case], drawn(seed, far), made=OF_MODEL.get(case, "now"), atol=atol)


def row_of(now: Sequence[float], **columns: Sequence[float]) -> FlatRows:
    """Each token a row and a group of its own, unless a column says otherwise."""
    size = len(now)
    given = {"now": now, "values": now, "entropy": now, "sampler": now} | columns
    flat = {n: torch.tensor(c, dtype=torch.float64) for n, c in given.items()}
    return FlatRows([1] * size, list(range(size)), torch.ones(size, dtype=torch.float64), flat, {})


def one_group(now: list[float], *, reference: list[float], **by_row: list[float]) -> FlatRows:
    """Two rows of one token each; the sampler is the reference."""
    rows = row_of(now, reference=reference, sampler=reference)
    numbers = {n: torch.tensor(values, dtype=torch.float64) for n, values in by_row.items()}
    return replace(rows, row_group=[0, 0], by_row=numbers)


def gradient_at(formula: Formula, rows: FlatRows, model: str = "now") -> list[float]:
    said = rows.columns[model].float().requires_grad_()
    return term_and_gradient(formula(rows, said).loss, said, rows.mask)[1].tolist()


def loss_at(formula: Formula, rows: FlatRows) -> list[float]:
    return formula(rows, rows.columns["now"].float()).loss.tolist()


def ratio_of(ahead: float) -> float:
    """What float32 makes of exp(ahead), so that a bound can be met exactly."""
    return torch.tensor(ahead).exp().item()


def test_at_ratio_one_the_gradient_is_the_advantages() -> None:
    others = dict.fromkeys(("old", "reference", "proximal"), [-1.0] * 3)
    rows = row_of([-1.0] * 3, advantage=[1.5, -1.5, 0.0], **others)
    for case in ("clipped", "clipped, k2", "clipped, k3", "clipped twice", "decoupled, mask"):
        assert gradient_at(CASES[case][0], rows) == [-1.5, 1.5, 0.0], case


@pytest.mark.parametrize("ahead", [0.25, -0.25])
def test_at_the_bounds_of_a_clip_the_term_still_follows_the_model(ahead: float) -> None:
    # The advantage for which the clip would hold it one step beyond.
    ratio, gain = ratio_of(ahead), 1.0 if ahead > 0 else -1.0
    bound = abs(ratio - 1.0)
    rows = row_of([ahead], advantage=[gain], old=[0.0], reference=[0.0], proximal=[0.0])
    assert gradient_at(clipped(bound, bound, "k3", 0.0, None)[0], rows) == [-gain * ratio]
    within = math.copysign(bound - 1e-6, ahead)
    assert gradient_at(clipped(abs(within), abs(within), "k3", 0.0, None)[0], rows) == [0.0]
    twice = row_of([1.0], advantage=[-1.0], old=[0.0], reference=[0.0])
    assert gradient_at(clipped(0.2, 0.2, "k3", 0.0, ratio_of(1.0))[0], twice) == [ratio_of(1.0)]
    assert gradient_at(clipped(0.2, 0.2, "k3", 0.0, ratio_of(1.0) - 1e-6)[0], twice) == [0.0]


@pytest.mark.parametrize("ahead", [88.5, 89.0, 500.0, math.inf])
def test_a_held_token_has_a_gradient_of_zero_however_far_it_went(ahead: float) -> None:
    others = {"old": [-ahead] * 2, "reference": [0.0] * 2, "proximal": [-ahead] * 2}
    rows = row_of([0.0] * 2, advantage=[1.0, 0.0], **others)
    for case in ("clipped", "clipped twice"):
        formula = CASES[case][0]
        assert gradient_at(formula, rows) == [0.0, 0.0]
        assert loss_at(formula, rows) == pytest.approx([-1.2, 0.0])
    fallen = row_of([0.0], advantage=[-1.0], old=[-ahead], reference=[0.0])
    assert gradient_at(CASES["clipped twice"][0], fallen) == [0.0]


def test_a_dropped_token_counts_nothing_however_far_it_went() -> None:
    rows = row_of([0.0] * 2, advantage=[-1.0, 1.0], proximal=[-200.0] * 2, sampler=[-400.0] * 2)
    formula = CASES["decoupled, mask"][0]
    assert gradient_at(formula, rows) == loss_at(formula, rows) == [0.0, 0.0]


def test_a_weight_of_exactly_the_cap_counts() -> None:
    rows = row_of([0.0], advantage=[1.0], proximal=[0.0], sampler=[-1.5])
    cap = ratio_of(1.5)
    assert gradient_at(decoupled(cap, "mask")[0], rows) == [-cap]
    assert gradient_at(decoupled(cap - 1e-5, "mask")[0], rows) == [0.0]


def test_a_value_at_its_goal_or_at_its_bound() -> None:
    goal = row_of([0.5], returns=[0.5], old_values=[0.5])
    assert gradient_at(CASES["value, clipped"][0], goal, "values") == [0.0]
    bound = row_of([0.75], returns=[2.0], old_values=[0.5])
    assert gradient_at(value(0.25)[0], bound, "values") == [-1.25]
    assert gradient_at(value(0.2499)[0], bound, "values") == [0.0]


def test_values_within_their_bounds_are_not_held_to_the_bit() -> None:
    draw = np.random.default_rng(0)
    old = draw.uniform(-3, 3, 500).astype(np.float32).tolist()
    said = [v + float(x) for v, x in zip(old, draw.uniform(-0.19, 0.19, 500), strict=True)]
    rows = row_of(said, returns=[0.0] * 500, old_values=old)
    terms = value(0.2)[0](rows, torch.tensor(said))
    assert float(terms.metrics["value/clip_fraction"][0]) == 0.0


@pytest.mark.parametrize("gap", [0.0, 1e-6, -1e-6])
def test_a_pair_that_policy_and_reference_agree_on_has_half_the_slope(gap: float) -> None:
    pair = one_group([-1.0 + gap, -2.0], reference=[-1.0, -2.0], sign=[1.0, -1.0])
    # -beta * sigmoid(-0) = -0.3 / 2 for the chosen row, as much upwards for the rejected one.
    assert gradient_at(CASES["dpo"][0], pair) == pytest.approx([-0.15, 0.15], rel=1e-5)


@pytest.mark.parametrize("d", [1e-3, -1e-3, 1e-5, -1e-5])
def test_a_small_divergence_has_its_digits(d: float) -> None:
    rows = row_of([d], advantage=[0.0], old=[d], reference=[0.0])
    exact = math.expm1(-float(np.float32(d))) + float(np.float32(d))
    close = pytest.approx([exact], rel=3e-2 if abs(d) < 1e-4 else 3e-4)
    assert loss_at(clipped(0.2, 0.2, "k3", 1.0, None)[0], rows) == close


def test_rows_on_their_groups_mean_are_balanced() -> None:
    both = one_group([-1.0] * 2, reference=[-1.0] * 2, reward=[0.5, 0.5])
    assert gradient_at(CASES["trajectory balance"][0], both) == [0.0, 0.0]
