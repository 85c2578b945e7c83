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
from operators.kernels.torch.parallel import like, whole
from operators.kernels.torch.slices import Slices
from operators.optimizers import AdamW


class _Remembering:
    """The file that torch writes to; keeps the first OSError, whose errno torch loses."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write everything; after the first error, write nothing more."""
        view = memoryview(data).cast("B")
        at = 0
        try:
            while at < len(view) and self.error is None:
                at += self._file.write(view[at:]) or 0
        except OSError as error:
            self.error = error
        return len(view)

    def flush(self) -> None:
        """Do nothing: writes are unbuffered."""


def save_state(state: Mapping[str, Any], path: Path) -> None:
    """Write what `Optimizer.state` returned. Raises StorageError."""
    moments = [
        v for of in state["adam"]["state"].values() for v in of.values() if isinstance(v, Tensor)
    ]
    size = sum(v.numel() * v.element_size() for v in [*moments, *state["copies"]])
    with writing("the optimizer's state", path, size):
        with open(path, "wb", buffering=0) as file:
            kept = _Remembering(file)
            torch.save(state, cast(IO[bytes], kept))  # it only uses write and flush
        if kept.error is not None:
            raise kept.error


def chosen(optimizer: Any, node: str) -> AdamW:
    """The AdamW that `train(optimizer=)` names. Raises KernelError for anything else."""
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
        self._masters = [self._master(p) for p in self._weights]
        pairs = list(zip(self._weights, self._masters, strict=True))
        self._apart = [(p, m) for p, m in pairs if m is not p]
        """Weights whose master is another tensor; a float32 weight's part shares its memory."""
        self._copied = [(p, m) for p, m in pairs if p.dtype != torch.float32]
        self._clip = clip_norm
        self._adam = torch.optim.AdamW(
            self._masters,
            lr=0.0,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def _master(self, weight: nn.Parameter) -> nn.Parameter:
        if self._slices is not None:
            return nn.Parameter(self._slices.part(weight).float())
        return weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())

    def collect(self) -> None:
        """After each backward: add the weights' gradients to those of their masters."""
        for weight, master in self._apart:
            grad = weight.grad if self._slices is None else self._slices.gradient(weight)
            if grad is not None:
                wide = grad.float()
                master.grad = wide if master.grad is None else master.grad.add_(wide)
                weight.grad = None

    def norm(self) -> Tensor:
        """The norm of all gradients, the same on all ranks."""
        if self._slices is not None:
            self._slices.sum_gradients(self._weights, self._masters)
            return self._slices.norm(self._weights, self._masters)
        return whole(
            get_total_norm([m.grad for m in self._masters if m.grad is not None], foreach=True)
        )

    def step(self, lr: float, norm: Tensor) -> None:
        """Clip to clip_norm (None or 0: not at all), update, and drop the gradients."""
        if self._clip:
            clip_grads_with_norm_(self._masters, self._clip, norm, foreach=True)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        with torch.no_grad():
            for weight, master in self._copied:
                own = weight if self._slices is None else self._slices.part(weight)
                own.copy_(master)
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
        """Everything that the next update depends on, except the module's own weights.

        Split tensors are gathered: every rank must call.
        """
        adam = self._adam.state_dict()
        adam["state"] = {
            i: {k: self._gathered(self._weights[i], v) for k, v in of.items()}
            for i, of in adam["state"].items()
        }
        copies = [self._gathered(p, m.detach()) for p, m in self._copied]
        return {"names": self._names, "adam": adam, "copies": copies, "step": step}

    def _gathered(self, weight: nn.Parameter, value: Tensor) -> Tensor:
        """A tensor unchanged; a split one gathered to the host, which has room for all."""
        found = whole(value) if self._slices is None else self._slices.gathered(weight, value)
        return found if found is value else found.cpu()

    def _cut(self, index: int, value: Tensor) -> Tensor:
        """This rank's part of a value for a whole weight."""
        if self._slices is None:
            return like(self._masters[index], value)
        return self._slices.cut(self._weights[index], value)

    def move(self, device: torch.device) -> None:
        """Move masters and AdamW's state, after the module was moved."""
        for weight, master in self._apart:
            shared = self._slices is not None and weight.dtype == torch.float32
            master.data = (
                self._slices.part(weight) if self._slices and shared else master.data.to(device)
            )
        for of in self._adam.state.values():
            of.update({name: value.to(device) for name, value in of.items()})

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
        for i, of in saved["adam"]["state"].items():
            of.update({k: self._cut(i, v) for k, v in of.items() if v.dim()})
        # Moments go on; betas, eps and weight decay are those of this train node.
        groups = self._adam.state_dict()["param_groups"]
        self._adam.load_state_dict({"state": saved["adam"]["state"], "param_groups": groups})
        with torch.no_grad():
            narrow = [i for i, weight in enumerate(self._weights) if weight.dtype != torch.float32]
            for i, copy in zip(narrow, saved["copies"], strict=True):
                self._masters[i].copy_(self._cut(i, copy))
        return int(saved["step"])


def _read(path: Path) -> Any:
    """What is in a file of tensors and plain values. Raises CheckpointError for any other file:
    torch's own error says how to let the file run code.
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
