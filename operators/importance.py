"""Importance correction: the weight of tokens whose sampler was not quite the trainer's policy.

Owns: what a correction is, as a value of a graph. Does not own: the weights (policy_formulas.py),
the losses that take one (policy_losses.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from dataflow.calls import call_error, declares, require
from dataflow.limits import choice, number
from dataflow.model import Number

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Importance:
    """A correction; `importance` makes one and says what it means."""

    level: Level = "token"
    above: Number | None = 2.0
    below: Number | None = None
    over: Literal["truncate", "mask"] = "truncate"

    def __repr__(self) -> str:
        """The call that makes it, without defaults."""
        arguments: list[str] = []
        for field in fields(self):
            setting = getattr(self, field.name)
            if setting != field.default:
                arguments.append(f"{field.name}={setting!r}")
        return f"importance({', '.join(arguments)})"


_LIMITS = {
    "level": choice("token", "sequence", "geometric"),
    "above": number(1.0, like=2.0, optional=True),
    "below": number(0.0, 1.0, above=True, like=0.5, optional=True),
    "over": choice("truncate", "mask"),
}


@declares
def importance(
    level: Level = "token",
    *,
    above: Number | None = 2.0,
    below: Number | None = None,
    over: Literal["truncate", "mask"] = "truncate",
) -> Importance:
    """Weights w = pi_old / pi_sampler for a policy loss, where the sampler's numbers are not the
    trainer's (TIS and MIS: truncated and masked importance sampling), or where rows are stale.

    pi_old: the trainer's log-probs before the Step, the loss's `old`. pi_sampler: what the tokens
    were really drawn from, after top-k and top-p. level: `token`, each its own ratio; `sequence`,
    the product over the row's trained tokens, which is unbiased; `geometric`, that product to the
    power 1 / tokens. over: what becomes of a weight above `above` or below `below` (None: no such
    bound): `truncate` makes it the bound, `mask` makes it 0; a weight at a bound stays. w is a
    constant: no gradient. The denominators of train count tokens of weight 0, too. Weights do not
    touch a KL term.

    Peers: TRL 1.16 vllm_importance_sampling_mode token_truncate, token_mask, sequence_truncate or
    sequence_mask (its default, with above=3.0); verl 0.9 rollout_is token or sequence, truncated,
    or with two bounds masked (IcePop).
    """
    settings = {"level": level, "above": above, "below": below, "over": over}
    for name, limit in _LIMITS.items():
        setting = settings[name]
        require(
            "importance",
            name,
            setting,
            fits=limit.accepts(setting),
            expected=limit.describe(setting),
            fix=f"{name}={limit.suggestion(setting)!r}",
        )
    bounds = [bound for bound in (below, above) if isinstance(bound, (int, float))]
    if len(bounds) == 2 and bounds[0] >= bounds[1]:
        problem = f"expected below < above, found below={below} and above={above}"
        raise call_error("importance", problem, "below=0.5, above=2.0")
    return Importance(level=level, above=above, below=below, over=over)
