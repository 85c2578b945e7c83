"""Optimizers as values of the language: what `train(optimizer=)` takes.

Owns: their parameters. Does not own: the update itself (kernels/torch/optimizer.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from dataflow.calls import constructs, require
from dataflow.limits import number


@constructs
@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101);
    `optimizer="adamw"` is AdamW().

    The second moment forgets faster than usual (0.99): the scale of policy gradients changes with
    the rewards. No weight decay: it would pull a policy away from its base.
    """

    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(
            "AdamW",
            "betas",
            self.betas,
            fits=_are_betas(self.betas),
            expected="two numbers in [0, 1)",
            fix="betas=(0.9, 0.99)",
        )
        for name, limit in _LIMITS.items():
            setting = getattr(self, name)
            require(
                "AdamW",
                name,
                setting,
                fits=limit.accepts(setting),
                expected=limit.describe(setting),
                fix=f"{name}={limit.like!r}",
            )


def _are_betas(betas: object) -> bool:
    if not isinstance(betas, tuple) or len(betas) != 2:
        return False
    return all(map(_BETA.accepts, betas)) and 1.0 not in betas


_BETA = number(0.0, 1.0, like=0.9)
_LIMITS = {"eps": number(0.0, above=True, like=1e-8), "weight_decay": number(0.0, like=0.0)}
