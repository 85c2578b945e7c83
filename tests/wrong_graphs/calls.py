"""Calls that cannot mean anything: refused where they are written, with the nearest that can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from dataflow.graph import Graph
from dataflow.loss import Now, Tensors, Terms, loss
from dataflow.model import Buffer, Model, Table, cosine, linear, warmup
from dataflow.schema import Advantage, Returns, Reward, Rollout, Schema, column
from dataflow.user import Columns, operator
from operators.advantage import add, group_advantage
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.optimizers import AdamW
from operators.reward import reward
from operators.rewards import verl_reward
from operators.select import best_of, select
from operators.train import train
from tests.wrong_graphs.parts import (
    BASE,
    DATA,
    compared,
    compared_with,
    exact,
    graph,
    policy,
    sampled,
    scored,
    trained,
    updated,
)

if TYPE_CHECKING:
    from torch import Tensor


def brief(
    rollout: Columns[Rollout], score: Columns[Reward], *, weight: float = 0.1
) -> Columns[Reward]:
    """Shorter answers are better."""
    return score.set(reward=score["reward"] - weight * rollout["completion_ids"].lengths)


def careful(now: Now, advantage: Tensors[Advantage]) -> Terms:
    """A policy gradient."""
    assert now.logprobs is not None
    return Terms(-advantage["advantage"] * now.logprobs)


def averaged(now: Now, advantage: Tensors[Advantage]) -> Tensor:
    """What train does itself."""
    return (advantage["advantage"] * now.mask).mean()


def misspelt_keyword_of_a_model() -> Graph:
    model = Model("policy", BASE, trainabel=True)  # type: ignore
    rollout = generate(model, prompts(DATA, batch=64), n=8, max_tokens=64)
    return graph(train(model, rollout, loss=clipped_policy_loss(compared(rollout)), lr=1e-6))


def model_without_a_base() -> Graph:
    return graph(updated(sampled(), clipped_policy_loss(logprobs(Model("reference"), sampled()))))  # type: ignore


def dtype_that_is_none() -> Graph:
    dtype: Any = "float16"
    return compared_with(Model("reference", BASE, dtype=dtype))


def follower_of_a_name() -> Graph:
    leader: Any = "policy"
    return compared_with(Model("reference", BASE, follows=leader))


def rate_above_one() -> Graph:
    return compared_with(Model("reference", BASE, follows=policy, rate=1.5))


def trainable_follower() -> Graph:
    return trained(
        generate(Model("slow", BASE, trainable=True, follows=policy), prompts(DATA), max_tokens=8)
    )


def misspelt_scope_of_an_operator() -> Graph:
    scope: Any = "groups"
    rollout = sampled()
    score = operator(scope=scope)(brief)(rollout, scored(rollout))
    return trained(rollout, clipped_policy_loss(group_advantage(rollout, score)))


def misspelt_keyword_of_a_decorator() -> Graph:
    rollout = sampled()
    score = operator(scop="group")(brief)(rollout, scored(rollout))  # type: ignore
    return trained(rollout, clipped_policy_loss(group_advantage(rollout, score)))


def reads_of_no_port() -> Graph:
    rollout = sampled()
    score = operator(reads={"rolout": ["answer"]})(brief)(rollout, scored(rollout))
    return trained(rollout, clipped_policy_loss(group_advantage(rollout, score)))


def reads_of_one_name() -> Graph:
    rollout = sampled()
    score = operator(reads={"rollout": "answer"})(brief)(rollout, scored(rollout))
    return trained(rollout, clipped_policy_loss(group_advantage(rollout, score)))


def operator_without_annotations() -> Graph:
    plain: Any = lambda rollout: rollout
    return trained(operator()(plain)(sampled()))


def operator_of_no_function() -> Graph:
    nothing: Any = 8
    return trained(operator()(nothing)(sampled()))


def operator_of_any_number_of_ports() -> Graph:
    def total(*scores: Columns[Reward]) -> Columns[Reward]:
        return scores[0]

    rollout = sampled()
    score: Any = operator()(cast(Any, total))(scored(rollout))
    return trained(rollout, clipped_policy_loss(group_advantage(rollout, score)))


def misspelt_scope_of_a_loss() -> Graph:
    scope: Any = "row"
    rollout = sampled()
    return trained(rollout, loss(scope=scope)(careful)(compared(rollout)))


def loss_that_returns_a_tensor() -> Graph:
    mean: Any = averaged
    mean.__annotations__ = {"now": Now, "advantage": Tensors[Advantage], "return": float}
    rollout = sampled()
    return trained(rollout, loss()(mean)(compared(rollout)))


def loss_without_now() -> Graph:
    def gain(advantage: Tensors[Advantage]) -> Terms:
        return Terms(advantage["advantage"])

    rollout = sampled()
    return trained(rollout, loss()(cast(Any, gain))(compared(rollout)))


def number_added_to_a_loss() -> Graph:
    rollout = sampled()
    one: Any = 1.0
    return trained(rollout, clipped_policy_loss(compared(rollout)) + one)


def text_times_a_loss() -> Graph:
    rollout = sampled()
    half: Any = "0.5"
    return trained(rollout, half * clipped_policy_loss(compared(rollout)))


def misspelt_scope_of_a_reward() -> Graph:
    scope: Any = "grup"
    rollout = sampled()
    score = reward(exact, rollout, scope=scope)
    return trained(rollout, clipped_policy_loss(group_advantage(rollout, score)))


def name_of_a_reward() -> Graph:
    name: Any = "digits"
    rollout = sampled()
    return trained(rollout, clipped_policy_loss(group_advantage(rollout, reward(name, rollout))))


def number_for_weights() -> Graph:
    weights: Any = 0.5
    rollout = sampled()
    return trained(
        rollout,
        clipped_policy_loss(group_advantage(rollout, reward(exact, rollout, weights=weights))),
    )


def three_weights_for_two_scores() -> Graph:
    rollout = sampled()
    score = add(scored(rollout), reward(exact, rollout, name="more"), weights=[1.0, 0.5, 0.1])
    return trained(rollout, clipped_policy_loss(group_advantage(rollout, score)))


def name_of_a_score_of_verl() -> Graph:
    name: Any = "compute_score"
    rollout = sampled()
    score = reward(verl_reward(name), rollout)
    return trained(rollout, clipped_policy_loss(group_advantage(rollout, score)))


def number_for_a_stop() -> Graph:
    stop: Any = 2
    return trained(generate(policy, prompts(DATA, batch=64), n=8, max_tokens=64, stop=stop))


def number_for_a_name() -> Graph:
    name: Any = 7
    return trained(generate(policy, prompts(DATA, batch=64), n=8, max_tokens=64, name=name))


def number_for_the_name_of_a_graph() -> Graph:
    name: Any = 7
    return Graph(name, updated(sampled()))


def selection_of_nothing() -> Graph:
    rollout = sampled()
    nothing: Any = ()
    return trained(select(*nothing, where=best_of(scored(rollout))))


def text_for_the_steps_of_a_schedule() -> Graph:
    steps: Any = "1000"
    loss = clipped_policy_loss(compared(sampled()))
    return graph(train(policy, sampled(), loss=loss, lr=linear(1e-6, 0.0, steps)))


def misspelt_keyword_of_a_schedule() -> Graph:
    lr = cosine(start=1e-6, end=0.0, steps=100)  # type: ignore
    return graph(train(policy, sampled(), loss=clipped_policy_loss(compared(sampled())), lr=lr))


def warmup_to_nothing() -> Graph:
    nothing: Any = None
    loss = clipped_policy_loss(compared(sampled()))
    return graph(train(policy, sampled(), loss=loss, lr=warmup(10, nothing)))


def misspelt_keyword_of_an_optimizer() -> Graph:
    optimizer = AdamW(weight_deacy=0.1)  # type: ignore
    rollout = sampled()
    loss = clipped_policy_loss(compared(rollout))
    return graph(train(policy, rollout, loss=loss, lr=1e-6, optimizer=optimizer))


def betas_of_three() -> Graph:
    betas: Any = (0.9, 0.99, 0.999)
    rollout = sampled()
    loss = clipped_policy_loss(compared(rollout))
    return graph(train(policy, rollout, loss=loss, lr=1e-6, optimizer=AdamW(betas=betas)))


def text_for_the_type_of_a_column() -> Graph:
    kind: Any = "float32"

    class OfNoType(Schema):
        scale = column(kind)

    return trained(cast(Any, OfNoType))


def misspelt_axis_of_a_column() -> Graph:
    axis: Any = "t"

    class OfNoAxis(Returns):
        scale = column(Returns.columns["returns"].type, axis)

    return trained(cast(Any, OfNoAxis))


def buffer_without_a_writer() -> Graph:
    return graph(updated(cast(Any, Buffer("old"))))  # type: ignore


def misspelt_keyword_of_a_table() -> Graph:
    return graph(updated(cast(Any, Table("success", keys="prompt"))))  # type: ignore


def type_for_a_column() -> Graph:
    class Scaled(Schema):
        scale = pa.float64()

    return trained(cast(Any, Scaled))
