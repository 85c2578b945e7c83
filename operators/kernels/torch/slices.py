"""Tensor-parallel ranks: the matrices of attention and MLP, split over ranks with the same rows.

Owns: which matrices are split (transformers' plan for the architecture), and the gradients and
norms of split weights. Does not own: who is in the mesh, sums over data-parallel ranks
(parallel.py), the product of a split matrix (split_linear.py), the tables of the vocabulary
(vocabulary_part.py), attention (attention.py, which works with any number of heads).

In each layer a rank has some of the heads and some of the MLP's columns. The results are summed
over the ranks after the output and the down projection, and the input gradients of the other
matrices in the backward (Megatron-LM, arXiv:1909.08053, section 3). So all hidden states, and the
gradients of norms, and of tables that every rank has whole, are the same on all ranks.
Norms within attention (Qwen3) are whole, too, but see only a rank's own heads: their gradients are
summed.

FSDP2 may split what each rank then has, whole weights too, over the ranks of other rows. Here
"part" is what a rank has after both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import filter as matching
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import get_total_norm

from dataflow.errors import KernelError
from dataflow.kernel import Session
from operators.kernels.torch.parallel import TENSOR, gather_whole, part_like
from operators.kernels.torch.split_linear import COLUMNS, ROWS, split_linear
from operators.kernels.torch.vocabulary_part import split_vocabulary

_STYLES = (COLUMNS, ROWS)
_SUMMED = "replicated_with_grad_allreduce"
_WHOLE = "embedding_rowwise"
"""The embeddings', in plans of transformers up to 5.19: they are split with the head here."""


def split_over_replica(module: nn.Module, session: Session, node: str) -> None:
    """Split a module over the ranks of a replica, unless it is: kernels may share it. Raises
    KernelError for one that cannot be split, and without a process group.
    """
    if session.group is None:
        raise KernelError(
            f"{node}: expected a process group for its {session.world} ranks, found none. Fix:"
            " plan it with one rank."
        )
    device = next(module.parameters()).device
    mesh = DeviceMesh.from_group(session.group, device.type, mesh_dim_names=(TENSOR,))
    slice_module(module, mesh, node)


def slice_module(module: nn.Module, mesh: DeviceMesh, node: str) -> Slices:
    """Split a module in place, or return what it is split by. mesh: of the ranks that have a part
    each; the same ones for all nodes that share the module. Raises KernelError for a module that
    cannot be split over so many.
    """
    slices = _SLICES.get(module)
    if slices is None:
        slices = _SLICES[module] = Slices(module, mesh, node)
    return slices


_SLICES: WeakKeyDictionary[nn.Module, Slices] = WeakKeyDictionary()
"""What splits each module that is split."""


