"""Dialects of losses: where peers clamp a ratio or a divergence, and the words for it.

Owns: a table for each, with what a peer has no answer to. Does not own: the formulas
(policy_formulas.py, loss_formulas.py), the tables of advantages and rewards, and which releases
were read (advantage_dialects.py).

Read besides: TRL 1.16.0 `GRPOTrainer._compute_loss`, verl 0.9.1 `compute_policy_loss_vanilla`,
`_gspo`, `_sapo` and `kl_penalty_forward` (`verl/trainer/ppo/core_algos.py`), OpenRLHF 0.11.2
`PolicyLoss` (`openrlhf/models/loss.py`) and `compute_approx_kl` (`openrlhf/models/utils.py`),
NeMo-RL 0.7.0 `ClippedPGLossFn` (`nemo_rl/algorithms/loss/loss_functions.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from dataflow.convention import DIALECTS, Convention, Gap
from operators.advantage_dialects import KL_DIALECTS


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioDialect:
    """How far from 0 a peer lets the log of a token's ratio be, and of a row's how far above."""

    token: float = inf
    row: float = inf

    def describe(self) -> str:
        """Say it in words."""
        if self.token == inf:
            return "log ratios as they are"
        of_tokens = f"log ratios of tokens within {self.token:g}"
        if self.row == inf:
            return of_tokens
        return f"{of_tokens}, a row's at most {self.row:g}"


RATIO_DIALECTS: Mapping[str, RatioDialect] = {
    "trl": RatioDialect(),
    "verl": RatioDialect(token=20.0, row=10.0),
    "openrlhf": RatioDialect(token=20.0),
    "nemo_rl": RatioDialect(),
}

Gaps = Mapping[str, tuple[Gap, ...]]
"""What each peer has no answer to."""

_SAPO = Gap(lacks="SAPO", instead="log ratios as in its clip")
_NO_SAPO: Gaps = dict.fromkeys(("openrlhf", "nemo_rl"), (_SAPO,))

_PROXIMAL = Gap(lacks="clip around a proximal policy", instead="as around its old one")
_NO_PROXIMAL: Gaps = dict.fromkeys(("trl", "openrlhf", "nemo_rl"), (_PROXIMAL,))


def _only_k3(parameter: str) -> Gaps:
    """What TRL's losses lack, where this parameter is the estimator."""
    gaps: list[Gap] = []
    for kind in ("k1", "k2"):
        where = ((parameter, (kind,)),)
        gaps.append(Gap(lacks=f"{kind} in a loss", instead="not clamped, as its k3", where=where))
    return {"trl": tuple(gaps)}


def _make_conventions(says: Mapping[str, str], gaps: Gaps) -> dict[str, Convention]:
    """For each peer the words and its gaps."""
    conventions: dict[str, Convention] = {}
    for name in DIALECTS:
        conventions[name] = Convention(says=says[name], gaps=gaps.get(name, ()))
    return conventions


_RATIO = {name: dialect.describe() for name, dialect in RATIO_DIALECTS.items()}
_KL = {name: dialect.describe() for name, dialect in KL_DIALECTS.items()}
_BOTH = {name: f"{_RATIO[name]}; KL: {_KL[name]}" for name in DIALECTS}

CLIPPED_CONVENTIONS = _make_conventions(_BOTH, _only_k3("kl"))
DECOUPLED_CONVENTIONS = _make_conventions(_RATIO, _NO_PROXIMAL)
SOFT_CLIPPED_CONVENTIONS = _make_conventions(_RATIO, _NO_SAPO)
KL_CONVENTIONS = _make_conventions(_KL, _only_k3("kind"))
