"""Calls that cannot mean anything: refused where they are written, with the nearest that can."""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa

from dataflow.graph import Graph
from dataflow.loss import Now, Tensors, Terms, loss
from dataflow.model import Buffer, Model, Table, cosine, linear, warmup
from dataflow.schedule import Number
from dataflow.schema import Advantage, Returns, Reward, Rollout, Schema, column
from dataflow.user import Columns, operator
from operators.advantage import add
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.optimizers import AdamW
from operators.reward import reward
from operators.rewards import verl_reward
from operators.select import best_of, select
from operators.train import train
from tests.wrong_graphs.parts import (
    BASE,
    compared,
    compared_with,
    exact,
    graph,
    judged,
    policy,
    sampled,
    scored,
    source,
    trained,
    updated,
)


def brief(
    rollout: Columns[Rollout], score: Columns[Reward], *, weight: float = 0.1
) -> Columns[Reward]:
    """Shorter answers are better."""
    return score.set(reward=score["reward"] - weight * rollout["completion_ids"].lengths)


def careful(now: Now, advantage: Tensors[Advantage]) -> Terms:
    """A policy gradient."""
    assert now.logprobs is not None
    return Terms(-advantage["advantage"] * now.logprobs)


def averaged(now: Now, advantage: Tensors[Advantage]) -> float:
    """What train does itself."""
    return float((advantage["advantage"] * now.mask).mean())


def misspelt_keyword_of_a_model() -> Graph:
    return compared_with(Model("reference", BASE, trainabel=True))  # type: ignore


def model_without_a_base() -> Graph:
    return compared_with(Model("reference"))  # type: ignore


def dtype_that_is_none() -> Graph:
    return compared_with(Model("reference", BASE, dtype="float16"))  # type: ignore


def follower_of_a_name() -> Graph:
    return compared_with(Model("reference", BASE, follows="policy"))  # type: ignore


def rate_above_one() -> Graph:
    return compared_with(Model("reference", BASE, follows=policy, rate=1.5))


def trainable_follower() -> Graph:
    return compared_with(Model("slow", BASE, trainable=True, follows=policy))


def misspelt_scope_of_an_operator() -> Graph:
    rollout = sampled()
    score = operator(scope="groups")(brief)(rollout, scored(rollout))  # type: ignore
    return judged(rollout, score)


def misspelt_keyword_of_a_decorator() -> Graph:
    rollout = sampled()
    score = operator(scop="group")(brief)(rollout, scored(rollout))  # type: ignore
    return judged(rollout, score)


def reads_of_no_port() -> Graph:
    rollout = sampled()
    score = operator(reads={"rolout": ["answer"]})(brief)(rollout, scored(rollout))
    return judged(rollout, score)


def reads_of_one_name() -> Graph:
    rollout = sampled()
    score = operator(reads={"rollout": "answer"})(brief)(rollout, scored(rollout))
    return judged(rollout, score)


def operator_without_annotations() -> Graph:
    return trained(operator()(lambda rollout: rollout)(sampled()))  # type: ignore


def operator_of_no_function() -> Graph:
    return trained(operator()(8)(sampled()))  # type: ignore


def operator_of_any_number_of_ports() -> Graph:
    def total(*scores: Columns[Reward]) -> Columns[Reward]:
        return scores[0]

    rollout = sampled()
    return judged(rollout, operator()(cast(Any, total))(scored(rollout)))


def misspelt_scope_of_a_loss() -> Graph:
    rollout = sampled()
    return trained(rollout, loss(scope="row")(careful)(compared(rollout)))  # type: ignore


def loss_that_returns_a_tensor() -> Graph:
    rollout = sampled()
    return trained(rollout, loss()(averaged)(compared(rollout)))  # type: ignore


def loss_without_now() -> Graph:
    def gain(advantage: Tensors[Advantage]) -> Terms:
        return Terms(advantage["advantage"])

    rollout = sampled()
    return trained(rollout, loss()(cast(Any, gain))(compared(rollout)))


def number_added_to_a_loss() -> Graph:
    rollout = sampled()
    return trained(rollout, clipped_policy_loss(compared(rollout)) + 1.0)  # type: ignore


def text_times_a_loss() -> Graph:
    rollout = sampled()
    return trained(rollout, "0.5" * clipped_policy_loss(compared(rollout)))  # type: ignore


def misspelt_scope_of_a_reward() -> Graph:
    rollout = sampled()
    score = reward(exact, rollout, scope="grup")  # type: ignore
    return judged(rollout, score)


def name_of_a_reward() -> Graph:
    rollout = sampled()
    return judged(rollout, reward("digits", rollout))  # type: ignore


def number_for_weights() -> Graph:
    rollout = sampled()
    return judged(rollout, reward(exact, rollout, weights=0.5))  # type: ignore


def three_weights_for_two_scores() -> Graph:
    rollout = sampled()
    score = add(scored(rollout), reward(exact, rollout, name="more"), weights=[1.0, 0.5, 0.1])
    return judged(rollout, score)


def name_of_a_score_of_verl() -> Graph:
    rollout = sampled()
    return judged(rollout, reward(verl_reward("compute_score"), rollout))  # type: ignore


def number_for_a_stop() -> Graph:
    return trained(generate(policy, source(), n=8, max_tokens=64, stop=2))  # type: ignore


def number_for_a_name() -> Graph:
    return trained(generate(policy, source(), n=8, max_tokens=64, name=7))  # type: ignore


def number_for_the_name_of_a_graph() -> Graph:
    return Graph(7, updated(sampled()))  # type: ignore


def selection_of_nothing() -> Graph:
    return trained(select(where=best_of(scored(sampled()))))  # type: ignore


def schedules(lr: Number) -> Graph:
    """Training with this rate."""
    rollout = sampled()
    return graph(train(policy, rollout, loss=clipped_policy_loss(compared(rollout)), lr=lr))


def text_for_the_steps_of_a_schedule() -> Graph:
    return schedules(linear(1e-6, 0.0, "1000"))  # type: ignore


def misspelt_keyword_of_a_schedule() -> Graph:
    return schedules(cosine(start=1e-6, end=0.0, steps=100))  # type: ignore


def warmup_to_nothing() -> Graph:
    return schedules(warmup(10, None))  # type: ignore


def misspelt_keyword_of_an_optimizer() -> Graph:
    return trained(sampled(), optimizer=AdamW(weight_deacy=0.1))  # type: ignore


def betas_of_three() -> Graph:
    return trained(sampled(), optimizer=AdamW(betas=(0.9, 0.99, 0.999)))  # type: ignore


def text_for_the_type_of_a_column() -> Graph:
    class OfNoType(Schema):
        scale = column("float32")  # type: ignore

    return trained(cast(Any, OfNoType))


def misspelt_axis_of_a_column() -> Graph:
    class OfNoAxis(Returns):
        scale = column(pa.float32(), "t")  # type: ignore

    return trained(cast(Any, OfNoAxis))


def buffer_without_a_writer() -> Graph:
    return graph(updated(cast(Any, Buffer("old"))))  # type: ignore


def misspelt_keyword_of_a_table() -> Graph:
    return graph(updated(cast(Any, Table("success", keys="prompt"))))  # type: ignore


def type_for_a_column() -> Graph:
    class Scaled(Schema):
        scale = pa.float64()

    return trained(cast(Any, Scaled))