class Slices:
    """One rank's part of a module that is split in place; ranks must start with equal weights.

    After FSDP has split it too, `note_sharding` says so.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, node: str) -> None:
        """Raises KernelError for a module that cannot be split over this many ranks."""
        backbone: Any = module.base_model
        styles = _find_styles(module, mesh.size(), node)
        for path, style in styles.items():
            if style != _SUMMED:
                split_linear(backbone.get_submodule(path), mesh, style)
        for path in _column_blocks(styles):
            block = backbone.get_submodule(path)
            block.register_forward_pre_hook(_make_reading_hook(mesh), with_kwargs=True)
        split_vocabulary(module, mesh)
        self._group = mesh.get_group()
        self._ranks = mesh.size()
        self._all_ranks = self._group
        summed_paths = [path for path, style in styles.items() if style == _SUMMED]
        self._summed_blocks = [backbone.get_submodule(path) for path in summed_paths]
        self._summed = self._find_summed()

    def note_sharding(self, all_ranks: Any) -> None:
        """Take note that FSDP has split the module, over the ranks of this group that have the same
        part: the weights are others now.
        """
        self._all_ranks = all_ranks
        self._summed = self._find_summed()

    def _find_summed(self) -> set[int]:
        """Find the weights, by identity, whose gradients are summed."""
        weights: set[int] = set()
        for block in self._summed_blocks:
            weights |= {id(weight) for weight in block.parameters()}
        return weights

    def same(self, output: Tensor) -> Tensor:
        """Return a tensor that is the same on all ranks; its gradient becomes their mean.

        Sums on a GPU have no fixed order, and weights that every rank has whole must not drift.
        """
        return _Same.apply(output, self._group, self._ranks)  # type: ignore[return-value]

    def part(self, weight: Tensor) -> Tensor:
        """This rank's part of a weight: a view, not a copy."""
        detached = weight.detach()
        return detached.to_local() if isinstance(detached, DTensor) else detached

    def gradient(self, weight: Tensor) -> Tensor | None:
        """The gradient of this rank's part."""
        grad = weight.grad
        if not isinstance(grad, DTensor) or not isinstance(weight, DTensor):
            return grad
        return grad.redistribute(placements=weight.placements).to_local()

    def gather(self, weight: Tensor, part: Tensor) -> Tensor:
        """Gather a tensor for a whole weight from each rank's part (every rank must call); one that
        is already whole is returned unchanged.
        """
        if not isinstance(weight, DTensor) or not part.dim():
            return part
        split_tensor = DTensor.from_local(
            part,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
        return gather_whole(split_tensor)

    def cut(self, weight: Tensor, tensor: Tensor) -> Tensor:
        """The inverse of `gather`: this rank's part of a tensor for a whole weight."""
        return self.part(part_like(weight, tensor))

    @torch.no_grad()
    def sum_gradients(self, weights: Iterable[Tensor], parts: Iterable[Tensor]) -> None:
        """Sum the gradients of whole weights that each rank used for its own heads only."""
        for weight, part in zip(weights, parts, strict=True):
            if id(weight) in self._summed and part.grad is not None:
                dist.all_reduce(part.grad, group=self._group)

    def norm(self, weights: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
        """Compute the gradient norm of the whole module, the same to the bit on all ranks."""
        split_grads: list[Tensor] = []
        whole_grads: list[Tensor] = []
        for weight, part in zip(weights, parts, strict=True):
            if part.grad is not None:
                grads = split_grads if _is_split(weight) else whole_grads
                grads.append(part.grad)
        norms = [get_total_norm(grads, foreach=True) for grads in (split_grads, whole_grads)]
        # The norm of no gradients is a tensor on the host.
        wide = [norm.to(parts[0].device, torch.float64) for norm in norms]
        squares = torch.stack([norm.square() for norm in wide])
        # Each tensor rank adds the gradients that all of them have whole.
        squares[1] /= self._ranks
        dist.all_reduce(squares, group=self._all_ranks)
        return squares.sum().sqrt().float()


def _make_reading_hook(mesh: DeviceMesh) -> Callable[..., tuple[Any, Any]]:
    """Make a hook that marks the common input of several matrices of a block as whole before the
    block runs, so that its gradient is summed over ranks once, and not once for each matrix (the
    default). Without gradients nothing is marked.
    """

    def mark(states: Tensor) -> DTensor:
        return DTensor.from_local(states, mesh, [Replicate()], run_check=False)

    def mark_input(
        block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        if not torch.is_grad_enabled():
            return args, kwargs
        # transformers calls some blocks with positions, others with keywords.
        if args:
            return (mark(args[0]), *args[1:]), kwargs
        if "hidden_states" in kwargs:
            kwargs = kwargs | {"hidden_states": mark(kwargs["hidden_states"])}
        return args, kwargs

    return mark_input


class _Same(torch.autograd.Function):
    """The identity; its backward is the mean over ranks."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, group: Any, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad / ctx.ranks, None, None


def _is_split(weight: Tensor) -> bool:
    """Whether each tensor rank has a part of it; a bias after a sum is whole on all of them."""
    if not isinstance(weight, DTensor):
        return False
    names = weight.device_mesh.mesh_dim_names or ()
    if TENSOR not in names:
        return False
    return weight.placements[names.index(TENSOR)].is_shard()


def _find_styles(module: nn.Module, ranks: int, node: str) -> dict[str, str]:
    """Find the style of each split part of the backbone, by its path. Raises KernelError if the
    module cannot be split.
    """
    config: Any = module.config
    backbone: Any = module.base_model
    whole_plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    plan = {pattern: style for pattern, style in whole_plan.items() if style != _WHOLE}
    paths = [path for path, _ in backbone.named_modules()]
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        styles |= dict.fromkeys(matching(paths, pattern), style)
    unknown = sorted(set(plan.values()) - {*_STYLES, _SUMMED})
    if unknown or not styles:
        what = f"one with {', '.join(unknown)}" if unknown else "none"
        raise KernelError(
            f"{node}: expected transformers to have a tensor-parallel plan of"
            f" {' and '.join(_STYLES)} for {config.model_type!r}, found {what}. Fix: tensor=1, or a"
            " decoder such as Qwen2, Qwen3, Llama or Mistral."
        )
    if uncovered := _find_uncovered(backbone, styles):
        raise KernelError(
            f"{node}: expected transformers' tensor-parallel plan for {config.model_type!r} to say"
            f" what becomes of each weight next to a split one, found nothing of {uncovered[0]},"
            " whose gradient would be that of a rank's own heads. Fix: tensor=1."
        )
    if indivisible := _find_indivisible(module, styles, ranks):
        raise KernelError(
            f"{node}: expected sizes divisible by its {ranks} tensor ranks, found"
            f" {indivisible[0]}. Fix: tensor=1."
        )
    return styles


def _column_blocks(styles: dict[str, str]) -> list[str]:
    """The paths of blocks whose input is read by matrices that are split by columns."""
    matrices = [path for path, style in styles.items() if style == "colwise"]
    return sorted({path.rpartition(".")[0] for path in matrices})


def _find_uncovered(backbone: nn.Module, styles: dict[str, str]) -> list[str]:
    """Find weights, in a block whose input is split by columns, that the plan does not mention."""
    covered = tuple(f"{path}." for path in styles)
    uncovered: list[str] = []
    for block in _column_blocks(styles):
        named = backbone.get_submodule(block).named_parameters()
        paths = [f"{block}.{name}" for name, _ in named]
        uncovered += [path for path in paths if not path.startswith(covered)]
    return uncovered


def _find_indivisible(module: nn.Module, styles: dict[str, str], ranks: int) -> list[str]:
    """Find the numbers of heads and the split dimensions that the ranks cannot share equally."""
    config: Any = module.config
    backbone: Any = module.base_model
    heads = ("num_attention_heads", "num_key_value_heads")
    sizes = {name: int(getattr(config, name, 0)) for name in heads}
    for path, style in styles.items():
        if style in _STYLES:
            sizes[path] = _split_length(backbone.get_submodule(path), style)
    return [f"{name} of {size}" for name, size in sizes.items() if size % ranks]


def _split_length(matrix: Any, style: str) -> int:
    """The dimension along which a linear layer is split: its output or its input."""
    return int(matrix.out_features if style == "colwise" else matrix.in_features)
