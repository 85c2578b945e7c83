"""Whether a generator with its adapter merged computes what its trainer does.

Owns: the comparison, and the error. Does not own: merging (merged_matrices.py), the rows and what
is allowed (dataflow/log_prob_probe.py).

A trainer computes with the base and the adapter beside it. Merged weights are rounded to the
module's dtype, each by up to 1/256 of itself in bfloat16: that may be more than an update.
"""

from __future__ import annotations

from torch import nn

from dataflow.errors import KernelError
from dataflow.log_prob_probe import measure_difference, probe_rows, tolerance_of
from dataflow.model import Model
from operators.kernels.torch.merged_matrices import find_merged
from operators.kernels.torch.probe import compute_probe, vocabulary_of


def require_agreement(
    module: nn.Module, model: Model, *, node: str, version: int, seed: int
) -> None:
    """Raise KernelError, naming the node, if the module's log-probs with the adapter merged are
    beyond the probe's bound from those with it unmerged. Does nothing for a module that merges
    nothing.
    """
    merged = find_merged(module)
    if merged is None:
        return
    rows = probe_rows(seed, vocabulary_of(module))
    merged_numbers = compute_probe(module, rows, head=model.head)
    with merged.unmerged():
        trainer_numbers = compute_probe(module, rows, head=model.head)
    weight = next(module.parameters())
    dtype = str(weight.dtype).removeprefix("torch.")
    difference = measure_difference(trainer_numbers, merged_numbers, tolerance_of([dtype]))
    if difference.is_allowed:
        return
    raise KernelError(
        f"{node}: merge=True computes other log-probs with version {version} of {model.name!r} than"
        f" its trainer: {difference}; rounding to {dtype} is {merged.measure_error():.2g} times the"
        f" adapter's update. Fix: merge=False, or Model({model.name!r}, ..., dtype='float32')."
    )
