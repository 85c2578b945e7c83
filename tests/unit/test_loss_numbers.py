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
    """Some rows, flat by token, in float64."""

    lengths: list[int]
    row_group: list[int]
    mask: Tensor
    columns: dict[str, Tensor]
    by_row: dict[str, Tensor]

    @property
    def row(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))

    def now(self, model: Tensor, made: str = "logprobs", mass: float = 0.0) -> Now:
        """float32, as in training. made: what `model` is of. mass: the log of the part of its
        distribution that the sampler drew from.
        """
        groups, sampler = torch.tensor(self.row_group), self.columns["sampler"].float()
        where = {"row": self.row, "group": groups[self.row], "row_group": groups}
        sizes = {"rows": len(self.lengths), "groups": int(groups.max()) + 1}
        fields = {"logprobs": model.detach(), "sampler_logprobs": sampler} | {made: model}
        if mass:
            fields["sampler_mass"] = torch.full_like(sampler, mass)
        return Now(mask=self.mask.float(), step=1, **sizes, **where, **fields)

    def port(self, source: str) -> Tensors[Any]:
        column = (self.columns | self.by_row)[source]
        return Tensors({COLUMNS.get(source, source): column.float()})


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
    masked = {name: draw.uniform(-2, 2, size) for name in ("advantage", "returns", "old_values")}
    for name in ("sampler", "old", "reference", "proximal"):
        masked[name] = now - draw.choice(far, size) if far else now + draw.uniform(-1, 1, size)
    if far:
        masked["advantage"] = draw.choice([-2.0, -1.0, 0.0, 1.0], size)
    for name, values in masked.items():
        columns[name] = np.where(mask > 0, values, np.nan)
    signs = np.concatenate([[1.0, -1.0, 1.0][:n] for n in sizes])
    by_row = {"reward": draw.uniform(-1, 1, len(row_group)), "sign": signs}

    def rounded(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
        return {n: torch.from_numpy(a.astype(np.float32)).double() for n, a in arrays.items()}

    return FlatRows(lengths, row_group, torch.from_numpy(mask), rounded(columns), rounded(by_row))


Over = Literal["truncate", "mask"]
Formula = Callable[[FlatRows, Tensor], Terms]
Textbook = Callable[[FlatRows, Tensor], Tensor]
SAMPLER, VALUES = ("sampler",), {"made": "values"}


def ours(
    function: Callable[..., Terms], *ports: str, now: dict[str, Any] | None = None, **how: Any
) -> Formula:
    """A formula of ours on these ports; now: what FlatRows.now is told."""

    def terms(rows: FlatRows, model: Tensor) -> Terms:
        return function(rows.now(model, **now or {}), *map(rows.port, ports), **how)

    return terms


def tokens(formula: Callable[..., Tensor], *names: str) -> Textbook:
    """A formula of single tokens, applied to those whose mask is 1; the others are 0."""

    def whole(rows: FlatRows, model: Tensor) -> Tensor:
        trained = rows.mask > 0
        columns = [rows.columns[name][trained] for name in names]
        return torch.zeros_like(model).masked_scatter(trained, formula(model[trained], *columns))

    return whole


def by_token(
    function: Callable[..., Terms],
    textbook: Callable[..., Tensor],
    *ports: str,
    reads: tuple[str, ...] = (),
    **how: Any,
) -> tuple[Formula, Textbook]:
    """Ours, and the textbook's form of single tokens. reads: what that needs besides the ports."""
    return ours(function, *ports, **how), tokens(textbook, *ports, *reads)


def surrogate(ahead: Tensor, gain: Tensor, low: float, high: float) -> Tensor:
    """arXiv:1707.06347, equation 7, as a loss."""
    ratio = ahead.exp()
    return -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)


