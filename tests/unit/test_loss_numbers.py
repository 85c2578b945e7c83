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

    def now(self, said: Tensor, **other: Any) -> Now:
        """float32, as in training."""
        groups, sampler = torch.tensor(self.row_group), self.columns["sampler"].float()
        sizes = {"rows": len(self.lengths), "groups": int(groups.max()) + 1}
        where = {"row": self.row, "group": groups[self.row], "row_group": groups}
        given = {"logprobs": said, "sampler_logprobs": sampler} | other
        return Now(mask=self.mask.float(), step=1, **sizes, **where, **given)

    def port(self, column: str, source: str) -> Tensors[Any]:
        found = self.columns.get(source, self.by_row.get(source))
        assert found is not None
        return Tensors({column: found.float()})


def drawn(seed: int, *, extreme: bool) -> FlatRows:
    """Groups of one and several, one-token rows, holes, untrained rows; foreign tokens have nan."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 4, draw.integers(1, 4))
    row_group = np.repeat(np.arange(len(sizes)), sizes).tolist()
    lengths = draw.integers(1, 6, len(row_group)).tolist()
    mask = (draw.random(sum(lengths)) < 0.75).astype(np.float64)
    mask[: lengths[0]] *= draw.random() < 0.5
    size = len(mask)

    def column(low: float, high: float) -> np.ndarray:
        return draw.uniform(low, high, size).astype(np.float32).astype(np.float64)

    now = column(-4, 0)
    far = draw.choice(FAR, (4, size)) if extreme else np.zeros((4, size))
    columns = {"now": now, "values": column(-2, 2), "entropy": column(0, 3)}
    for name, away in zip(("sampler", "old", "reference", "proximal"), far, strict=True):
        columns[name] = now + column(-1, 1) * (not extreme) - away
    columns |= {"advantage": column(-2, 2), "returns": column(-2, 2), "old_values": column(-2, 2)}
    if extreme:
        columns["advantage"] = draw.choice([-2.0, -1.0, 0.0, 1.0], size)
    for name in columns.keys() - {"now", "values", "entropy"}:
        columns[name] = np.where(mask > 0, columns[name], np.nan)
    signs = np.concatenate([[1.0, -1.0, 1.0][:n] for n in sizes])
    by_row = {"reward": draw.uniform(-1, 1, len(row_group)), "sign": signs}

    def rounded(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
        return {n: torch.from_numpy(a.astype(np.float32)).double() for n, a in arrays.items()}

    return FlatRows(lengths, row_group, torch.from_numpy(mask), rounded(columns), rounded(by_row))


Over = Literal["truncate", "mask"]
Formula = Callable[[FlatRows, Tensor], Terms]
Textbook = Callable[[FlatRows, Tensor], Tensor]


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
    def ours(rows: FlatRows, said: Tensor) -> Terms:
        ports = rows.port("advantage", "advantage"), rows.port("logprobs", "old")
        reference = rows.port("logprobs", "reference")
        how = {"clip": (low, high), "kl": kl, "beta": beta, "dual_clip": dual}
        return policy_formulas.clipped_policy(rows.now(said), *ports, reference, **how)

    def textbook(now: Tensor, gain: Tensor, old: Tensor, reference: Tensor) -> Tensor:
        loss = surrogate(now - old, gain, low, high)
        if dual is not None:  # arXiv:1912.09729, equation 5
            loss = torch.where(gain < 0, -torch.maximum(-loss, dual * gain), loss)
        return loss + beta * estimate(now - reference, kl) if beta else loss

    return ours, tokens(textbook, "advantage", "old", "reference")


def decoupled(cap: float | None, over: Over, *, mass: float = 0.0) -> tuple[Formula, Textbook]:
    def ours(rows: FlatRows, said: Tensor) -> Terms:
        now = rows.now(said, sampler_mass=torch.full_like(said, mass).detach() if mass else None)
        ports = (rows.port("advantage", "advantage"), rows.port("logprobs", "proximal"))
        correction = Importance(above=cap, over=over)
        return policy_formulas.decoupled_policy(now, *ports, correction=correction)

    def textbook(now: Tensor, gain: Tensor, near: Tensor, sampler: Tensor) -> Tensor:
        """arXiv:2505.24298, equation 5; the sampler drew from a part of its distribution."""
        weight = (near - (sampler - mass)).exp().detach()
        if cap is not None:
            weight = torch.where(weight > cap, 0.0 if over == "mask" else cap, weight)
        return weight * surrogate(now - near, gain, 0.2, 0.2)

    return ours, tokens(textbook, "advantage", "proximal", "sampler")


def kl(kind: str) -> tuple[Formula, Textbook]:
    def ours(rows: FlatRows, said: Tensor) -> Terms:
        return loss_formulas.kl(rows.now(said), rows.port("logprobs", "reference"), kind=kind)

    return ours, tokens(lambda now, reference: estimate(now - reference, kind), "reference")


def clipped_weight(correction: Importance | None = None) -> tuple[Formula, Textbook]:
    """arXiv:2506.13585, equation 4, with the bound as an absolute number."""

    def ours(rows: FlatRows, said: Tensor) -> Terms:
        ports = rows.port("advantage", "advantage"), rows.port("logprobs", "old")
        how = {"cap": 5.0, "correction": correction}
        return policy_formulas.clipped_weight(rows.now(said), *ports, **how)

    def textbook(now: Tensor, gain: Tensor, old: Tensor, sampler: Tensor) -> Tensor:
        weight = (now - old).exp().clamp(max=5.0).detach()
        return -corrected(weight, old - sampler, correction) * gain * now

    return ours, tokens(textbook, "advantage", "old", "sampler")


def corrected(weight: Tensor, log_weight: Tensor, correction: Importance | None) -> Tensor:
    """Times exp(log_weight), held between the bounds of a correction of tokens."""
    if correction is None:
        return weight
    low, high = correction.below, correction.above
    return weight * log_weight.exp().clamp(low, high)  # type: ignore[arg-type]


def soft_clipped(correction: Importance | None = None) -> tuple[Formula, Textbook]:
    """arXiv:2511.20347, equations 5 and 6."""

    def ours(rows: FlatRows, said: Tensor) -> Terms:
        ports = rows.port("advantage", "advantage"), rows.port("logprobs", "old")
        how = {"tau_pos": 1.0, "tau_neg": 1.05, "correction": correction}
        return policy_formulas.soft_clipped_policy(rows.now(said), *ports, **how)

    def textbook(now: Tensor, gain: Tensor, old: Tensor, sampler: Tensor) -> Tensor:
        tau = torch.where(gain > 0, 1.0, 1.05)
        # exp(200) is finite in float64, its slope times that of the gate 0 times large: 0.
        gate = torch.sigmoid(tau * ((now - old).exp() - 1)) * 4 / tau
        return -corrected(torch.ones_like(gate), old - sampler, correction) * gate * gain

    return ours, tokens(textbook, "advantage", "old", "sampler")


def policy_gradient() -> tuple[Formula, Textbook]:
    def ours(rows: FlatRows, said: Tensor) -> Terms:
        return policy_formulas.policy_gradient(rows.now(said), rows.port("advantage", "advantage"))

    return ours, tokens(lambda now, gain: -gain * now, "advantage")


def supervised() -> tuple[Formula, Textbook]:
    return lambda rows, said: loss_formulas.supervised(rows.now(said)), tokens(lambda now: -now)


def entropy() -> tuple[Formula, Textbook]:
    def ours(rows: FlatRows, said: Tensor) -> Terms:
        return loss_formulas.entropy(rows.now(said.detach(), entropy=said))

    return ours, tokens(lambda spread: -spread)


def value(clip: float | None) -> tuple[Formula, Textbook]:
    def ours(rows: FlatRows, said: Tensor) -> Terms:
        ports = rows.port("returns", "returns"), rows.port("values", "old_values")
        return loss_formulas.value(rows.now(said.detach(), values=said), *ports, clip=clip)

    def textbook(v: Tensor, goal: Tensor, old: Tensor) -> Tensor:
        free = (v - goal) ** 2
        if clip is None:
            return free / 2
        return torch.maximum(free, (old + (v - old).clamp(-clip, clip) - goal) ** 2) / 2

    return ours, tokens(textbook, "returns", "old_values")


def margins(rows: FlatRows, said: Tensor) -> list[Tensor]:
    gap = torch.where(rows.mask > 0, said - torch.nan_to_num(rows.columns["reference"]), 0.0)
    return [part.sum() for part in gap.split(rows.lengths)]


def groups(rows: FlatRows) -> list[list[int]]:
    numbers = range(max(rows.row_group) + 1)
    return [[r for r, g in enumerate(rows.row_group) if g == group] for group in numbers]


def dpo() -> tuple[Formula, Textbook]:
    def ours(rows: FlatRows, said: Tensor) -> Terms:
        ports = rows.port("sign", "sign"), rows.port("logprobs", "reference")
        return loss_formulas.dpo(rows.now(said), *ports, beta=0.3)

    def textbook(rows: FlatRows, said: Tensor) -> Tensor:
        """arXiv:2305.18290, equation 7."""
        signed = torch.stack(margins(rows, said)) * rows.by_row["sign"]
        logits = torch.stack([0.3 * signed[members].sum() for members in groups(rows)])
        return -torch.nn.functional.logsigmoid(logits.double())

    return ours, textbook


def trajectory_balance() -> tuple[Formula, Textbook]:
    def ours(rows: FlatRows, said: Tensor) -> Terms:
        reward, reference = rows.port("reward", "reward"), rows.port("logprobs", "reference")
        return loss_formulas.trajectory_balance(rows.now(said), reward, reference, beta=0.7)

    def textbook(rows: FlatRows, said: Tensor) -> Tensor:
        """arXiv:2503.18929, equations 4 and 5."""
        gap = [m - rows.by_row["reward"][r] / 0.7 for r, m in enumerate(margins(rows, said))]
        parts = []
        for members in groups(rows):
            log_z = -sum(gap[r].detach() for r in members) / len(members)
            parts.append(sum((log_z + gap[r]) ** 2 for r in members) / len(members))
        return torch.stack([torch.as_tensor(p) for p in parts])

    return ours, textbook


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
    "policy gradient": policy_gradient(),
    "supervised": supervised(),
    "entropy": entropy(),
    "value": value(None),
    "value, clipped": value(0.3),
    "dpo": dpo(),
    "trajectory balance": trajectory_balance(),
}


OF_MODEL = {"entropy": "entropy", "value": "values", "value, clipped": "values"}
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


def check(case: str, rows: FlatRows, atol: float = 1e-6) -> None:
    ours, textbook = CASES[case]
    mask, model = rows.mask, rows.columns[OF_MODEL.get(case, "now")]
    said32, said64 = model.float().requires_grad_(), model.clone().requires_grad_()
    loss, gradient = term_and_gradient(ours(rows, said32).loss, said32, mask)
    true_loss, true_gradient = term_and_gradient(textbook(rows, said64), said64, mask)
    require_near(loss, true_loss, "loss", atol)
    require_near(gradient, true_gradient, "gradient", atol)
    assert (gradient[mask.numpy() == 0] == 0).all(), "a gradient at a foreign token"


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_random_rows(case: str, seed: int) -> None:
    check(case, drawn(seed, extreme=False))


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_rows_far_from_their_sampler(case: str, seed: int) -> None:
    # What is left of a row's sum of several hundred in float32.
    check(case, drawn(seed, extreme=True), 1e-4 if case in ("dpo", "trajectory balance") else 1e-6)


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


def gradient_at(ours: Formula, rows: FlatRows, model: str = "now") -> list[float]:
    said = rows.columns[model].float().requires_grad_()
    return term_and_gradient(ours(rows, said).loss, said, rows.mask)[1].tolist()


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
        ours = CASES[case][0]
        assert gradient_at(ours, rows) == [0.0, 0.0]
        assert ours(rows, rows.columns["now"].float()).loss.tolist() == pytest.approx([-1.2, 0.0])
    fallen = row_of([0.0], advantage=[-1.0], old=[-ahead], reference=[0.0])
    assert gradient_at(CASES["clipped twice"][0], fallen) == [0.0]


def test_a_dropped_token_counts_nothing_however_far_it_went() -> None:
    rows = row_of([0.0] * 2, advantage=[-1.0, 1.0], proximal=[-200.0] * 2, sampler=[-400.0] * 2)
    ours = CASES["decoupled, mask"][0]
    assert gradient_at(ours, rows) == [0.0, 0.0]
    assert ours(rows, rows.columns["now"].float()).loss.tolist() == [0.0, 0.0]


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
    now = rows.now(torch.tensor(said), values=torch.tensor(said))
    ports = rows.port("returns", "returns"), rows.port("values", "old_values")
    terms = loss_formulas.value(now, *ports, clip=0.2)
    assert float(terms.metrics["value/clip_fraction"][0]) == 0.0


@pytest.mark.parametrize("gap", [0.0, 1e-6, -1e-6])
def test_a_pair_that_policy_and_reference_agree_on_has_half_the_slope(gap: float) -> None:
    pair = one_group([-1.0 + gap, -2.0], reference=[-1.0, -2.0], sign=[1.0, -1.0])
    # -beta * sigmoid(-0) = -0.3 / 2 for the chosen row, as much upwards for the rejected one.
    assert gradient_at(CASES["dpo"][0], pair) == pytest.approx([-0.15, 0.15], rel=1e-5)


@pytest.mark.parametrize("d", [1e-3, -1e-3, 1e-5, -1e-5])
def test_a_small_divergence_has_its_digits(d: float) -> None:
    rows = row_of([d], advantage=[0.0], old=[d], reference=[0.0])
    ours = clipped(0.2, 0.2, "k3", 1.0, None)[0]
    exact = math.expm1(-float(np.float32(d))) + float(np.float32(d))
    said = rows.columns["now"].float()
    assert float(ours(rows, said).loss) == pytest.approx(exact, rel=3e-2 if abs(d) < 1e-4 else 3e-4)


def test_rows_on_their_groups_mean_are_balanced() -> None:
    both = one_group([-1.0] * 2, reference=[-1.0] * 2, reward=[0.5, 0.5])
    assert gradient_at(CASES["trajectory balance"][0], both) == [0.0, 0.0]
