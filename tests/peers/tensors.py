"""What peers get and return as torch has it: padded rows, and a loss with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.peers.inputs import PeerVectors, cut, padded


def tensor(tokens: Any) -> torch.Tensor:
    return torch.tensor(padded(tokens), dtype=torch.float64)


def keep_loss(
    made: PeerVectors,
    batch: str,
    given: Any,
    called: str,
    name: str,
    how: Any,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    column: str = "now",
) -> None:
    """A case: the loss of a column of the batch, and its gradient by that column."""
    said = tensor(given[column]).requires_grad_()
    loss = loss_of(said)
    (gradient,) = torch.autograd.grad(loss, said)
    outputs = {"loss": loss.item(), "gradient": cut(gradient.tolist(), given["mask"])}
    made.case(batch, called, name, how, **outputs)