def estimate(d: Tensor, kl: str) -> Tensor:
    """joschu.net/blog/kl-approx.html, of KL(now | reference) with d = log now - log reference."""
    return {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[kl]


def clipped(
    low: float = 0.2,
    high: float = 0.2,
    *,
    kl: str = "k3",
    beta: float = 0.0,
    dual: float | None = None,
) -> tuple[Formula, Textbook]:
    def textbook(now: Tensor, gain: Tensor, old: Tensor, reference: Tensor) -> Tensor:
        loss = surrogate(now - old, gain, low, high)
        if dual is not None:  # arXiv:1912.09729, equation 5
            loss = torch.where(gain < 0, -torch.maximum(-loss, dual * gain), loss)
        return loss + beta * estimate(now - reference, kl) if beta else loss

    how = {"clip": (low, high), "kl": kl, "beta": beta, "dual_clip": dual}
    ports = ("advantage", "old", "reference")
    return by_token(policy_formulas.clipped_policy, textbook, *ports, **how)


def decoupled(cap: float, over: Over, *, mass: float = 0.0) -> tuple[Formula, Textbook]:
    def textbook(now: Tensor, gain: Tensor, near: Tensor, sampler: Tensor) -> Tensor:
        """arXiv:2505.24298, equation 5; the sampler drew from a part of its distribution."""
        weight = (near - (sampler - mass)).exp().detach()
        weight = torch.where(weight > cap, 0.0 if over == "mask" else cap, weight)
        return weight * surrogate(now - near, gain, 0.2, 0.2)

    how = {"now": {"mass": mass}, "correction": Importance(above=cap, over=over)}
    ports = ("advantage", "proximal")
    return by_token(policy_formulas.decoupled_policy, textbook, *ports, reads=SAMPLER, **how)


def clipped_weight(correction: Importance | None = None) -> tuple[Formula, Textbook]:
    """arXiv:2506.13585, equation 4, with the bound as an absolute number."""

    def textbook(now: Tensor, gain: Tensor, old: Tensor, sampler: Tensor) -> Tensor:
        weight = (now - old).exp().clamp(max=5.0).detach()
        return -corrected(weight, old - sampler, correction) * gain * now

    how = {"reads": SAMPLER, "cap": 5.0, "correction": correction}
    return by_token(policy_formulas.clipped_weight, textbook, "advantage", "old", **how)


def corrected(weight: Tensor, log_weight: Tensor, correction: Importance | None) -> Tensor:
    """Times exp(log_weight), held between the bounds of a correction of tokens."""
    if correction is None:
        return weight
    low, high = correction.below, correction.above
    return weight * log_weight.exp().clamp(low, high)  # type: ignore[arg-type]


def soft_clipped(correction: Importance | None = None) -> tuple[Formula, Textbook]:
    """arXiv:2511.20347, equations 5 and 6."""

    def textbook(now: Tensor, gain: Tensor, old: Tensor, sampler: Tensor) -> Tensor:
        tau = torch.where(gain > 0, 1.0, 1.05)
        # exp(200) is finite in float64, its slope times that of the gate 0 times large: 0.
        gate = torch.sigmoid(tau * ((now - old).exp() - 1)) * 4 / tau
        return -corrected(torch.ones_like(gate), old - sampler, correction) * gate * gain

    how = {"reads": SAMPLER, "tau_pos": 1.0, "tau_neg": 1.05, "correction": correction}
    return by_token(policy_formulas.soft_clipped_policy, textbook, "advantage", "old", **how)


def value(clip: float | None) -> tuple[Formula, Textbook]:
    def textbook(v: Tensor, goal: Tensor, old: Tensor) -> Tensor:
        free = (v - goal) ** 2
        if clip is None:
            return free / 2
        return torch.maximum(free, (old + (v - old).clamp(-clip, clip) - goal) ** 2) / 2

    return by_token(loss_formulas.value, textbook, "returns", "old_values", now=VALUES, clip=clip)


def regression(huber: float | None) -> tuple[Formula, Textbook]:
    """Of tokens (Huber 1964, doi 10.1214/aoms/1177703732)."""

    def textbook(v: Tensor, goal: Tensor) -> Tensor:
        if huber is None:
            return (v - goal) ** 2 / 2
        return torch.nn.functional.huber_loss(v, goal, delta=huber, reduction="none")

    how = {"now": VALUES, "huber": huber}
    return by_token(loss_formulas.token_regression, textbook, "old_values", **how)


def margins(rows: FlatRows, model: Tensor) -> list[Tensor]:
    gap = torch.where(rows.mask > 0, model - torch.nan_to_num(rows.columns["reference"]), 0.0)
    return [part.sum() for part in gap.split(rows.lengths)]


def groups(rows: FlatRows) -> list[list[int]]:
    numbers = range(max(rows.row_group) + 1)
    return [[r for r, g in enumerate(rows.row_group) if g == group] for group in numbers]


def dpo(rows: FlatRows, model: Tensor) -> Tensor:
    """arXiv:2305.18290, equation 7; 0 of a group that lost a row."""
    signed = torch.stack(margins(rows, model)) * rows.by_row["sign"]
    logits = torch.stack([0.3 * signed[members].sum() for members in groups(rows)])
    is_whole = torch.tensor([len(members) > 1 for members in groups(rows)])
    return torch.where(is_whole, -torch.nn.functional.logsigmoid(logits.double()), 0.0)


def trajectory_balance(rows: FlatRows, model: Tensor) -> Tensor:
    """arXiv:2503.18929, equations 4 and 5."""
    gap = torch.stack(margins(rows, model)) - rows.by_row["reward"] / 0.7
    parts = []
    for members in groups(rows):
        log_z = -gap[members].detach().mean()
        parts.append((log_z + gap[members]).square().mean())
    return torch.stack(parts)


CASES: dict[str, tuple[Formula, Textbook]] = {
    "clipped": clipped(),
    "clipped, k1": clipped(0.2, 0.28, kl="k1", beta=0.04),
    "clipped, k2": clipped(0.1, 0.3, kl="k2", beta=0.04),
    "clipped, k3": clipped(beta=0.04),
    "clipped twice": clipped(dual=3.0),
    "decoupled, mask": decoupled(5.0, "mask"),
    "decoupled, truncate": decoupled(5.0, "truncate"),
    "decoupled, behind top-p": decoupled(5.0, "mask", mass=math.log(0.3)),
    "clipped weight": clipped_weight(),
    "clipped weight, corrected": clipped_weight(Importance(above=2.0, below=0.5)),
    "softly clipped": soft_clipped(),
    "softly clipped, corrected": soft_clipped(Importance(above=2.0)),
    "policy gradient": by_token(
        policy_formulas.policy_gradient, lambda now, gain: -gain * now, "advantage"
    ),
    "supervised": by_token(loss_formulas.supervised, Tensor.neg),
    "entropy": by_token(loss_formulas.entropy, Tensor.neg, now={"made": "entropy"}),
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


def term_and_gradient(loss: Tensor, model: Tensor, mask: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Foreign tokens count nothing, as in the reduction; in `loss` they may be anything."""
    kept = loss[mask > 0] if loss.shape == mask.shape else loss
    (gradient,) = torch.autograd.grad(kept.sum(), model)
    return kept.detach().double().numpy(), gradient.double().numpy()


def require_near(ours: np.ndarray, exact: np.ndarray, what: str, atol: float) -> None:
    """Equal to float32's digits; what float32 cannot hold is not finite."""
    fits = np.abs(exact) < LARGEST
    np.testing.assert_allclose(ours[fits], exact[fits], rtol=2e-5, atol=atol, err_msg=what)
    assert not np.isfinite(ours[~fits]).any(), f"{what}: a number where none fits"


def require_alike(
    formula: Formula, textbook: Textbook, rows: FlatRows, *, made: str = "now", atol: float
) -> None:
    """The same loss and gradient. made: the column that a model makes."""
    mask, model = rows.mask, rows.columns[made]
    model32, model64 = model.float().requires_grad_(), model.clone().requires_grad_()
    loss, gradient = term_and_gradient(formula(rows, model32).loss, model32, mask)
    true_loss, true_gradient = term_and_gradient(textbook(rows, model64), model64, mask)
    require_near(loss, true_loss, "loss", atol)
    require_near(gradient, true_gradient, "gradient", atol)
    assert (gradient[mask.numpy() == 0] == 0).all(), "a gradient at a foreign token"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("far", [(), FAR], ids=["near", "far from their sampler"])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**20))
def test_random_rows(case: str, far: tuple[float, ...], seed: int) -> None:
    # What is left of a row's sum of several hundred in float32.
    atol = 1e-4 if far and case in ("dpo", "trajectory balance") else 1e-6
    require_alike(*CASES[case], drawn(seed, far), made=OF_MODEL.get(case, "now"), atol=atol)


def row_of(now: Sequence[float], **columns: Sequence[float]) -> FlatRows:
    """Each token a row and a group of its own, unless a column says otherwise."""
    size = len(now)
    columns = dict.fromkeys(("now", "values", "sampler"), now) | columns
    flat = {n: torch.tensor(c, dtype=torch.float64) for n, c in columns.items()}
    return FlatRows([1] * size, list(range(size)), torch.ones(size, dtype=torch.float64), flat, {})


def gradient_at(formula: Formula, rows: FlatRows, made: str = "now") -> list[float]:
    model = rows.columns[made].float().requires_grad_()
    return term_and_gradient(formula(rows, model).loss, model, rows.mask)[1].tolist()


def loss_at(formula: Formula, rows: FlatRows) -> list[float]:
    return formula(rows, rows.columns["now"].float()).loss.tolist()


def ratio_of(ahead: float) -> float:
    """What float32 makes of exp(ahead), so that a bound can be met exactly."""
    return torch.tensor(ahead).exp().item()


@pytest.mark.parametrize("ahead", [0.25, -0.25])
def test_at_the_bounds_of_a_clip_the_term_still_follows_the_model(ahead: float) -> None:
    # The advantage for which the clip would hold it one step beyond.
    ratio, gain = ratio_of(ahead), 1.0 if ahead > 0 else -1.0
    bound = abs(ratio - 1.0)
    rows = row_of([ahead], advantage=[gain], old=[0.0], reference=[0.0])
    assert gradient_at(clipped(bound, bound)[0], rows) == [-gain * ratio]
    within = bound - 1e-6
    assert gradient_at(clipped(within, within)[0], rows) == [0.0]
    twice = row_of([1.0], advantage=[-1.0], old=[0.0], reference=[0.0])
    dual = ratio_of(1.0)
    assert gradient_at(clipped(dual=dual)[0], twice) == [dual]
    assert gradient_at(clipped(dual=dual - 1e-6)[0], twice) == [0.0]


@pytest.mark.parametrize("ahead", [88.5, 89.0, 500.0, math.inf])
def test_a_held_token_has_a_gradient_of_zero_however_far_it_went(ahead: float) -> None:
    rows = row_of([0.0] * 2, advantage=[1.0, 0.0], old=[-ahead] * 2, reference=[0.0] * 2)
    for case in ("clipped", "clipped twice"):
        formula = CASES[case][0]
        assert gradient_at(formula, rows) == [0.0, 0.0]
        assert loss_at(formula, rows) == pytest.approx([-1.2, 0.0])
    fallen = row_of([0.0], advantage=[-1.0], old=[-ahead], reference=[0.0])
    assert gradient_at(CASES["clipped twice"][0], fallen) == [0.0]


def test_a_value_at_its_goal_or_at_its_bound() -> None:
    goal = row_of([0.5], returns=[0.5], old_values=[0.5])
    assert gradient_at(CASES["value, clipped"][0], goal, "values") == [0.0]
    bound = row_of([0.75], returns=[2.0], old_values=[0.5])
    assert gradient_at(value(0.25)[0], bound, "values") == [-1.25]
    assert gradient_at(value(0.2499)[0], bound, "values") == [0.0]


def test_values_within_their_bounds_are_not_held_to_the_bit() -> None:
    draw = np.random.default_rng(0)
    old = draw.uniform(-3, 3, 500).astype(np.float32).tolist()
    values = [v + float(x) for v, x in zip(old, draw.uniform(-0.19, 0.19, 500), strict=True)]
    rows = row_of(values, returns=[0.0] * 500, old_values=old)
    terms = value(0.2)[0](rows, torch.tensor(values))
    assert float(terms.metrics["value/clip_fraction"][0]) == 0.0


@pytest.mark.parametrize("gap", [0.0, 1e-6, -1e-6])
def test_a_pair_that_policy_and_reference_agree_on_has_half_the_slope(gap: float) -> None:
    rows = row_of([-1.0 + gap, -2.0], reference=[-1.0, -2.0])
    pair = replace(rows, row_group=[0, 0], by_row={"sign": torch.tensor([1.0, -1.0])})
    # -beta * sigmoid(-0) = -0.3 / 2 for the chosen row, as much upwards for the rejected one.
    assert gradient_at(CASES["dpo"][0], pair) == pytest.approx([-0.15, 0.15], rel=1e-5)


@pytest.mark.parametrize("d", [1e-3, -1e-3, 1e-5, -1e-5])
def test_a_small_divergence_has_its_digits(d: float) -> None:
    rows = row_of([d], advantage=[0.0], old=[d], reference=[0.0])
    exact = math.expm1(-float(np.float32(d))) + float(np.float32(d))
    close = pytest.approx([exact], rel=3e-2 if abs(d) < 1e-4 else 3e-4)
    assert loss_at(clipped(beta=1.0)[0], rows) == close
