"""Models whose directories, which the test makes under `./bases`, lack what their nodes need."""

from __future__ import annotations

from typing import Any

from dataflow.graph import Graph
from dataflow.loss import Loss
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import Prompt, Rollout
from operators.advantage import gae
from operators.data import demonstrations, prompts
from operators.forward import logprobs, scores, values
from operators.generate import generate
from operators.losses import clipped_policy_loss, policy_gradient_loss, supervised_loss
from operators.reward import reward
from operators.train import train
from tests.wrong_graphs.parts import DATA, compared, exact, graph

GOOD = "./bases/good"


def rolled_out(
    base: str = GOOD, source: Port[Prompt] | None = None, **asked: Any
) -> tuple[Model, Port[Rollout]]:
    """A policy on a base, and its answers."""
    policy = Model("policy", base, trainable=True)
    asked = {"n": 8, "max_tokens": 64} | asked
    return policy, generate(policy, source or prompts(DATA, batch=64), name="rollout", **asked)


def trained(policy: Model, rollout: Port[Rollout], loss: Loss | None = None) -> Graph:
    """The policy's training alone."""
    loss = loss or clipped_policy_loss(compared(rollout))
    return graph(train(policy, rollout, loss=loss, lr=1e-6))


def grpo_on(base: str, source: Port[Prompt] | None = None, **asked: Any) -> Graph:
    """GRPO on a base."""
    return trained(*rolled_out(base, source, **asked))


def near(reference: str, base: str = GOOD) -> Graph:
    """GRPO near a reference on another base."""
    policy, rollout = rolled_out(base)
    anchor = logprobs(Model("reference", reference), rollout)
    loss = clipped_policy_loss(compared(rollout), reference=anchor, beta=0.1)
    return trained(policy, rollout, loss)


def base_that_is_not_there() -> Graph:
    return grpo_on("./bases/goood")


def base_that_is_a_file() -> Graph:
    return grpo_on("./bases/model.gguf")


def base_without_anything() -> Graph:
    return grpo_on("./bases/empty")


def config_that_is_broken() -> Graph:
    return grpo_on("./bases/broken_config")


def config_of_no_architecture() -> Graph:
    return grpo_on("./bases/untyped")


def weights_that_are_not_there() -> Graph:
    return grpo_on("./bases/weightless")


def weights_cut_short() -> Graph:
    return grpo_on("./bases/cut_short")


def weights_that_git_did_not_fetch() -> Graph:
    return grpo_on("./bases/pointer")


def shard_that_is_missing() -> Graph:
    return grpo_on("./bases/shards")


def weights_of_fewer_layers() -> Graph:
    return grpo_on("./bases/fewer_layers")


def embedding_of_another_size() -> Graph:
    return grpo_on("./bases/other_embedding")


def tokenizer_that_is_not_there() -> Graph:
    return grpo_on("./bases/speechless")


def tokenizer_without_an_end() -> Graph:
    return grpo_on("./bases/endless")


def tokenizer_with_more_ids_than_the_model() -> Graph:
    return grpo_on("./bases/wordy")


def end_that_is_no_id() -> Graph:
    return grpo_on("./bases/odd_end")


def messages_without_a_template() -> Graph:
    return grpo_on(GOOD, prompts("data/messages.parquet", batch=64))


def answers_as_long_as_the_positions() -> Graph:
    return grpo_on(GOOD, max_tokens=128)


def prompts_and_answers_beyond_the_positions() -> Graph:
    return grpo_on(GOOD, max_tokens=100, max_prompt_tokens=64, overlong_prompt="drop")


def overlong_policy_that_is_none() -> Graph:
    return grpo_on(GOOD, overlong_prompt="left")


def reference_with_fewer_positions() -> Graph:
    return near("./bases/short")


def reward_model_without_a_head() -> Graph:
    policy, rollout = rolled_out()
    verdict = scores(Model("rm", GOOD, head="scalar"), rollout)
    value = values(Model("critic", "./bases/scored", head="scalar"), rollout)
    return trained(policy, rollout, policy_gradient_loss(gae(rollout, verdict, value)))


def critic_of_two_numbers() -> Graph:
    policy, rollout = rolled_out()
    value = values(Model("critic", "./bases/two_scores", head="scalar"), rollout)
    loss = policy_gradient_loss(gae(rollout, reward(exact, rollout), value))
    return trained(policy, rollout, loss)


def two_bases_that_are_wrong() -> Graph:
    return near("./bases/goood", "./bases/endless")


def architecture_of_no_test() -> Graph:
    return grpo_on("./bases/jais2")


def architecture_with_alibi() -> Graph:
    return grpo_on("./bases/bloom")


def architecture_with_chunks() -> Graph:
    return grpo_on("./bases/llama4_text")


def architecture_with_states() -> Graph:
    return grpo_on("./bases/mamba")


def architecture_with_an_encoder() -> Graph:
    return grpo_on("./bases/t5")


def architecture_that_reads_both_ways() -> Graph:
    return grpo_on("./bases/bert")


def architecture_that_sees() -> Graph:
    return grpo_on("./bases/gemma3")


def architecture_that_cannot_be_packed() -> Graph:
    return grpo_on("./bases/gptj")


def base_that_is_quantised() -> Graph:
    return grpo_on("./bases/quantised")


def base_with_a_layer_of_states() -> Graph:
    return grpo_on("./bases/hybrid")


def base_with_unknown_positions() -> Graph:
    return grpo_on("./bases/spiral")


def answers_beyond_what_dynamic_positions_can_say() -> Graph:
    return grpo_on("./bases/dynamic", max_tokens=128)


def demonstrations_that_are_messages_without_a_template() -> Graph:
    policy = Model("policy", GOOD, trainable=True)
    rows = demonstrations("data/messages.parquet", batch=8)
    return graph(train(policy, rows, loss=supervised_loss(), lr=1e-6))
