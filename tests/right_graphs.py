"""Right graphs: what the operators can express, beyond the graphs that are shipped."""

from __future__ import annotations

from typing import Any

from dataflow.graph import Graph
from dataflow.loss import Loss, Now, Tensors, Terms, loss
from dataflow.model import Model, cosine, linear, warmup
from dataflow.node import Node, Port
from dataflow.schema import (
    Advantage,
    Completion,
    Keep,
    Logprobs,
    Preference,
    Prompt,
    Reward,
    Rollout,
)
from dataflow.user import Columns, operator
from graphs.grpo import grpo
from graphs.ppo import ppo
from graphs.sft import sft
from operators.advantage import (
    add,
    baseline_advantage,
    gae,
    group_advantage,
    returns,
    teacher_advantage,
)
from operators.continued import continued
from operators.data import demonstrations, preferences, prompts
from operators.forward import logprobs, scores, values
from operators.generate import generate
from operators.losses import (
    clipped_policy_loss,
    decoupled_policy_loss,
    distillation_loss,
    dpo_loss,
    entropy_loss,
    importance,
    kl_loss,
    policy_gradient_loss,
    regression_loss,
    soft_clipped_policy_loss,
    supervised_loss,
    trajectory_balance_loss,
    value_loss,
)
from operators.mean_over import mean_over
from operators.reward import reward
from operators.select import best_of, select
from operators.select import pair as best_and_worst
from operators.train import evaluate, train
from tests.kit.edited_graphs import ppo_from_grpo
from tests.kit.rewards import brief, exact
from tests.right_concats import gold_answers, parts_apart, two_temperatures
from tests.right_policies import (
    answers_to_a_simulated_user,
    frozen_generator_corrected,
    ratio_with_a_follower,
)

BASE, DATA, TEST = "models/tiny", "data/train.parquet", "data/test.parquet"

policy = Model("policy", BASE, trainable=True)
critic = Model("critic", BASE, trainable=True, head="scalar")
reference = Model("reference", BASE)


