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

    def says(self) -> str:
        """In words."""
        if self.token == inf:
            return "log ratios as they are"
        row = f", a row's at most {self.row:g}" if self.row < inf else ""
        return f"log ratios of tokens within {self.token:g}{row}"


RATIO_DIALECTS: Mapping[str, RatioDialect] = {
    "trl": RatioDialect(),
    "verl": RatioDialect(token=20.0, row=10.0),
    "openrlhf": RatioDialect(token=20.0),
    "nemo_rl": RatioDialect(),
}

_ONLY_K3 = {
    "trl": tuple(
        Gap(lacks=f"{kind} in a loss", instead="not clamped, as its k3", where=((name, (kind,)),))
        for name in ("kl", "kind")
        for kind in ("k1", "k2")
    )
}
_NO_SAPO = {
    name: (Gap(lacks="SAPO", instead="log ratios as in its clip"),)
    for name in ("openrlhf", "nemo_rl")
}
_NO_PROXIMAL = {
    name: (Gap(lacks="clip around a proximal policy", instead="as around its old one"),)
    for name in ("trl", "openrlhf", "nemo_rl")
}


def _conventions(
    says: Mapping[str, str], gaps: Mapping[str, tuple[Gap, ...]], *parameters: str
) -> dict[str, Convention]:
    """For each peer the words, and those gaps that the loss's own parameters can meet."""
    return {
        name: Convention(
            says=says[name],
            gaps=tuple(
                gap
                for gap in gaps.get(name, ())
                if all(parameter in parameters for parameter, _ in gap.where)
            ),
        )
        for name in DIALECTS
    }


_RATIO = {name: how.says() for name, how in RATIO_DIALECTS.items()}
_KL = {name: how.says() for name, how in KL_DIALECTS.items()}
_BOTH = {name: f"{_RATIO[name]}; KL: {_KL[name]}" for name in DIALECTS}

CLIPPED_CONVENTIONS = _conventions(_BOTH, _ONLY_K3, "kl")
DECOUPLED_CONVENTIONS = _conventions(_RATIO, _NO_PROXIMAL)
SOFT_CLIPPED_CONVENTIONS = _conventions(_RATIO, _NO_SAPO)
KL_CONVENTIONS = _conventions(_KL, _ONLY_K3, "kind")
