"""The optimizer: one update of a module's weights from their gradients.

Owns: AdamW over a module, with float32 copies of narrower weights, the gradient norm, and its
state on disk. Does not own: the settings that users write (operators/optimizers.py).
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dataflow.errors import CheckpointError, KernelError
from dataflow.storage import writing
from operators.kernels.torch.parallel import gather_whole, part_like
from operators.kernels.torch.slices import Slices
from operators.optimizers import AdamW


class _Remembering:
    """The file that torch writes to; keeps the first OSError, whose errno torch loses."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, buffer: Any) -> int:
        """Write everything; after the first error, write nothing more."""
        view = memoryview(buffer).cast("B")
        at = 0
        try:
            while at < len(view) and self.error is None:
                at += self._file.write(view[at:]) or 0
        except OSError as error:
            self.error = error
        return len(view)

    def flush(self) -> None:
        """Do nothing: writes are unbuffered."""


def save_optimizer_state(state: Mapping[str, Any], path: Path) -> None:
    """Write what `Optimizer.state` returned. Raises StorageError."""
    tensors: list[Tensor] = list(state["copies"])
    for moments in state["adam"]["state"].values():
        tensors += [moment for moment in moments.values() if isinstance(moment, Tensor)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    with writing("the optimizer's state", path, size):
        with open(path, "wb", buffering=0) as file:
            remembering = _Remembering(file)
            torch.save(state, cast(IO[bytes], remembering))  # it only uses write and flush
        if remembering.error is not None:
            raise remembering.error


def require_adamw(optimizer: Any, node: str) -> AdamW:
    """Read which AdamW `train(optimizer=)` names. Raises KernelError for anything else."""
    if optimizer == "adamw":
        return AdamW()
    if not isinstance(optimizer, AdamW):
        raise KernelError(
            f"{node}: expected optimizer 'adamw' or operators.optimizers.AdamW(...), found"
            f" {optimizer!r:.60}. Fix: optimizer=AdamW(betas=(0.9, 0.99))."
        )
    return optimizer


class Optimizer:
    """AdamW over the module's own weights, or over float32 copies of those that are not float32.

    At a learning rate of 1e-6 most updates are too small to change a bfloat16 weight; in the copy
    they add up. slices: given if the module's matrices are split over tensor ranks; AdamW then
    updates this rank's part of each.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: AdamW,
        clip_norm: float | None,
        slices: Slices | None = None,
    ) -> None:
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        self._weights = [p for p in module.parameters() if p.requires_grad]
        self._slices = slices
        self._masters = [self._make_master(weight) for weight in self._weights]
        pairs = list(zip(self._weights, self._masters, strict=True))
        self._apart = [(weight, master) for weight, master in pairs if master is not weight]
        """Weights whose master is another tensor; a float32 weight's part shares its memory."""
        self._copied = [(weight, m) for weight, m in pairs if weight.dtype != torch.float32]
        """Weights whose master has numbers of its own: each step copies them back."""
        self._clip = clip_norm
        self._adam = torch.optim.AdamW(
            self._masters,
            lr=0.0,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def _make_master(self, weight: nn.Parameter) -> nn.Parameter:
        """Make the tensor that AdamW updates: the weight itself, or a float32 one for it."""
        if self._slices is not None:
            return nn.Parameter(self._slices.part(weight).float())
        if weight.dtype == torch.float32:
            return weight
        return nn.Parameter(weight.detach().float())

    def collect(self) -> None:
        """After each backward: add the weights' gradients to those of their masters."""
        for weight, master in self._apart:
            grad = weight.grad if self._slices is None else self._slices.gradient(weight)
            if grad is None:
                continue
            # Micro-batches are added up in float32: bfloat16 would lose what is small.
            wide = grad.float()
            master.grad = wide if master.grad is None else master.grad.add_(wide)
            weight.grad = None

    def norm(self) -> Tensor:
        """Compute the norm of all gradients, the same on all ranks."""
        if self._slices is not None:
            self._slices.sum_gradients(self._weights, self._masters)
            return self._slices.norm(self._weights, self._masters)
        gradients = [master.grad for master in self._masters if master.grad is not None]
        return gather_whole(get_total_norm(gradients, foreach=True))

    def step(self, lr: float, norm: Tensor) -> None:
        """Clip to clip_norm (None or 0: not at all), update, and drop the gradients."""
        if self._clip:
            clip_grads_with_norm_(self._masters, self._clip, norm, foreach=True)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        with torch.no_grad():
            for weight, master in self._copied:
                target = weight if self._slices is None else self._slices.part(weight)
                target.copy_(master)
        self.clear()

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in (*self._weights, *self._masters):
            parameter.grad = None

    @property
    def masters(self) -> list[nn.Parameter]:
        """The tensors that AdamW updates, with the gradients of the module's weights."""
        return self._masters

    def state(self, step: int) -> dict[str, Any]:
        """Collect everything that the next update depends on, except the module's own weights.

        Split tensors are gathered: every rank must call.
        """
        adam = self._adam.state_dict()
        adam["state"] = {i: self._gather_all(i, state) for i, state in adam["state"].items()}
        copies = [self._gather(weight, master.detach()) for weight, master in self._copied]
        return {"names": self._names, "adam": adam, "copies": copies, "step": step}

    def _gather_all(self, index: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather AdamW's state of one weight."""
        weight = self._weights[index]
        return {name: self._gather(weight, part) for name, part in state.items()}

    def _gather(self, weight: nn.Parameter, part: Tensor) -> Tensor:
        """Gather a split tensor to the host, which has room for all; any other is unchanged."""
        if self._slices is None:
            gathered = gather_whole(part)
        else:
            gathered = self._slices.gather(weight, part)
        return part if gathered is part else gathered.cpu()

    def _cut(self, index: int, tensor: Tensor) -> Tensor:
        """Cut this rank's part out of a tensor for a whole weight."""
        if self._slices is None:
            return part_like(self._masters[index], tensor)
        return self._slices.cut(self._weights[index], tensor)

    def move(self, device: torch.device) -> None:
        """Move masters and AdamW's state, after the module was moved."""
        for weight, master in self._apart:
            if self._slices is not None and weight.dtype == torch.float32:
                # The part of the moved weight: a copy would no longer share its memory.
                master.data = self._slices.part(weight)
            else:
                master.data = master.data.to(device)
        for state in self._adam.state.values():
            state.update({name: tensor.to(device) for name, tensor in state.items()})

    def restore(self, path: Path) -> int:
        """Read a saved `state`, after the module's weights were read; returns the step.

        Raises CheckpointError if it belongs to another module.
        """
        if not path.is_file():
            raise CheckpointError(
                f"expected the optimizer's state at {path}, found nothing. Fix: another checkpoint."
            )
        saved = _read(path)
        if saved["names"] != self._names:
            raise CheckpointError(
                f"{path}: expected the state of {len(self._names)} weights, found that of another"
                " model. Fix: the checkpoint of this Model."
            )
        for i, state in saved["adam"]["state"].items():
            # AdamW's count of steps has no dimension, and is the same on all ranks.
            state.update({name: self._cut(i, t) for name, t in state.items() if t.dim()})
        # Moments go on; betas, eps and weight decay are those of this train node.
        groups = self._adam.state_dict()["param_groups"]
        self._adam.load_state_dict({"state": saved["adam"]["state"], "param_groups": groups})
        with torch.no_grad():
            narrow = [i for i, weight in enumerate(self._weights) if weight.dtype != torch.float32]
            for i, copy in zip(narrow, saved["copies"], strict=True):
                self._masters[i].copy_(self._cut(i, copy))
        return int(saved["step"])


def _read(path: Path) -> Any:
    """Read a file of tensors and plain values. Raises CheckpointError for any other file, in our
    own words: torch's say how to let the file run code.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a pickle that is refused anyway
            return torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        problem = "expected the state of an optimizer, found a file that is none, or is damaged"
        raise CheckpointError(f"{path}: {problem}. Fix: an earlier checkpoint.") from error
