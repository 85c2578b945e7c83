"""GRPO with a ranker as a textbook loop over Hugging Face models, without any part of ours.

Owns: the shipped algorithms of which a Model ranks prompts. Does not own: the others, and the parts
of a loop that all share (plain_formulas.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dataflow.batch import Batch
from tests.kit import plain_algorithms
from tests.kit.plain_formulas import PlainRun, UpdateLoss
from tests.kit.plain_loop import TrainedStep, groups


def list_mle(scores: Tensor, targets: Sequence[float]) -> Tensor:
    """The sum over rows of Xia's terms, the greatest target first; rows of one target are each in
    the list of all others of that target.
    """
    terms: list[Tensor] = []
    for score, target in zip(scores, targets, strict=True):
        rest = torch.tensor([other <= target for other in targets])
        terms.append(scores[rest].logsumexp(0) - score)
    return torch.stack(terms).sum()


def mean_log_lengths(rollout: Batch) -> list[float]:
    """Of each prompt, in the order of the rows."""
    logs = np.log1p(rollout.ragged("completion_ids").lengths).astype(np.float32)
    return [float(np.float32(logs[group].astype(np.float64).mean())) for group in groups(rollout)]


def last_scores(module: nn.Module, rows: Batch) -> Tensor:
    """The head at each row's last token, one row after another."""
    prompts, answers = rows.ragged("prompt_ids"), rows.ragged("completion_ids")
    scores: list[Tensor] = []
    for row in range(len(rows)):
        ids = np.concatenate([prompts[row], answers[row]]).astype(np.int64)
        scores.append(module(input_ids=torch.from_numpy(ids)[None]).logits[0, -1, 0])
    return torch.stack(scores)


def grpo_ranked(world: PlainRun, step: TrainedStep) -> UpdateLoss:
    if step.node == "train_policy":
        world.notes["targets"] = mean_log_lengths(step.rows)
        return plain_algorithms.grpo(world, step)
    targets = world.notes.pop("targets")
    ranker = world.learners["ranker"].module

    def loss(chosen: Sequence[int]) -> Tensor:
        assert list(chosen) == list(range(len(targets)))
        return list_mle(last_scores(ranker, step.rows), targets) / len(targets)

    return loss
