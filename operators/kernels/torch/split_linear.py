"""Linear layers of which each tensor rank has some of the columns, or of the rows.

Owns: how one is split in place, and its product. Does not own: which layers these are, and the
gradients of what is not split (slices.py).

    by columns   whole input, this rank's part of the output
    by rows      this rank's part of the input; the output is the sum over ranks, whole on each

With gradients the product is one of DTensors, which know what a gradient needs. Without, each rank
multiplies by its part alone: a DTensor's rules cost a token's pass more than its products do.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

COLUMNS, ROWS = "colwise", "rowwise"
"""transformers' names."""


class _SplitLinear(nn.Linear):
    """A linear layer whose weights are DTensors over one mesh."""

    input_placement: Placement = Replicate()

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out], this rank's parts of these where they are split."""
        if not torch.is_grad_enabled():
            return self._multiply(input)
        mesh = self._weights.device_mesh
        if not isinstance(input, DTensor):
            input = DTensor.from_local(input, mesh, [self.input_placement], run_check=False)
        return self._join(super().forward(input))

    @property
    def _weights(self) -> DTensor:
        weight = self.weight
        assert isinstance(weight, DTensor)
        return weight

    def _multiply(self, part: Tensor) -> Tensor:
        """The product without gradients."""
        return nn.functional.linear(part, self._weights.to_local(), self._find_bias())

    def _find_bias(self) -> Tensor | None:
        bias = self.bias
        return bias.to_local() if isinstance(bias, DTensor) else bias

    def _join(self, output: Tensor) -> Tensor:
        """This rank's output, of one that is split or is still to be summed."""
        assert isinstance(output, DTensor)
        return output.to_local()


class _ByColumns(_SplitLinear):
    pass


class _ByRows(_SplitLinear):
    input_placement = Shard(-1)

    def _multiply(self, part: Tensor) -> Tensor:
        output = nn.functional.linear(part, self._weights.to_local())
        dist.all_reduce(output, group=self._weights.device_mesh.get_group())
        bias = self._find_bias()
        return output if bias is None else output + bias

    def _join(self, output: Tensor) -> Tensor:
        assert isinstance(output, DTensor)
        return output.redistribute(placements=[Replicate()]).to_local()


def split_linear(linear: nn.Module, mesh: DeviceMesh, style: str) -> None:
    """Split a linear layer in place over the ranks of a mesh; each has the same weights before.
    style: COLUMNS or ROWS.
    """
    assert isinstance(linear, nn.Linear)
    by_columns = style == COLUMNS
    placements = {
        "weight": Shard(0) if by_columns else Shard(1),
        "bias": Shard(0) if by_columns else Replicate(),
    }
    for name, weight in list(linear.named_parameters(recurse=False)):
        # Every rank has the weights: nothing is sent.
        part = distribute_tensor(weight.detach(), mesh, [placements[name]], src_data_rank=None)
        linear.register_parameter(name, nn.Parameter(part, requires_grad=weight.requires_grad))
    linear.__class__ = _ByColumns if by_columns else _ByRows
