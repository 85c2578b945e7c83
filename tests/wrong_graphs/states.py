"""Models, versions, loops, clocks and held-out data that do not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dataflow.graph import Graph
from dataflow.model import Model, Table
from dataflow.node import Node, Port
from dataflow.schema import Logprobs
from operators.advantage import gae, whiten
from operators.data import prompts
from operators.forward import LOGPROBS, logprobs, scores, values
from operators.generate import generate
from operators.losses import clipped_policy_loss, decoupled_policy_loss, value_loss
from operators.reward import reward
from operators.train import evaluate, train
from tests.wrong_graphs.parts import (
    BASE,
    compared,
    compared_with,
    critic,
    evaluated,
    exact,
    graph,
    judged,
    policy,
    sampled,
    scored,
    source,
    trained,
)

TOKENIZERS = Path(__file__).parent / "tokenizers"


def message_4_two_writers() -> Graph:
    rollout = sampled()
    loss = clipped_policy_loss(compared(rollout))
    first = train(policy, rollout, loss=loss, lr=1e-6)
    second = train(policy, rollout, loss=loss, lr=1e-5, name="train_policy_2")
    return graph(first, second)


def message_5_trainable_without_a_writer() -> Graph:
    rollout = sampled(n=1)
    value = values(critic, rollout)
    loss = clipped_policy_loss(whiten(gae(rollout, scored(rollout), value), rollout))
    return trained(rollout, loss)


def writer_of_a_model_that_is_not_trainable() -> Graph:
    frozen = Model("frozen", BASE)
    rollout = generate(frozen, source(), n=8, max_tokens=64)
    return graph(train(frozen, rollout, loss=clipped_policy_loss(compared(rollout)), lr=1e-6))


def follower_of_an_untrained_leader() -> Graph:
    return compared_with(Model("reference", BASE, follows=Model("leader", BASE)))


def follower_of_another_base() -> Graph:
    return compared_with(Model("reference", "models/large", follows=policy, every=50))


def followers_in_a_circle() -> Graph:
    b = Model("b", BASE, follows=Model("a", BASE, follows=policy))
    return compared_with(Model("a", BASE, follows=b))


def values_of_a_language_head() -> Graph:
    rollout = sampled(n=1)
    value = values(policy, rollout)
    return trained(rollout, clipped_policy_loss(gae(rollout, scored(rollout), value)))


def value_loss_of_a_language_head() -> Graph:
    rollout = sampled(n=1)
    score = scores(Model("rm", BASE, head="scalar"), rollout)
    value = values(Model("judge", BASE, head="scalar"), rollout)
    return trained(rollout, value_loss(gae(rollout, score, value)))


def generation_by_a_scalar_head() -> Graph:
    rollout = generate(critic, source(), n=8, max_tokens=64)
    return graph(train(critic, rollout, loss=clipped_policy_loss(compared(rollout)), lr=1e-6))


def text_for_a_model() -> Graph:
    return trained(generate(BASE, source(), n=8, max_tokens=64))  # type: ignore


def proximal_of_another_model() -> Graph:
    rollout = sampled(max_lag=4)
    proximal = logprobs(Model("reference", BASE), rollout)
    return trained(rollout, decoupled_policy_loss(compared(rollout), proximal=proximal))


def proximal_that_lags() -> Graph:
    rollout = sampled(max_lag=4)
    proximal = logprobs(policy, rollout, max_lag=4, name="proximal")
    return trained(rollout, decoupled_policy_loss(compared(rollout), proximal=proximal))


def intakes_that_differ() -> Graph:
    rollout = sampled(n=1, max_lag=2)
    value = values(critic, rollout)
    advantage = gae(rollout, scored(rollout), value)
    return graph(
        train(policy, rollout, loss=clipped_policy_loss(advantage), lr=1e-6, intake="drop"),
        train(critic, rollout, loss=value_loss(advantage, old=value), lr=1e-5),
    )


def negative_lag() -> Graph:
    return trained(sampled(max_lag=-1))


def no_sinks() -> Graph:
    return graph()


def training_without_a_batch() -> Graph:
    return trained(sampled(batch=None))


def evaluation_that_never_ends() -> Graph:
    prompt = prompts("data/test.parquet", batch=64, name="held_out")
    return evaluated(reward(exact, generate(policy, prompt, max_tokens=64, name="answers")))


def evaluation_on_the_very_prompts() -> Graph:
    rollout = sampled()
    score = scored(rollout)
    return judged(rollout, score).extend(evaluate(policy, score, every=10, allow_train_data=True))


def message_10_evaluation_on_training_data() -> Graph:
    rollout = sampled()
    score = scored(rollout)
    return judged(rollout, score).extend(evaluate(policy, score, every=10))


def evaluation_of_a_model_that_made_nothing() -> Graph:
    prompt = prompts("data/test.parquet", name="held_out")
    held = generate(Model("other", BASE), prompt, max_tokens=64, name="answers")
    return evaluated(reward(exact, held))


def message_7_teacher_of_another_vocabulary() -> Graph:
    student = Model("student", str(TOKENIZERS / "words"), trainable=True)
    rollout = generate(student, source(), n=8, max_tokens=64, name="rollout")
    teacher = logprobs(Model("teacher", str(TOKENIZERS / "others")), rollout)
    loss = clipped_policy_loss(compared(rollout), reference=teacher, beta=0.1)
    return graph(train(student, rollout, loss=loss, lr=1e-6))


def table_for_a_model() -> Graph:
    return trained(generate(Table("success"), source(), n=8, max_tokens=64))  # type: ignore


def evaluation_on_the_same_file_under_another_path() -> Graph:
    prompt = prompts("./data//train.parquet", name="held_out")
    return evaluated(reward(exact, generate(policy, prompt, max_tokens=64, name="answers")))


def illegal_name_of_a_model() -> Graph:
    return compared_with(Model("my reference", BASE))


UNBOUNDED = dataclasses.replace(
    LOGPROBS, path="tests.wrong_graphs.states:UNBOUNDED", name="unbounded"
)


def reader_without_a_lag() -> Graph:
    rollout = sampled()
    old: Port[Logprobs] = Node(
        UNBOUNDED, "old", states={"model": policy}, inputs={"rows": rollout}
    ).port()
    return trained(rollout, clipped_policy_loss(compared(rollout), old=old))


def old_values_of_another_critic() -> Graph:
    rollout, other = sampled(n=1), Model("other", BASE, head="scalar")
    advantage = gae(rollout, scored(rollout), values(critic, rollout))
    old = values(other, rollout, name="old")
    fit = train(critic, rollout, loss=value_loss(advantage, old=old, clip=0.2), lr=1e-5)
    return graph(train(policy, rollout, loss=clipped_policy_loss(advantage), lr=1e-6), fit)
