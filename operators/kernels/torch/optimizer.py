"""The optimizer: one update of a module's weights from their gradients.

Owns: AdamW over a module, with float32 copies of narrower weights, the gradient norm, and its
state on disk. Does not own: the settings that users write (operators/optimizers.py), where state
waits between updates (adam_bucket.py, offload.py).
"""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dataflow.errors import CheckpointError, KernelError
from dataflow.storage import writing
from operators.kernels.tensors import widen
from operators.kernels.torch.adam_bucket import AdamBucket, Master
from operators.kernels.torch.offload import (
    BUCKET,
    count_largest_part,
    cut_buckets,
    has_own_memory,
    wait_for_host,
)
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
    updates this rank's part of each. offload: whether copies and moments wait on the host between
    updates; where the device is the host, this changes nothing but the number of weights that are
    updated at once.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: AdamW,
        clip_norm: float | None,
        slices: Slices | None = None,
        *,
        offload: bool = False,
    ) -> None:
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        self._weights = [p for p in module.parameters() if p.requires_grad]
        self._slices = slices
        # One after another: a copy that waits makes room for the next one.
        self._all_masters = [self._make_master(weight, offload) for weight in self._weights]
        self._masters = [master.parameter for master in self._all_masters]
        pairs = list(zip(self._weights, self._masters, strict=True))
        self._apart = [(weight, master) for weight, master in pairs if master is not weight]
        """Weights whose master is another tensor; a float32 weight's part shares its memory."""
        if self._weights:
            wait_for_host(self._weights[0].device)  # until copies that wait can be read there
        self._clip = clip_norm
        self._buckets = list(self._make_buckets(settings, offload))

    def _make_master(self, weight: nn.Parameter, offload: bool) -> Master:
        """Make the tensor that AdamW updates: the weight itself, or a float32 one for it."""
        is_copy = torch.finfo(weight.dtype).bits < 32
        if self._slices is not None:
            parameter = nn.Parameter(widen(self._slices.part(weight)))
        elif is_copy:
            parameter = nn.Parameter(weight.detach().float())
        else:
            parameter = weight
        if offload and has_own_memory(weight.device):
            return Master.make_waiting(parameter, is_copy=is_copy)
        return Master(parameter=parameter, is_copy=is_copy)

    def _make_buckets(self, settings: AdamW, offload: bool) -> Iterator[AdamBucket]:
        """Cut the masters into parts that are updated one after another; into one if none waits."""
        cuts = [range(len(self._all_masters))]
        if offload:
            # Ranks may have parts of unequal sizes, and go through the buckets together.
            sizes = [count_largest_part(weight) for weight in self._weights]
            cuts = list(cut_buckets(sizes, BUCKET))
        for cut in cuts:
            yield AdamBucket(self._all_masters[cut.start : cut.stop], cut.start, settings)

    def collect(self) -> None:
        """After each backward: add the weights' gradients to those of their masters."""
        for weight, master in self._apart:
            grad = weight.grad if self._slices is None else self._slices.gradient(weight)
            if grad is None:
                continue
            # Micro-batches are added up in float32: bfloat16 would lose what is small.
            wide = widen(grad)
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
        for bucket in self._buckets:
            with bucket.present():
                bucket.step(lr)
                self._copy_back(bucket)
        self.clear()

    @torch.no_grad()
    def _copy_back(self, bucket: AdamBucket) -> None:
        """Give the weights what their float32 copies have become."""
        for index, master in enumerate(bucket.masters, bucket.first):
            if master.is_copy:
                weight = self._weights[index]
                target = weight if self._slices is None else self._slices.part(weight)
                target.copy_(master.parameter)

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in (*self._weights, *self._masters):
            parameter.grad = None

    @property
    def masters(self) -> list[nn.Parameter]:
        """The tensors that AdamW updates, with the gradients of the module's weights; without
        numbers where these wait.
        """
        return self._masters

    @property
    def stored_masters(self) -> list[Tensor]:
        """The masters' numbers between two updates, of those too that wait."""
        return [master.stored for master in self._all_masters]

    def state(self, step: int) -> dict[str, Any]:
        """Collect everything that the next update depends on, except the module's own weights.

        Split tensors are gathered: every rank must call.
        """
        moments: dict[int, dict[str, Tensor]] = {}
        copies: list[Tensor] = []
        for bucket in self._buckets:
            with self._reading(bucket):
                for index, state in bucket.states():
                    moments[index] = self._gather_all(index, state)
                for index, master in enumerate(bucket.masters, bucket.first):
                    if master.is_copy:
                        copies.append(self._gather(index, self._read_copy(master)))
        # As of one AdamW over all weights, however many there are.
        [group] = self._buckets[0].groups
        groups = [group | {"params": list(range(len(self._weights)))}]
        adam = {"state": moments, "param_groups": groups}
        return {"names": self._names, "adam": adam, "copies": copies, "step": step}

    @property
    def _is_split(self) -> bool:
        """Whether this rank has only a part of the weights."""
        return self._slices is not None or any(isinstance(w, DTensor) for w in self._weights)

    def _reading(self, bucket: AdamBucket) -> contextlib.AbstractContextManager[None]:
        """The place where a bucket's state is read: the device for split state, which ranks gather
        there; else where it is.
        """
        return bucket.present() if self._is_split else contextlib.nullcontext()

    def _read_copy(self, master: Master) -> Tensor:
        """A copy's numbers, inside `_reading`."""
        return master.parameter.detach() if self._is_split else master.stored

    def _gather_all(self, index: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather AdamW's state of one weight."""
        return {name: self._gather(index, part) for name, part in state.items()}

    def _gather(self, index: int, part: Tensor) -> Tensor:
        """Gather a split tensor to the host, which has room for all; any other is unchanged, but
        copied if it will not stay where it is.
        """
        if self._slices is None:
            gathered = gather_whole(part)
        else:
            gathered = self._slices.gather(self._weights[index], part)
        if gathered is not part:
            return gathered.cpu()
        if self._is_split and self._all_masters[index].host is not None:
            return part.to("cpu", copy=True)
        return part

    def _cut(self, index: int, tensor: Tensor) -> Tensor:
        """Cut this rank's part out of a tensor for a whole weight."""
        if self._slices is None:
            return part_like(self._masters[index], tensor)
        return self._slices.cut(self._weights[index], tensor)

    def move(self, device: torch.device) -> None:
        """Move masters and AdamW's state, after the module was moved; what waits does not move."""
        for weight, master in zip(self._weights, self._all_masters, strict=True):
            if self._slices is not None and not master.is_copy:
                # The part of the moved weight: a copy would no longer share its memory.
                master.parameter.data = self._slices.part(weight)
            elif master.is_copy and master.host is None:
                master.parameter.data = master.parameter.data.to(device)
        for bucket in self._buckets:
            bucket.move(device)

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
        copies = iter(saved["copies"])
        for bucket in self._buckets:
            with bucket.present(), torch.no_grad():
                bucket.load(saved["adam"])
                for index, master in enumerate(bucket.masters, bucket.first):
                    if master.is_copy:
                        master.parameter.copy_(self._cut(index, next(copies)))
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
