"""Heads: a model's numbers at the packed tokens of some rows.

Owns: log-probs, entropy, values and scores from one forward over a prefix tree, computed only
where something is predicted. Does not own: the tree (packing.py), what is read of logits
(logit_reading.py), the losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from operators.kernels.tensors import to_index_tensor, widen
from operators.kernels.torch.attention import AttentionPass, compute_hidden, forward
from operators.kernels.torch.logit_reading import LogitReading, Predictions, read_logits
from operators.kernels.torch.packed_pass import PackedPass
from operators.kernels.torch.packing import Packed
from operators.kernels.torch.scalar import scalar_head
from operators.kernels.torch.temperatures import Temperature
from operators.kernels.torch.vocabulary_part import find_vocabulary_part

CHUNK = 1 << 26
"""The most logits held at once, with or without gradient: 256 MB in float32."""

_SHAPERS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings that change logits after the head; such logits come from the module's own forward."""


def predictions(
    module: nn.Module,
    packed: Packed,
    written: Tensor,
    *,
    temperature: Temperature = 1.0,
    entropy: bool = False,
    ids: Tensor | None = None,
    top_k: int = 0,
    attention_pass: AttentionPass | None = None,
) -> Predictions:
    """Predict the completion tokens; `written` int64 [tokens] are their ids. ids int64 [tokens,
    any]: further tokens in their places. top_k: how many of the most likely. attention_pass: of
    this layout; None: by the path that the rule chooses (dataflow/attention_paths.py).

    Logits are computed once for each distinct prefix and temperature; if they exceed CHUNK, in
    chunks that the backward pass computes again. Of tensor ranks each has some columns of them, if
    the head is split (vocabulary_part.py).
    """
    keep, which, scale = _find_distinct(packed.source, temperature)
    config: Any = module.config
    device = written.device
    if not isinstance(scale, float):
        scale = torch.from_numpy(scale).to(device)
    part = find_vocabulary_part(module)
    columns = config.vocab_size if part is None else part.size
    reading = LogitReading(temperature=scale, entropy=entropy, top_k=top_k, part=part)
    shapes_logits = any(getattr(config, name, None) for name in _SHAPERS)
    inputs = _make_inputs(packed, device, attention_pass)
    if shapes_logits or len(keep) * columns <= CHUNK:
        logits = forward(module, *inputs, to_index_tensor(keep, device))
        return read_logits(logits, to_index_tensor(which, device), written, ids, reading)
    rows = max(1, CHUNK // columns)
    return _read_in_chunks(module, inputs, keep, which, written, ids, reading, rows)


ModuleInputs = tuple[Tensor, Tensor, AttentionPass]
"""What a module is fed: ids, positions, and who attends to whom."""


def _make_inputs(
    packed: Packed, device: torch.device, attention_pass: AttentionPass | None = None
) -> ModuleInputs:
    if attention_pass is None:
        attention_pass = PackedPass(packed, device)
    return (
        to_index_tensor(packed.ids, device),
        to_index_tensor(packed.positions, device),
        attention_pass,
    )


def _find_distinct(
    source: np.ndarray, temperature: Temperature
) -> tuple[np.ndarray, np.ndarray, Temperature]:
    """Find the fed tokens whose logits are read, once for each temperature at which they are; for
    each predicted token the index of its own; and the temperature of each that is read, or of all.
    """
    if isinstance(temperature, float):
        keep, which = np.unique(source, return_inverse=True)
        return keep, which, temperature
    scales, scale = np.unique(temperature, return_inverse=True)
    pairs, which = np.unique(source * len(scales) + scale, return_inverse=True)
    return pairs // len(scales), which, scales[pairs % len(scales)]


def _read_in_chunks(
    module: nn.Module,
    inputs: ModuleInputs,
    keep: np.ndarray,
    which: np.ndarray,
    written: Tensor,
    ids: Tensor | None,
    reading: LogitReading,
    rows: int,
) -> Predictions:
    """Like `read_logits`, with `rows` rows of logits at a time."""
    device = written.device
    all_states = compute_hidden(module, *inputs)
    states = all_states.index_select(0, to_index_tensor(keep, device))
    head: Any = module.get_output_embeddings()  # type: ignore[operator]
    # Tokens in the order of the logits they read: those of a chunk lie together.
    order = np.argsort(which, kind="stable")
    sorted_which = which[order]
    chunk_starts = np.arange(0, len(keep) + rows, rows)
    cuts = np.searchsorted(sorted_which, chunk_starts)
    parts = []
    for begin, (low, high) in zip(chunk_starts[:-1].tolist(), pairwise(cuts), strict=True):
        tokens = to_index_tensor(order[low:high], device)
        chunk_rows = slice(begin, begin + rows)
        read = checkpoint(
            _read_chunk,
            head,
            states[chunk_rows],
            to_index_tensor(sorted_which[low:high] - begin, device),
            written[tokens],
            None if ids is None else ids[tokens],
            reading.of_rows(chunk_rows),
            use_reentrant=False,
        )
        parts.append(read)
    back = to_index_tensor(np.argsort(order), device)
    logprobs, spread, at_ids, top_ids, top_logprobs = (
        _join(chunks, back) for chunks in zip(*parts, strict=True)
    )
    assert logprobs is not None
    return Predictions(
        logprobs=logprobs,
        entropy=spread,
        at_ids=at_ids,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _read_chunk(
    head: Any,
    states: Tensor,
    which: Tensor,
    written: Tensor,
    ids: Tensor | None,
    reading: LogitReading,
) -> list[Tensor | None]:
    """`read_logits` of some states, as checkpoint calls it: a list of tensors."""
    read = read_logits(head(states), which, written, ids, reading)
    return [read.logprobs, read.entropy, read.at_ids, read.top_ids, read.top_logprobs]


def _join(chunks: Sequence[Tensor | None], back: Tensor) -> Tensor | None:
    """Join what was read in chunks, in the order of the tokens; None if it was not read."""
    tensors = [chunk for chunk in chunks if chunk is not None]
    return torch.cat(tensors)[back] if tensors else None


def predict_values(
    module: nn.Module,
    packed: Packed,
    device: torch.device,
    attention_pass: AttentionPass | None = None,
) -> Tensor:
    """float32 [tokens]: the scalar head before each completion token is written. attention_pass: as
    in `predictions`.
    """
    return _read_scalar_head(module, packed, packed.source, device, attention_pass)


def predict_scores(
    module: nn.Module,
    packed: Packed,
    device: torch.device,
    attention_pass: AttentionPass | None = None,
) -> Tensor:
    """float32 [rows]: the scalar head at the last fed token of each row."""
    return _read_scalar_head(module, packed, packed.last, device, attention_pass)


def predict_values_and_scores(
    module: nn.Module,
    packed: Packed,
    device: torch.device,
    attention_pass: AttentionPass | None = None,
) -> tuple[Tensor, Tensor]:
    """Both, of one forward."""
    fed_tokens = np.concatenate([packed.source, packed.last])
    both = _read_scalar_head(module, packed, fed_tokens, device, attention_pass)
    tokens = len(packed.source)
    return both[:tokens], both[tokens:]


def _read_scalar_head(
    module: nn.Module,
    packed: Packed,
    fed_tokens: np.ndarray,
    device: torch.device,
    attention_pass: AttentionPass | None,
) -> Tensor:
    all_states = compute_hidden(module, *_make_inputs(packed, device, attention_pass))
    states = all_states.index_select(0, to_index_tensor(fed_tokens, device))
    head = scalar_head(module)
    return widen(head(states)).squeeze(-1)