@operator(scope="group")
def pair(score: Columns[Reward]) -> Columns[Preference]:
    keep = [1] * len(score)
    return Columns.make(Preference, like=score, keep=keep, sign=[1, -1] * (len(score) // 2))


@operator(reads={"rollout": ["answer"]})
def ask_judge(rollout: Columns[Rollout], *, rubric: str) -> Columns[Prompt]:
    prompt = [f"{rubric}\n{text}" for text in rollout["completion"]]
    return Columns.make(Prompt, like=rollout, prompt=prompt)


@operator()
def read_verdict(verdict: Columns[Rollout]) -> Columns[Reward]:
    reward = [float("yes" in text) for text in verdict["completion"]]
    return Columns.make(Reward, like=verdict, reward=reward)


@operator()
def whole(rollout: Columns[Rollout]) -> Columns[Keep]:
    return Columns.make(Keep, like=rollout, keep=[int(end == "stop") for end in rollout["finish"]])


@operator()
def well(score: Columns[Reward]) -> Columns[Keep]:
    return Columns.make(Keep, like=score, keep=(score["reward"] > 0).astype("uint8"))


@operator()
def short(prompt: Columns[Prompt]) -> Columns[Keep]:
    return Columns.make(Keep, like=prompt, keep=[int(len(text) < 80) for text in prompt["prompt"]])


@operator(parent="first")
def conversation(later: Columns[Rollout], first: Columns[Rollout]) -> Columns[Rollout]:
    assert len(later) == len(first)
    return later


@operator()
def teacher_score(reference: Columns[Logprobs]) -> Columns[Reward]:
    rows = reference["logprobs"]
    return Columns.make(Reward, like=reference, reward=[rows[i].mean() for i in range(len(rows))])


@loss(scope="token")
def cautious(now: Now, advantage: Tensors[Advantage], *, strength: float = 1.0) -> Terms:
    assert now.logprobs is not None
    return Terms(-strength * advantage["advantage"] * now.logprobs)


def prompt_of(rollout: Port[Rollout]) -> Port[Prompt]:
    return rollout.node.inputs["prompt"]


def sampled(n: int = 8, **how: Any) -> Port[Rollout]:
    return generate(policy, prompts(DATA, batch=64), n=n, max_tokens=64, name="rollout", **how)


def trained(name: str, rollout: Port[Completion], loss: Loss, **params: Any) -> Graph:
    """A graph of one sink, the policy's training on these rows."""
    return Graph(name, train(policy, rollout, loss=loss, **{"lr": 1e-6} | params))


def against_group(rollout: Port[Rollout]) -> Port[Advantage]:
    """Each answer's reward, compared with its group."""
    return group_advantage(rollout, reward(exact, rollout))


def plain_grpo() -> Graph:
    return grpo(BASE, DATA, exact, minibatches=4, beta=0.04, max_lag=1)


def plain_ppo() -> Graph:
    return ppo(BASE, DATA, exact)


def edited_ppo() -> Graph:
    return ppo_from_grpo(BASE, DATA, exact)


def plain_sft() -> Graph:
    return sft(BASE, "data/demos.jsonl")


def areal() -> Graph:
    rollout = sampled(n=16, max_lag=4)
    proximal = logprobs(policy, rollout, name="proximal")
    objective = decoupled_policy_loss(against_group(rollout), proximal=proximal)
    return trained("areal", rollout, objective, minibatches=4, intake="admission", lr=2e-5)


def trajectory_balance_with_reset() -> Graph:
    rollout = sampled(n=20, max_lag=10)
    anchor = logprobs(Model("anchor", BASE, follows=policy, every=50), rollout)
    beta = linear(0.012, 0.004, 500)
    objective = trajectory_balance_loss(reward(exact, rollout), reference=anchor, beta=beta)
    return trained("tba", rollout, objective)


def slow_critic() -> Graph:
    rollout = sampled(n=1)
    slow = Model("slow", BASE, head="scalar", follows=critic, rate=0.1)
    advantage = gae(rollout, reward(exact, rollout), values(slow, rollout))
    return Graph(
        "slow_critic",
        train(policy, rollout, loss=clipped_policy_loss(advantage), lr=1e-6, start=20),
        train(critic, rollout, loss=value_loss(advantage), lr=1e-5),
    )


def rules_and_reward_model() -> Graph:
    rollout = sampled()
    rules = reward([exact, brief], rollout, weights=[1.0, 0.2])
    score = add(rules, scores(Model("rm", BASE, head="scalar"), rollout), weights=[1.0, 0.5])
    objective = clipped_policy_loss(group_advantage(rollout, score)) + 0.01 * entropy_loss()
    return trained("rules", rollout, objective, lr=warmup(10, cosine(1e-6, 0.0, 100)))


def language_model_judge() -> Graph:
    rollout = sampled()
    question = ask_judge(rollout, rubric="Is this right?")
    judge = Model("judge", "models/large")
    verdict = generate(judge, question, temperature=0.0, max_tokens=4, name="verdict")
    advantage = group_advantage(rollout, mean_over(read_verdict(verdict), rollout))
    return trained("judge", rollout, clipped_policy_loss(advantage))


def two_turns() -> Graph:
    """Turn 1 is trained on what turn 2 came to."""
    rollout = sampled(4, max_lag=1)
    asked = ask_judge(rollout, rubric="Again:")
    later = generate(policy, asked, n=2, max_tokens=64, max_lag=1, name="later")
    advantage = group_advantage(rollout, mean_over(reward(exact, later), rollout))
    return trained("two_turns", rollout, clipped_policy_loss(advantage))


def turns_kept_by_the_second() -> Graph:
    """Single answers and one answer to each, kept by its reward, each above its prompt's mean."""
    rollout = sampled(n=1)
    later = generate(policy, ask_judge(rollout, rubric="Again:"), max_tokens=64, name="later")
    score = mean_over(select(reward(exact, later), where=whole(later), name="whole_ones"), rollout)
    kept, kept_score = select(rollout, score, where=well(score), refill=True)
    mean = mean_over(score, prompt_of(rollout), name="of_prompt")
    advantage = baseline_advantage(kept, kept_score, mean)
    return trained("kept_by_the_second", kept, policy_gradient_loss(advantage))


def both_turns() -> Graph:
    """The tokens of two turns in one row, the first read by key; their temperature is stated."""
    rollout = sampled(4, temperature=0.7)
    asked = ask_judge(rollout, rubric="Again:")
    later = generate(policy, asked, max_tokens=64, stop="</answer>", name="later")
    whole_row = conversation(later, rollout)
    where = best_of(teacher_score(logprobs(reference, whole_row, temperature=1.0)))
    best = select(whole_row, where=where)
    return trained("both_turns", best, supervised_loss(), lr=1e-5)


def online_dpo() -> Graph:
    rollout = sampled()
    pairs = pair(reward(exact, rollout))
    rollout, pairs = select(rollout, pairs, where=pairs, refill=True)
    objective = dpo_loss(pairs, reference=logprobs(reference, rollout), beta=0.1)
    return trained("online_dpo", rollout, objective, lr=5e-7)


def pairs_by_margin() -> Graph:
    rollout = sampled()
    pairs = best_and_worst(reward(exact, rollout), margin=0.5)
    rollout, pairs = select(rollout, pairs, where=pairs, refill=True)
    objective = dpo_loss(pairs, reference=logprobs(reference, rollout))
    return trained("pairs_by_margin", rollout, objective, lr=5e-7, minibatches=4)


def offline_dpo() -> Graph:
    rows, pairs = preferences("data/pairs.parquet", batch=64)
    objective = dpo_loss(pairs, reference=logprobs(reference, rows))
    return trained("offline_dpo", rows, objective, lr=5e-7, minibatches=4)


def exploring(max_lag: int) -> tuple[Port[Rollout], Loss]:
    """Answers at temperature 0.7, each against its group."""
    rollout = sampled(temperature=0.7, max_lag=max_lag)
    return rollout, clipped_policy_loss(against_group(rollout))


def imitating_while_exploring(max_lag: int = 0, batch: int = 16) -> Graph:
    """Demonstrations beside the policy's own answers, each with its batch in every Step."""
    rollout, objective = exploring(max_lag)
    demos = demonstrations("data/demos.jsonl", batch=batch, name="demos")
    loss = objective + 0.1 * supervised_loss(rows=demos)
    return trained("imitating", rollout, loss, minibatches=4)


def preferring_while_exploring() -> Graph:
    """Pairs beside the policy's own answers: another source, with a reference of its own."""
    rollout, objective = exploring(1)
    rows, pairs = preferences("data/pairs.parquet", batch=8)
    other = dpo_loss(pairs, reference=logprobs(reference, rows), rows=rows)
    return trained("preferring", rollout, objective + 0.5 * other, lr=5e-7)


def imitating_its_own_best() -> Graph:
    """The best answers of the same prompts count once more."""
    rollout, objective = exploring(0)
    best = select(rollout, where=best_of(reward(exact, rollout, name="mark")))
    loss = objective + 0.1 * (supervised_loss(rows=best) + 0.1 * entropy_loss(rows=best))
    return trained("own_best", rollout, loss, minibatches=4)


def distillation() -> Graph:
    rollout = sampled(n=1)
    teacher = logprobs(Model("teacher", "models/large"), rollout, top_k=64)
    objective = policy_gradient_loss(teacher_advantage(rollout, teacher))
    return trained("distillation", rollout, objective + 0.1 * distillation_loss(teacher))


def soft_clips() -> Graph:
    rollout = sampled()
    gain, old = against_group(rollout), logprobs(policy, rollout)
    objective = soft_clipped_policy_loss(gain, old=old, correction=importance("geometric"))
    divergence = kl_loss(logprobs(reference, rollout))
    return trained("soft_clips", rollout, objective + 0.01 * divergence, minibatches=4)


def reward_model() -> Graph:
    rollout, judge = sampled(n=1), Model("judge", BASE, trainable=True, head="scalar")
    fitted = train(judge, rollout, loss=regression_loss(reward(exact, rollout), huber=1.0), lr=1e-5)
    teacher = logprobs(Model("teacher", "models/large"), rollout)
    imitated = policy_gradient_loss(teacher_advantage(rollout, teacher))
    return Graph("reward_model", train(policy, rollout, loss=imitated, lr=1e-6), fitted)


def expert_iteration() -> Graph:
    rollout = sampled()
    best = select(rollout, where=best_of(reward(exact, rollout), k=1, above=0.5))
    return trained("expert_iteration", best, supervised_loss(), lr=1e-5, minibatches=5)


def compared() -> Node:
    """The policy's training on its answers, each against its group."""
    rollout = sampled()
    return train(policy, rollout, loss=clipped_policy_loss(against_group(rollout)), lr=1e-6)


def answered(data: str, name: str) -> Port[Reward]:
    """The reward of greedy answers to other prompts."""
    greedy = {"temperature": 0.0, "max_tokens": 64}
    held = generate(policy, prompts(data, name=name), **greedy, name=f"{name}_rollout")
    return reward(exact, held, name=f"{name}_reward")


def with_evaluation() -> Graph:
    best = evaluate(policy, answered(TEST, "held_out"), every=50, keep_best=1)
    return Graph("with_evaluation", compared(), best)


def evaluation_on_training_data_that_is_meant() -> Graph:
    seen = evaluate(policy, answered(DATA, "seen"), every=50, allow_train_data=True)
    return Graph("meant", compared(), seen)


def two_generators() -> Graph:
    prompt = prompts(DATA, batch=64)
    models = [Model(name, BASE, trainable=True) for name in ("red", "blue")]
    sinks = []
    for model in models:
        rollout = generate(model, prompt, n=4, max_tokens=64, name=f"{model.name}_rollout")
        score = reward(exact, rollout, name=f"{model.name}_score")
        advantage = group_advantage(rollout, score, name=f"{model.name}_advantage")
        sinks.append(train(model, rollout, loss=clipped_policy_loss(advantage), lr=1e-6))
    return Graph("two_generators", *sinks)


def own_loss() -> Graph:
    rollout = sampled()
    return trained("own_loss", rollout, cautious(against_group(rollout), strength=0.5))


def answers_continued() -> Graph:
    second = generate(policy, continued(sampled(), then="Sure?"), n=2, max_tokens=64, name="second")
    return trained(
        "answers_continued", second, clipped_policy_loss(returns(second, reward(exact, second)))
    )


def reward_model_of_text() -> Graph:
    rollout = sampled()
    verdict = scores(Model("rm", BASE, head="scalar"), rollout, reads="text", overlong="truncate")
    return trained("text", rollout, clipped_policy_loss(group_advantage(rollout, verdict)))


def prompts_chosen() -> Graph:
    """Prompts are chosen before they are answered: their groups are whole."""
    prompt = prompts(DATA, batch=64)
    chosen = select(prompt, where=short(prompt), refill=True)
    rollout = generate(policy, chosen, n=8, max_tokens=64, name="rollout")
    return trained("prompts_chosen", rollout, clipped_policy_loss(against_group(rollout)))


RIGHT = (
    plain_grpo, plain_ppo, edited_ppo, plain_sft, areal,
    trajectory_balance_with_reset, slow_critic, rules_and_reward_model, language_model_judge,
    two_turns, turns_kept_by_the_second, both_turns, online_dpo, pairs_by_margin, offline_dpo,
    imitating_while_exploring, preferring_while_exploring, imitating_its_own_best,
    distillation, soft_clips, reward_model, expert_iteration, with_evaluation, two_generators,
    evaluation_on_training_data_that_is_meant, own_loss, two_temperatures,
    gold_answers, parts_apart, reward_model_of_text, answers_continued, prompts_chosen,
    answers_to_a_simulated_user, frozen_generator_corrected, ratio_with_a_follower,
)  # fmt: skip
