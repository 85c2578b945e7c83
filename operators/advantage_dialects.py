"""Dialects of advantages and rewards: the numbers in which peers differ, and the words for them.

Owns: a table for each operator that has a dialect, with the release and the file that each entry
was read in, and what a peer has no answer to. Does not own: the formulas (advantage_formulas.py).

Read were TRL 1.16.0 (`trl/trainer/grpo_trainer.py`, `rloo_trainer.py`, `trl/rewards`) and, for its
PPO, 1.12.0, the last release that has it (`trl/experimental/ppo/ppo_trainer.py`); verl 0.9.1
(`verl/trainer/ppo/core_algos.py`, `verl/utils/torch_functional.py`,
`verl/workers/reward_manager/dapo.py`); OpenRLHF 0.11.2
(`openrlhf/trainer/ppo_utils/experience_maker.py`, `length_penalty.py`, `openrlhf/models/utils.py`).
NeMo-RL 0.7.0 is not on the package index: its source was read (`nemo_rl/algorithms/utils.py`,
`advantage_estimator.py`, `reward_functions.py`), and nothing of it was run. Whitening is that of
its REINFORCE++; its PPO whitens as TRL does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dataflow.convention import DIALECTS, Convention, Gap


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDialect:
    """How a peer normalises a group: epsilon is added to the unbiased standard deviation.

    lone: the advantage of a group's only row, which has nothing to compare with: 0, or its own
    reward, as if the mean were 0 and the deviation 1. undivided: a row for which the deviation is 0
    is not divided, instead of by epsilon.
    """

    epsilon: float
    lone: Literal["zero", "reward"] = "zero"
    undivided: bool = False

    def describe(self) -> str:
        """Say it in words."""
        divisor = f"unbiased deviation + {self.epsilon:g}"
        if self.undivided:
            divisor += ", undivided where it is 0"
        lone = "its own reward" if self.lone == "reward" else "0"
        return f"{divisor}; a group's only row gets {lone}"


GROUP_DIALECTS: Mapping[str, GroupDialect] = {
    "trl": GroupDialect(epsilon=1e-4),
    "verl": GroupDialect(epsilon=1e-6, lone="reward"),
    "openrlhf": GroupDialect(epsilon=1e-9),
    "nemo_rl": GroupDialect(epsilon=1e-6, undivided=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhitenDialect:
    """How a peer scales a Step to variance 1: what is subtracted from the count in the denominator,
    and whether 1e-8 is added to the variance or is its minimum.
    """

    freedom: Literal[0, 1]
    floor: Literal["added", "least"]

    def describe(self) -> str:
        """Say it in words."""
        count = "count - 1" if self.freedom else "count"
        floor = "+ 1e-8" if self.floor == "added" else "at least 1e-8"
        return f"variance by {count}, {floor}"


WHITEN_DIALECTS: Mapping[str, WhitenDialect] = {
    "trl": WhitenDialect(freedom=1, floor="added"),
    "verl": WhitenDialect(freedom=1, floor="added"),
    "openrlhf": WhitenDialect(freedom=0, floor="least"),
    "nemo_rl": WhitenDialect(freedom=0, floor="least"),
}


MOST = 10.0
"""Where peers clamp an estimate of a divergence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KLDialect:
    """Where a peer clamps: which estimates of a token to [-MOST, MOST], and inside of which its log
    ratio to [-ratio, ratio].
    """

    clamped: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    ratio: float = 20.0

    def describe(self) -> str:
        """Say it in words."""
        if not self.clamped:
            return "nothing is clamped"
        clamps: list[str] = []
        if self.inside:
            clamps.append(f"log ratio of {', '.join(self.inside)} within {self.ratio:g}")
        clamps.append(f"{', '.join(self.clamped)} within {MOST:g}")
        return "; ".join(clamps)


