"""Plans on GPUs that are not here: Models without weights, and generation and training apart.

Owns: model directories with a config and the header of their weights, and where Workers are. Does
not own: plans with a critic (ppo_plans.py), what is done with the plans (simulate.py,
published_ours.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dataflow.graph import Graph
from dataflow.model import Model
from engine.api import plan
from engine.plan.cost.model_passes import Sizes
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from operators.advantage import group_advantage
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss, decoupled_policy_loss
from operators.reward import reward
from operators.train import train

EACH = 8
"""GPUs of a host."""
SCORED = {"score": 0.0}
"""Seconds a row of the reward, which the papers do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFiles:
    """Paths of what a plan is made of."""

    base: str
    data: str
    hosts: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """What is planned. generating, training: GPUs of either side; tensor: ranks of training that
    split each matrix; longest: tokens of an answer; microbatch: tokens that are trained at once,
    0 for the planner's. A max_lag above 0 is AReaL's: decoupled PPO,
    and rows admitted by its rule.
    """

    model: Sizes
    device: str
    generating: int
    training: int
    tensor: int
    prompts: int
    samples: int
    longest: int
    longest_prompt: int = 512
    minibatches: int = 4
    microbatch: int = 0
    max_lag: int = 0


def right(completions: list[str], **columns: object) -> list[float]:
    """A reward function, never called here."""
    return [0.0] * len(completions)


def planned(folder: Path, asked: GpuPlan) -> Plan:
    """Generation in a replica a GPU, by vLLM, and training's ranks on GPUs of their own. Raises
    PlanError where that does not fit.
    """
    count = -(-(asked.generating + asked.training) // EACH)
    files = write_inputs(folder, asked.model, asked.device, hosts=count)
    gen, own = asked.generating, asked.training
    pin = {
        "rollout": ",".join(f"g{i}@{host_of(i, count)}" for i in range(gen)),
        "train_policy": ",".join(f"t{i}@{host_of(gen + i, count)}" for i in range(own)),
    }
    updated = ["train_policy"]
    if asked.max_lag:
        pin["proximal"] = pin["train_policy"]
        updated.append("proximal")
    options = RunOptions(
        cluster=files.hosts,
        workers="apart",
        pin=pin,
        ranks={"train_policy": own // asked.tensor},
        tensor={"train_policy": asked.tensor},
        kernel={"rollout": "vllm"},
        microbatch=dict.fromkeys(updated, asked.microbatch) if asked.microbatch else {},
    )
    planned = plan(make_graph(files.base, files.data, asked), options)
    assert isinstance(planned, Plan)
    return planned


def host_of(number: int, count: int) -> str:
    """The name of the host of a GPU, among so many hosts."""
    return f"h-{number // EACH}" if count > 1 else "h"


def write_inputs(folder: Path, model: Sizes, device: str, *, hosts: int) -> PlanFiles:
    """Write a Model without weights, some prompts, and a cluster of equal hosts."""
    folder.mkdir(parents=True, exist_ok=True)
    base, data, cluster = folder / "model", folder / "prompts.parquet", folder / "hosts.toml"
    save_model(base, model)
    pq.write_table(pa.table({"prompt": ["a"] * 16, "answer": ["b"] * 16}), data)
    cluster.write_text(
        f'[hosts.h]\ncount = {hosts}\ncores = 128\nmemory_gib = 2048\ndevices = "{EACH}x{device}"\n'
    )
    return PlanFiles(base=str(base), data=str(data), hosts=str(cluster))


def make_graph(base: str, data: str, asked: GpuPlan) -> Graph:
    policy = Model("policy", base, trainable=True, dtype="bfloat16")
    rollout = generate(
        policy,
        prompts(data, batch=asked.prompts),
        n=asked.samples,
        max_tokens=asked.longest,
        max_prompt_tokens=asked.longest_prompt,
        max_lag=asked.max_lag,
        name="rollout",
    )
    score = reward(right, rollout, name="score")
    advantage = group_advantage(rollout, score, name="advantage")
    loss = clipped_policy_loss(advantage)
    if asked.max_lag:
        proximal = logprobs(policy, rollout, name="proximal")
        loss = decoupled_policy_loss(advantage, proximal=proximal)
    intake = "admission" if asked.max_lag else "exact"
    how = {"lr": 1e-6, "minibatches": asked.minibatches, "intake": intake}
    return Graph("grpo", train(policy, rollout, loss=loss, **how))


def save_model(base: Path, model: Sizes) -> None:
    """A directory of a Qwen2 whose weights take no room on the disk."""
    shape = model.shape
    base.mkdir(exist_ok=True)
    config = {
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": shape.tied,
    }
    (base / "config.json").write_text(json.dumps(config))
    head = shape.vocabulary * shape.hidden
    body = model.parameters - head
    said = {
        "model.body": {"dtype": "BF16", "shape": [body], "data_offsets": [0, 2 * body]},
        "lm_head.weight": {
            "dtype": "BF16",
            "shape": [shape.vocabulary, shape.hidden],
            "data_offsets": [2 * body, 2 * (body + head)],
        },
    }
    header = json.dumps(said).encode()
    header += b" " * (-len(header) % 8)
    with open(base / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * (body + head))
    (base / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<eos>": 0}}}))
    (base / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
