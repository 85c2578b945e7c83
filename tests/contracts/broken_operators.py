"""Operators that break one promise each, and what an honest one of the same kind looks like.

Owns: the mutants of test_operators_contract.py. Each is a mistake that is easily made.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from dataflow import Advantage, Columns, Completion, Keep, Reward, Rollout, Schema, column, operator


class Hidden(Schema):
    """Numbers that stay on their device."""

    hidden = column(pa.list_(pa.float32(), 2), "T", device=True)


def _spread(rows: Columns[Completion], value: np.ndarray) -> Columns[Advantage]:
    mask = rows["completion_mask"]
    tokens = np.repeat(value, mask.lengths) * mask.values
    return Columns.make(Advantage, like=rows, advantage=mask.like(tokens.astype(np.float32)))


def _mean(score: Columns[Reward]) -> np.ndarray:
    group = score.groups
    return (np.bincount(group, score["reward"]) / np.bincount(group))[group]


@operator(scope="group")
def honest(rollout: Columns[Completion], score: Columns[Reward]) -> Columns[Advantage]:
    return _spread(rollout, score["reward"] - _mean(score))


@operator(scope="row")
def one_value_a_row(rollout: Columns[Completion], score: Columns[Reward]) -> Columns[Advantage]:
    ones = [[float(x)] for x in score["reward"]]
    return Columns.make(Advantage, like=rollout, advantage=ones)


@operator(scope="group")
def best_row_only(score: Columns[Reward]) -> Columns[Reward]:
    best = np.array([int(np.argmax(score["reward"]))])
    return Columns(score.batch.take(best), Reward)


@operator(scope="group")
def no_epsilon(score: Columns[Reward]) -> Columns[Reward]:
    reward, mean, group = score["reward"], _mean(score), score.groups
    squares = np.bincount(group, (reward - mean) ** 2)
    return score.set(reward=((reward - mean) / np.sqrt(squares)[group]).astype(np.float32))


@operator(scope="row")
def scales_in_place(score: Columns[Reward], hidden: Columns[Hidden]) -> Columns[Reward]:
    hidden["hidden"].values.mul_(0.5)
    return score


@operator(scope="row")
def jitters(score: Columns[Reward]) -> Columns[Reward]:
    noise = np.random.default_rng().random(len(score))
    return score.set(reward=(score["reward"] + noise).astype(np.float32))


_reused = np.zeros(10_000, np.float32)


@operator(scope="row")
def fills_one_buffer(score: Columns[Reward]) -> Columns[Reward]:
    np.multiply(score["reward"], 2.0, out=_reused[: len(score)])
    return score.set(reward=_reused[: len(score)])


@operator(scope="row")
def exponential(score: Columns[Reward]) -> Columns[Reward]:
    return score.set(reward=np.exp(score["reward"]))


@operator(scope="group")
def first_sample_wins(score: Columns[Reward]) -> Columns[Reward]:
    return score.set(reward=score["reward"] + (score.keys.sample == 0).astype(np.float32))


@operator(scope="group")
def alternates(score: Columns[Reward]) -> Columns[Reward]:
    return score.set(reward=score["reward"] * (score.keys.position % 2).astype(np.float32))


@operator(scope="group")
def share_of_all(score: Columns[Reward]) -> Columns[Reward]:
    return score.set(reward=score["reward"] / np.float32(len(score)))


@operator(scope="group")
def running_sums(score: Columns[Reward]) -> Columns[Reward]:
    group = score.groups
    size = np.bincount(group)
    total = np.concatenate([[0.0], np.cumsum(score["reward"].astype(np.float64))])
    ends = np.cumsum(size)
    mean = (total[ends] - total[ends - size]) / size
    return score.set(reward=(score["reward"] - mean[group]).astype(np.float32))


@operator(scope="row")
def on_every_token(rollout: Columns[Completion], score: Columns[Reward]) -> Columns[Advantage]:
    mask = rollout["completion_mask"]
    tokens = np.repeat(score["reward"], mask.lengths)
    return Columns.make(Advantage, like=rollout, advantage=mask.like(tokens))


@operator(scope="row")
def surprise(rollout: Columns[Rollout]) -> Columns[Reward]:
    mask = rollout["completion_mask"]
    tokens = rollout["sampler_logprobs"].values * mask.values
    total = np.bincount(mask.segments(), tokens, minlength=len(mask))
    return Columns.make(Reward, like=rollout, reward=np.nan_to_num(total, posinf=0, neginf=0))


@operator(scope="group", keeps="groups")
def the_better_half(score: Columns[Reward]) -> Columns[Keep]:
    return Columns.make(Keep, like=score, keep=(score["reward"] >= _mean(score)).astype(np.uint8))


BROKEN = {
    "schema": one_value_a_row,
    "keys": best_row_only,
    "finite": no_epsilon,
    "inputs": scales_in_place,
    "deterministic": jitters,
    "results": fills_one_buffer,
    "extremes": exponential,
    "row_order": first_sample_wins,
    "relabelling": alternates,
    "chunks": share_of_all,
    "isolation": running_sums,
    "holes": on_every_token,
    "masked": surprise,
    "keeps": the_better_half,
}
