"""What a selection keeps of a group: declarations that cannot be held."""

from __future__ import annotations

from typing import Any

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.schema import Keep, Preference, Reward
from dataflow.user import Columns, operator
from operators.advantage import group_advantage
from operators.data import preferences
from operators.forward import logprobs
from operators.losses import clipped_policy_loss, dpo_loss
from operators.reward import reward
from operators.select import best_of, pair, select
from tests.wrong_graphs.parts import exact, sampled, scored, trained

reference = Model("reference", "models/tiny")


def _longest(score: Columns[Reward]) -> Columns[Keep]:
    return Columns.make(Keep, like=score, keep=[1] * len(score))


def _pairs(score: Columns[Reward]) -> Columns[Preference]:
    return Columns.make(Preference, like=score, keep=[1] * len(score), sign=[1] * len(score))


def _halved(score: Columns[Reward]) -> Columns[Reward]:
    return score


def kept_groups_of_single_rows() -> Graph:
    longest = operator(keeps="groups")(_longest)
    rollout = sampled()
    return trained(select(rollout, where=longest(scored(rollout))))


def preference_of_single_rows() -> Graph:
    pairs = operator()(_pairs)
    rollout = sampled()
    return trained(select(rollout, where=pairs(scored(rollout))))


def keeps_of_what_keeps_nothing() -> Graph:
    halved = operator(scope="group", keeps="groups")(_halved)
    rollout = sampled()
    halved(scored(rollout))
    return trained(rollout)


def misspelt_keeps() -> Graph:
    word: Any = "group"
    longest = operator(scope="group", keeps=word)(_longest)
    rollout = sampled()
    return trained(select(rollout, where=longest(scored(rollout))))


def kept_rows_before_a_baseline() -> Graph:
    longest = operator(scope="group")(_longest)
    rollout = sampled()
    kept = select(rollout, where=longest(scored(rollout)))
    return trained(kept, clipped_policy_loss(group_advantage(kept, reward(exact, kept))))


def pairs_that_nobody_selected() -> Graph:
    rollout = sampled()
    pairs = pair(scored(rollout))
    return trained(rollout, dpo_loss(pairs, reference=logprobs(reference, rollout)))


def pairs_with_single_rows_taken_away() -> Graph:
    rows, pairs = preferences("data/pairs.parquet", batch=64)
    rows, pairs = select(rows, pairs, where=best_of(reward(exact, rows)))
    return trained(rows, dpo_loss(pairs, reference=logprobs(reference, rows)))
