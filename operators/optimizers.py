"""Optimizers as values of the language: what `train(optimizer=)` takes.

Owns: their parameters. Does not own: the update itself (kernels/torch/optimizer.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from dataflow.errors import Fault, GraphError
from dataflow.operator import call_site


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101); `optimizer="adamw"` is AdamW().

    The second moment forgets faster than usual (0.99): policy gradients change scale as rewards do. No weight decay:
    it would pull a policy away from its base.
    """

    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not (all(0.0 <= beta < 1.0 for beta in self.betas) and self.eps > 0.0 and self.weight_decay >= 0.0):
            problem = f"expected betas in [0, 1), eps > 0 and weight_decay >= 0, found {self.betas}, {self.eps}, "
            problem += f"{self.weight_decay}"
            raise GraphError(Fault(rule="call", where="AdamW", problem=problem, fix="AdamW()", origin=call_site()))