KL_DIALECTS: Mapping[str, KLDialect] = {
    "trl": KLDialect(),
    "verl": KLDialect(clamped=("k3",), inside=("k3",)),
    "openrlhf": KLDialect(clamped=("k1", "k2", "k3")),
    "nemo_rl": KLDialect(clamped=("k1", "k2", "k3"), inside=("k1", "k2", "k3")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HoleDialect:
    """Whether a hole in the mask (tool output) is a step of discount with value 0, or skipped."""

    counts: bool

    def describe(self) -> str:
        """Say it in words."""
        return "a hole is a step of value 0" if self.counts else "holes are skipped"


HOLE_DIALECTS: Mapping[str, HoleDialect] = {
    "trl": HoleDialect(counts=False),
    "verl": HoleDialect(counts=False),
    "openrlhf": HoleDialect(counts=True),
    "nemo_rl": HoleDialect(counts=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongDialect:
    """Whether the penalty stays at its most for answers longer than max_tokens, or goes on."""

    capped: bool

    def describe(self) -> str:
        """Say it in words."""
        return "at most factor" if self.capped else "beyond max_tokens it goes on growing"


OVERLONG_DIALECTS: Mapping[str, OverlongDialect] = {
    "trl": OverlongDialect(capped=True),
    "verl": OverlongDialect(capped=False),
    "openrlhf": OverlongDialect(capped=True),
    "nemo_rl": OverlongDialect(capped=False),
}


_AnyDialect = GroupDialect | WhitenDialect | KLDialect | HoleDialect | OverlongDialect


def _make_conventions(
    dialects: Mapping[str, _AnyDialect], gaps: Mapping[str, tuple[Gap, ...]]
) -> dict[str, Convention]:
    """For each peer the words of its dialect, and its gaps."""
    conventions: dict[str, Convention] = {}
    for name in DIALECTS:
        conventions[name] = Convention(says=dialects[name].describe(), gaps=gaps.get(name, ()))
    return conventions


def _make_gap(lacks: str, instead: str, **where: object) -> Gap:
    """A gap that matters where each of these parameters has this value."""
    conditions = tuple((name, (setting,)) for name, setting in where.items())
    return Gap(lacks=lacks, instead=instead, where=conditions)


_OTHERS = _make_gap("leave-one-out deviation", "as nemo_rl, + 1e-6", scale="leave_one_out_std")
_MAXIMUM = _make_gap("scale by the mean reward", "the paper's, without an epsilon", scale="mean")
_MIXED = _make_gap(
    "deviation with a leave-one-out baseline",
    "that of the whole group",
    baseline="leave_one_out",
    scale="std",
)
_BY_LENGTH = _make_gap("length-weighted baseline", "as verl", baseline="length_weighted")

GROUP_CONVENTIONS = _make_conventions(
    GROUP_DIALECTS,
    {
        "trl": (_MAXIMUM, _OTHERS, _MIXED, _BY_LENGTH),
        "verl": (_MAXIMUM, _OTHERS, _MIXED),
        "openrlhf": (
            _MAXIMUM,
            _OTHERS,
            _MIXED,
            _BY_LENGTH,
            _make_gap("groups that lost rows", "they count by what they have left", ragged=True),
        ),
        "nemo_rl": (_MAXIMUM, _BY_LENGTH),
    },
)
_NO_UNSHIFTED = (_make_gap("whitening that keeps the mean", "the mean added again", shift=False),)
WHITEN_CONVENTIONS = _make_conventions(
    WHITEN_DIALECTS,
    {"openrlhf": _NO_UNSHIFTED, "nemo_rl": _NO_UNSHIFTED},
)
KL_CONVENTIONS = _make_conventions(
    KL_DIALECTS,
    {"trl": (_make_gap("k2 in the reward", "as its k1 and k3, not clamped", kind="k2"),)},
)
_AFTER = Gap(
    lacks="estimate that ends with the answer (its PPO goes on to the position after it)",
    instead="the answer's last token is the last",
)
_NO_RETURNS = (Gap(lacks="returns without a critic", instead="as verl"),)
GAE_CONVENTIONS = _make_conventions(HOLE_DIALECTS, {"trl": (_AFTER,)})
RETURNS_CONVENTIONS = _make_conventions(HOLE_DIALECTS, {"trl": _NO_RETURNS, "nemo_rl": _NO_RETURNS})
OVERLONG_CONVENTIONS = _make_conventions(OVERLONG_DIALECTS, {})
