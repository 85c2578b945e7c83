"""A module's numbers for given rows of tokens, for the engine's probe of a weight edge.

Owns: the numbers. Does not own: the rows and the comparison (engine/weights/probe.py). Uses no
gradient and no random draw, and changes nothing in the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dataflow.batch import Ragged
from operators.kernels.tensors import gather, to_host_array
from operators.kernels.torch.heads import predictions, values
from operators.kernels.torch.packing import pack


def vocabulary_of(module: nn.Module) -> int:
    """How many token ids the module knows."""
    config: Any = module.config
    return int(config.vocab_size)


@torch.no_grad()
def probed(module: nn.Module, ids: Ragged, *, head: str, within: Any = None) -> np.ndarray:
    """float32 [tokens - rows]: for each token but its row's first, its log-prob at temperature 1
    given those before it; for a scalar head, the value before it.

    within: calls a function with the weights gathered, if they are split (parallel.Sharded); then
    every rank must call.
    """
    device = next(module.parameters()).device
    starts = ids.offsets[:-1]
    first = Ragged(ids.values[starts], np.arange(len(ids) + 1))
    others = np.ones(len(ids.values), dtype=bool)
    others[starts] = False
    rest = Ragged(ids.values[others], ids.offsets - np.arange(len(ids) + 1))
    packed = pack(first, rest, np.arange(len(ids)))

    def say() -> Tensor:
        if head == "scalar":
            return values(module, packed, device)
        return predictions(
            module, packed, gather(rest.values, packed.tokens, device, torch.int64)
        ).logprobs

    call: Callable[[Callable[[], Tensor]], Tensor] = within or (lambda do: do())
    said = np.empty(len(rest.values), dtype=np.float32)
    said[packed.tokens] = to_host_array(call(say))
    return said
