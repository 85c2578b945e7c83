"""A module's numbers for given rows of tokens, for the engine's probe of a weight edge.

Owns: the numbers. Does not own: the rows and the comparison (engine/weights/probe.py). Uses no
gradient and no random draw, and changes nothing in the module.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dataflow.batch import Ragged
from operators.kernels.tensors import gather, to_host_array
from operators.kernels.torch.heads import predict_values, predictions
from operators.kernels.torch.packing import pack


def vocabulary_of(module: nn.Module) -> int:
    """How many token ids the module knows."""
    config: Any = module.config
    return int(config.vocab_size)


@torch.no_grad()
def compute_probe(module: nn.Module, ids: Ragged, *, head: str, within: Any = None) -> np.ndarray:
    """Compute float32 [tokens - rows]: for each token but its row's first, its log-prob at
    temperature 1 given those before it; for a scalar head, the value before it.

    within: calls a function with the weights gathered, if they are split (parallel.Sharded); then
    every rank must call.
    """
    device = next(module.parameters()).device
    # Each row's first token is its prompt: nothing before it predicts it.
    starts = ids.offsets[:-1]
    row_ends = np.arange(len(ids) + 1)
    first = Ragged(ids.values[starts], row_ends)
    is_later = np.ones(len(ids.values), dtype=bool)
    is_later[starts] = False
    rest = Ragged(ids.values[is_later], ids.offsets - row_ends)
    packed = pack(first, rest, np.arange(len(ids)))

    def predict() -> Tensor:
        if head == "scalar":
            return predict_values(module, packed, device)
        written = gather(rest.values, packed.tokens, device, torch.int64)
        return predictions(module, packed, written).logprobs

    predicted = within(predict) if within else predict()
    by_token = np.empty(len(rest.values), dtype=np.float32)
    by_token[packed.tokens] = to_host_array(predicted)
    return by_token
