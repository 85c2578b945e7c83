"""A side module of your own: the trained weights beside a base that stays as it is.

    python examples/user_side.py

It reads what every decoder layer leaves at a token and adds to what the head reads there. Nothing
is computed backward below it, and only its weights are sent and saved (SHERL, arXiv:2407.07523).
"""

from __future__ import annotations

from typing import Any

import tiny
import torch
from torch import Tensor, nn
from user_reward import short_digits

from dataflow import Graph, side
from engine.api import Result, run
from graphs.grpo import grpo


# begin: what you add
class LayerReader(nn.Module):
    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        hidden, layers = config.hidden_size, config.num_hidden_layers
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(layers))
        self.up = nn.Linear(width, hidden, bias=False)
        nn.init.zeros_(self.up.weight)  # it begins as its base

    def forward(self, states: tuple[Tensor, ...], last: Tensor) -> Tensor:
        narrow = [down(state) for down, state in zip(self.down, states, strict=True)]
        return last + self.up(torch.stack(narrow).mean(0))


def make_reader(config: Any, width: int = 64) -> nn.Module:
    return LayerReader(config, width)


# end


def graph(*, width: int = 64) -> Graph:
    """GRPO that trains the side module alone."""
    files = tiny.make()
    adapter = side(make_reader, width=width)
    return grpo(
        files.model, files.train, short_digits, n=8, batch=8, max_tokens=8, lr=3e-2, adapter=adapter
    )


def main(steps: int = 12) -> Result:
    """A short run."""
    return run(graph(), tiny.options("user_side", steps=steps), on_step=[tiny.show])


if __name__ == "__main__":
    main()
