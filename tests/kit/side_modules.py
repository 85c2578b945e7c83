"""Side modules of the tests: one that works, and such as are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dataflow.side_module import Side, side

WIDTH = 8


class NarrowReader(nn.Module):
    """Reads what each layer leaves at a token through a narrow matrix, and adds to what the head
    reads. It begins by adding zero.
    """

    def __init__(self, hidden: int, layers: int, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(layers))
        self.up = nn.Linear(width, hidden, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, states: tuple[Tensor, ...], last: Tensor) -> Tensor:
        narrow = torch.zeros((), dtype=last.dtype, device=last.device)
        for down, state in zip(self.down, states, strict=True):
            narrow = narrow + nn.functional.gelu(down(state))
        return last + self.up(narrow)


def make_reader(config: Any, width: int = WIDTH) -> NarrowReader:
    return NarrowReader(config.hidden_size, config.num_hidden_layers, width)


class Mixer(NarrowReader):
    """Adds the mean of all tokens."""

    def forward(self, states: tuple[Tensor, ...], last: Tensor) -> Tensor:
        return super().forward(states, last) + 0.0 * last.mean(1, keepdim=True)


def make_mixer(config: Any) -> nn.Module:
    return Mixer(config.hidden_size, config.num_hidden_layers, WIDTH)


class Counter(NarrowReader):
    """Divides by how many tokens there are."""

    def forward(self, states: tuple[Tensor, ...], last: Tensor) -> Tensor:
        return super().forward(states, last) / last.shape[1]


def make_counter(config: Any) -> nn.Module:
    return Counter(config.hidden_size, config.num_hidden_layers, WIDTH)


class Narrow(NarrowReader):
    """Returns half of what the head needs."""

    def forward(self, states: tuple[Tensor, ...], last: Tensor) -> Tensor:
        return super().forward(states, last)[..., ::2]


def make_narrow(config: Any) -> nn.Module:
    return Narrow(config.hidden_size, config.num_hidden_layers, WIDTH)


def make_nothing(config: Any) -> None:
    del config


def make_constant(config: Any) -> nn.Module:
    del config
    return nn.Identity()


def make_half_frozen(config: Any) -> nn.Module:
    reader = make_reader(config)
    reader.down.requires_grad_(False)
    return reader


READER: Side = side(make_reader, width=WIDTH)
