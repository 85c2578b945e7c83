"""What each of two tensor ranks does with the torch kernel of generate: rows, before and after new
weights, and how far they are from those of the whole Model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dataflow.batch import Batch
from dataflow.errors import KernelError
from dataflow.kernel import Layout
from operators.kernels.torch.generate import TorchGenerate
from tests.kit.generate_suite import MIXED, PREFIXED, generated, tokens_of, weights_of
from tests.kit.kernels import FakeSession, open_kernel

HOWS: dict[str, dict[str, Any]] = {
    "sampled": {"n": 4, "max_tokens": 16},
    "truncated": {"n": 2, "max_tokens": 12, "temperature": 0.7, "top_p": 0.9},
    "greedy": {"n": 1, "max_tokens": 16, "temperature": 0.0},
}
"""Parameters of a node."""
_LAYOUT = Layout(slots=7, tokens=64)
"""Fewer slots than rows, and prompts in several passes."""


def main(number: int, store: Path, bases: Sequence[str], results: Path) -> None:
    """Writes the greatest distances of log-probs to a file of this rank, in `results`; a row with
    other tokens is infinitely far. bases: two of one shape.
    """
    from tests.kit.training import gloo_world

    with gloo_world(store, number, 2):
        distances = {name: _compare(name, number, bases) for name in HOWS}
        distances["unsound"] = [_find_unsound(number, bases[0])]
    text = json.dumps(distances)
    (results / f"{number}.json").write_text(text, encoding="ascii")


def _compare(name: str, rank: int, bases: Sequence[str]) -> list[float]:
    """Of both bases, the second as weights that come; then with one rank interrupted."""
    split = _open_split(rank, bases[0], **HOWS[name])
    assert any(isinstance(weight, DTensor) for weight in split._module.parameters())
    distances: list[float] = []
    for base in bases:
        if base != bases[0]:
            split.load(weights_of(base), 1)
        whole = open_kernel(TorchGenerate(), base, layout=_LAYOUT, **HOWS[name])
        rows = generated(whole, MIXED + PREFIXED)
        distances.append(_distance(generated(split, MIXED + PREFIXED), rows))
        if rank == 0:
            split.interrupt()
        distances.append(_distance(generated(split, MIXED + PREFIXED), rows))
    return distances


def _open_split(rank: int, base: str, **how: Any) -> TorchGenerate:
    session = FakeSession(rank=rank, world=2, group=dist.group.WORLD)
    layout = replace(_LAYOUT, tensor=2)
    return open_kernel(TorchGenerate(), base, layout=layout, session=session, **how)


def _distance(one: Batch, other: Batch) -> float:
    if tokens_of(one) != tokens_of(other):
        return float("inf")
    names = [name for name in ("sampler_logprobs", "sampler_mass") if name in one.names]
    pairs = [(one.ragged(name).values, other.ragged(name).values) for name in names]
    return max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs)


def _find_unsound(rank: int, base: str) -> float:
    """0 where this rank says that the logits are no numbers."""
    split = _open_split(rank, base, **HOWS["sampled"])
    pieces = [replace(piece, data=piece.data * float("nan")) for piece in weights_of(base)]
    split.load(pieces, 1)
    try:
        generated(split, MIXED)
    except KernelError as error:
        return 0.0 if "expected finite logits" in str(error) else 1.0
    return 1.0
