"""AdamW over some of a module's weights, whose state may wait in host memory between updates.

Owns: torch's AdamW of these weights, and which of their tensors wait. Does not own: how a tensor
waits (offload.py), gradients, all weights together, files (optimizer.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from operators.kernels.torch.offload import HostTensors, wait_for_host
from operators.optimizers import AdamW

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's tensors as large as a weight, in the order of their places in HostTensors."""
_COPY = len(_MOMENTS)
"""The place of a master that is a copy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Master:
    """The float32 tensor that AdamW updates for one weight.

    is_copy: whether it has numbers of its own, and is no part of the module. host: where the copy
    and the moments wait; None for a master whose state stays on the device.
    """

    parameter: nn.Parameter
    is_copy: bool
    host: HostTensors | None = None

    @staticmethod
    def make_waiting(parameter: nn.Parameter, *, is_copy: bool) -> Master:
        """Make a master whose state waits, from now on."""
        host = HostTensors(parameter, _COPY + is_copy)
        if is_copy:
            host.park(_COPY, parameter)
        return Master(parameter=parameter, is_copy=is_copy, host=host)

    @property
    def stored(self) -> Tensor:
        """The numbers between two updates, in memory that stays the same."""
        if self.host is None or not self.is_copy:
            return self.parameter.detach()
        return self.host.view(_COPY)


class AdamBucket:
    """AdamW over some masters; those that wait are on the device within `present` only.

    first: the number of the first of them among all of the module.
    """

    def __init__(self, masters: Sequence[Master], first: int, settings: AdamW) -> None:
        self.masters, self.first = masters, first
        self._is_present = False
        self._adam = torch.optim.AdamW(
            [master.parameter for master in masters],
            lr=0.0,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    @property
    def groups(self) -> list[dict[str, Any]]:
        """AdamW's settings, as it saves them."""
        return self._adam.state_dict()["param_groups"]

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Inside it, all state is on the device. A failure leaves on the host what was there."""
        for host, place, tensor in self._list_waiting():
            host.fetch(place, tensor)
        self._is_present = True
        yield
        self._is_present = False
        for host, place, tensor in self._list_waiting():
            host.park(place, tensor)
        if any(master.host for master in self.masters):
            wait_for_host(self.masters[0].parameter.device)

    def _list_waiting(self) -> Iterator[tuple[HostTensors, int, Tensor]]:
        """Every tensor that waits, with its place."""
        for master in self.masters:
            if master.host is None:
                continue
            if master.is_copy:
                yield master.host, _COPY, master.parameter
            # A weight has no moments before its first gradient.
            moments = self._adam.state.get(master.parameter, {})
            for place, name in enumerate(_MOMENTS):
                if name in moments:
                    yield master.host, place, moments[name]

    def step(self, lr: float) -> None:
        """Update the masters from their gradients."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()

    def states(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """AdamW's tensors of each weight that has some, where they are now, by its number among all
        of the module.
        """
        for index, master in enumerate(self.masters):
            state = dict(self._adam.state.get(master.parameter, {}))
            if not state:
                continue
            if master.host is not None and not self._is_present:
                for place, name in enumerate(_MOMENTS):
                    state[name] = master.host.view(place)
            yield self.first + index, state

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take over AdamW's tensors from a saved state of all weights; inside `present`."""
        states: dict[int, Mapping[str, Tensor]] = {}
        for index, master in enumerate(self.masters):
            state = saved["state"].get(self.first + index)
            if state is None:
                continue
            if master.host is not None:
                # What was read from a file may not give back its memory.
                state = {name: tensor.clone() for name, tensor in state.items()}
            states[index] = state
        # Moments go on; betas, eps and weight decay are those of this train node.
        groups = self.groups
        self._adam.load_state_dict({"state": states, "param_groups": groups})

    def move(self, device: torch.device) -> None:
        """Move AdamW's state, but for what waits."""
        for master in self.masters:
            state = self._adam.state.get(master.parameter, {})
            for name, tensor in state.items():
                if master.host is None or name not in _MOMENTS:
                    state[name] = tensor.to(device)
