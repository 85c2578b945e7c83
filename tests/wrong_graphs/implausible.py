"""Settings that hardly mean what they say: warnings."""

from __future__ import annotations

from collections.abc import Sequence

from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Reward, Rollout
from operators.advantage import (
    add,
    gae,
    group_advantage,
    overlong_penalty,
    teacher_advantage,
)
from operators.forward import logprobs, values
from operators.losses import (
    clipped_policy_loss,
    decoupled_policy_loss,
    distillation_loss,
    policy_gradient_loss,
    value_loss,
)
from operators.reward import reward, step_reward
from operators.train import evaluate, train
from tests.kit.rewards import brief
from tests.wrong_graphs.parts import (
    BASE,
    compared,
    critic,
    exact,
    graph,
    held_out,
    judged,
    policy,
    sampled,
    scored,
    trained,
    updated,
)


def each_step(completions: Sequence[str], steps: Sequence[Sequence[str]]) -> list[list[float]]:
    """One for each step."""
    return [[1.0] * len(pieces) for pieces in steps]


def lenient(completions: Sequence[str], answr: Sequence[str] | None = None) -> list[float]:
    """Right if no answer is known."""
    return [1.0 if answr is None else 0.0] * len(completions)


def penalised(rollout: Port[Rollout], max_tokens: int) -> Graph:
    score = overlong_penalty(rollout, scored(rollout), max_tokens=max_tokens, buffer=16)
    return judged(rollout, score)


def bounds_of_a_ratio_for_its_distances() -> Graph:
    rollout = sampled()
    return trained(rollout, clipped_policy_loss(compared(rollout), clip=(0.8, 1.28)))


def upper_bound_of_a_ratio_for_its_distance() -> Graph:
    rollout = sampled()
    proximal = logprobs(policy, rollout, name="proximal")
    loss = decoupled_policy_loss(compared(rollout), proximal=proximal, clip=1.2)
    return trained(rollout, loss)


def temperature_that_is_greedy() -> Graph:
    return trained(sampled(temperature=1e-6))


def temperature_of_a_reference_that_is_greedy() -> Graph:
    rollout = sampled()
    near = logprobs(Model("reference", BASE), rollout, temperature=0.001)
    return trained(rollout, clipped_policy_loss(compared(rollout), reference=near, beta=0.1))


def top_k_of_one_for_several_answers() -> Graph:
    return trained(sampled(top_k=1))


def weights_of_zero() -> Graph:
    rollout = sampled()
    return judged(rollout, reward([exact, exact], rollout, weights=[0.0, 0]))


def weights_of_zero_of_a_sum() -> Graph:
    rollout = sampled()
    other = reward(exact, rollout, name="other")
    return judged(rollout, add(scored(rollout), other, weights=[0, 0]))


def penalty_beyond_the_longest_answer() -> Graph:
    return penalised(sampled(), max_tokens=512)


def penalty_before_the_longest_answer() -> Graph:
    return penalised(sampled(), max_tokens=32)


def optional_column_that_is_misspelt() -> Graph:
    rollout = sampled()
    return judged(rollout, reward(lenient, rollout))


def advantages_of_a_frozen_critic() -> Graph:
    rollout = sampled(n=1)
    frozen = Model("frozen", BASE, head="scalar")
    advantage = gae(rollout, scored(rollout), values(frozen, rollout))
    fit = train(critic, rollout, loss=value_loss(advantage), lr=1e-5)
    return graph(updated(rollout, clipped_policy_loss(advantage)), fit)


def old_values_without_a_clip() -> Graph:
    rollout = sampled(n=1)
    value = values(critic, rollout)
    advantage = gae(rollout, scored(rollout), value)
    fit = train(critic, rollout, loss=value_loss(advantage, old=value), lr=1e-5)
    return graph(updated(rollout, clipped_policy_loss(advantage)), fit)


def rewards_of_steps_of_which_only_the_sum_is_read() -> Graph:
    rollout = sampled()
    score: Port[Reward] = step_reward(each_step, rollout)
    penalty = overlong_penalty(rollout, score, max_tokens=64, buffer=16)
    return trained(rollout, clipped_policy_loss(group_advantage(rollout, penalty)))


def evaluation_by_other_weights_than_are_trained() -> Graph:
    rollout = sampled()
    score = reward([exact, brief], rollout, weights=[1.0, 0.2], name="score")
    sink = updated(rollout, clipped_policy_loss(group_advantage(rollout, score)))
    return graph(sink, evaluate(policy, reward([exact, brief], held_out()), every=10, keep_best=1))


def teacher_that_is_the_student() -> Graph:
    rollout = sampled(n=1)
    teacher = logprobs(policy, rollout, name="teacher")
    return trained(rollout, policy_gradient_loss(teacher_advantage(rollout, teacher)))


def teacher_at_the_base_of_its_student() -> Graph:
    rollout = sampled(n=1)
    teacher = logprobs(Model("teacher", BASE), rollout)
    return trained(rollout, policy_gradient_loss(teacher_advantage(rollout, teacher)))


def distillation_from_the_base_of_the_student() -> Graph:
    rollout = sampled(n=1)
    teacher = logprobs(Model("teacher", BASE, follows=policy, every=0), rollout, top_k=8)
    return trained(rollout, distillation_loss(teacher))


def advantages_of_a_frozen_critic_beside_the_trained_one() -> Graph:
    rollout = sampled(n=1)
    score, frozen = scored(rollout), Model("frozen", BASE, head="scalar")
    advantage = gae(rollout, score, values(frozen, rollout, name="fixed"), name="of_frozen")
    own = gae(rollout, score, values(critic, rollout), name="of_critic")
    fit = train(critic, rollout, loss=value_loss(own), lr=1e-5)
    return graph(updated(rollout, clipped_policy_loss(advantage)), fit)


def follower_in_bfloat16_that_moves_slowly() -> Graph:
    rollout = sampled()
    slow = Model("reference", BASE, follows=policy, rate=0.01, dtype="bfloat16")
    near = logprobs(slow, rollout)
    return trained(rollout, clipped_policy_loss(compared(rollout), reference=near, beta=0.1))
