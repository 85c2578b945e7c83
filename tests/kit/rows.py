"""Random rows for train and forward kernels, and transformers' numbers from padded forwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dataflow.batch import Batch, Keys
from dataflow.schema import Advantage, Logprobs, Rollout
from tests.kit.ragged_lists import ragged


def random_rows(
    groups: int = 3, n: int = 3, *, seed: int = 0, longest: int = 6, vocabulary: int = 98
) -> Batch:
    """A Rollout: prompts that begin alike, 1..longest answer tokens, some equal, some masked."""
    draw = np.random.default_rng(seed)
    beginning = draw.integers(0, vocabulary, 5).tolist()
    prompts, answers = [], []
    for _ in range(groups):
        prompt = beginning + draw.integers(0, vocabulary, draw.integers(1, 4)).tolist()
        base = draw.integers(0, vocabulary, longest).tolist()
        for _ in range(n):
            changed = [t if draw.random() < 0.8 else int(draw.integers(vocabulary)) for t in base]
            prompts.append(prompt)
            answers.append(changed[: draw.integers(1, longest + 1)])
    return rollout(np.repeat(np.arange(groups) + 10, n), prompts, answers, seed=seed)


def rollout(
    position: Any,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    seed: int = 0,
) -> Batch:
    """These rows, with random sampler log-probs and about one token in eight masked."""
    draw = np.random.default_rng(seed + 1)
    position = np.asarray(position)
    sample = np.array(
        [int((position[:i] == p).sum()) for i, p in enumerate(position)], dtype=np.int32
    )
    ids = ragged(answers)
    columns = {
        "prompt_ids": ragged(prompts),
        "completion_ids": ids,
        "completion_mask": ids.like((draw.random(len(ids.values)) < 0.875).astype(np.uint8)),
        "sampler_logprobs": ids.like((-4.0 - draw.random(len(ids.values))).astype(np.float32)),
        "version": ids.like(np.zeros(len(ids.values), dtype=np.int32)),
    }
    return Batch.make(Keys.of(position, sample), columns, Rollout)


def token_column(
    rows: Batch,
    name: str,
    *,
    seed: int = 7,
    schema: Any = None,
    low: float = -1.0,
    high: float = 1.0,
) -> Batch:
    """A batch on the same rows with one random number per completion token."""
    ids = rows.ragged("completion_ids")
    values = np.random.default_rng(seed).uniform(low, high, len(ids.values)).astype(np.float32)
    kinds: Mapping[str, Any] = {"advantage": Advantage, "logprobs": Logprobs}
    return Batch.make(rows.keys, {name: ids.like(values)}, schema or kinds[name])


def with_tokens(rows: Batch, **columns: np.ndarray) -> Batch:
    """The rows with other values in these token columns."""
    ids = rows.ragged("completion_ids")
    other = Batch.make(rows.keys, {n: ids.like(v) for n, v in columns.items()}, Rollout)
    return rows.with_columns({name: other.array(name) for name in columns})


def plain(base: str) -> nn.Module:
    """The base as transformers runs it: eager attention, padded rows."""
    return AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()


def padded_logits(module: nn.Module, rows: Batch) -> list[Tensor]:
    """Logits that predict completion tokens, [tokens, vocabulary] per row; padded, not shared."""
    prompts, answers = rows.ragged("prompt_ids"), rows.ragged("completion_ids")
    whole = [np.concatenate([prompts[i], answers[i]]) for i in range(len(rows))]
    longest = max(len(row) for row in whole)
    ids, mask = (torch.zeros(len(rows), longest, dtype=torch.int64) for _ in range(2))
    for i, row in enumerate(whole):
        ids[i, : len(row)] = torch.from_numpy(row.astype(np.int64))
        mask[i, : len(row)] = 1
    logits = module(input_ids=ids, attention_mask=mask).logits
    return [logits[i, len(prompts[i]) - 1 : len(row) - 1] for i, row in enumerate(whole)]


def padded_logprobs(module: nn.Module, rows: Batch, temperature: float = 1.0) -> list[Tensor]:
    """For each row the log-probs of its completion tokens, with gradient."""
    answers = rows.ragged("completion_ids")
    return [
        (logits / temperature)
        .log_softmax(-1)
        .gather(-1, torch.from_numpy(answers[i].astype(np.int64))[:, None])[:, 0]
        for i, logits in enumerate(padded_logits(module, rows))
    ]
