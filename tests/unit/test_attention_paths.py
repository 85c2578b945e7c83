"""The one rule for how attention is computed: by itself, by a base's config.json, in a plan's
memory and in what `explain` prints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dataflow.attention_paths import (
    AttentionCall,
    AttentionPath,
    choose_attention_path,
    describe_attention_paths,
    list_attention_paths,
)
from dataflow.errors import PlanError
from engine.plan.cluster import Cluster
from engine.plan.cost.attention import planned_attention
from engine.plan.explain import explain
from tests.kit.graphs import grpo_graph
from tests.kit.plans import planned

PLAIN: dict[str, Any] = {"hidden_size": 2048, "num_attention_heads": 16}


def call_with(**changes: Any) -> AttentionCall:
    """A call that any path computes, but for these changes."""
    fields = {"device": "cuda", "dtype": "bfloat16", "head": 128, "value_head": 128, "plain": True}
    return AttentionCall(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "over_tree", "over_rows"),
    [
        ({}, "flex", "varlen"),
        ({"dtype": "float16", "head": 64, "value_head": 64}, "flex", "varlen"),
        ({"dtype": "float32"}, "flex", "flex"),
        ({"plain": False}, "flex", "flex"),
        ({"value_head": 64}, "flex", "flex"),
        ({"head": 100, "value_head": 100}, "flex", "flex"),
        ({"head": 16, "value_head": 16}, "flex", "varlen"),
        ({"head": 256, "value_head": 256}, "flex", "varlen"),
        ({"device": "cpu"}, "dense", "dense"),
        ({"dtype": "float64"}, "dense", "dense"),
        ({"head": 8, "value_head": 8}, "dense", "dense"),
        ({"value_head": 8}, "dense", "dense"),
        ({"head": 512}, "dense", "dense"),
    ],
)
def test_the_rule(
    changes: dict[str, Any], over_tree: AttentionPath, over_rows: AttentionPath
) -> None:
    call = call_with(**changes)
    assert choose_attention_path(call, shares_prefix=True) == over_tree
    assert choose_attention_path(call, shares_prefix=False) == over_rows


def test_the_rule_in_words() -> None:
    both = list_attention_paths(call_with())
    assert describe_attention_paths(both) == (
        "flex over the prefix tree, varlen where no prefix is shared"
    )
    dense = list_attention_paths(call_with(device="cpu"))
    assert describe_attention_paths(dense) == "dense over the prefix tree"


def save_config(folder: Path, **fields: Any) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        (PLAIN, ("flex", "varlen")),
        (PLAIN | {"head_dim": 8}, ("dense",)),
        (PLAIN | {"attn_logit_softcapping": 50.0}, ("flex",)),
        (PLAIN | {"attn_logit_softcapping": None}, ("flex", "varlen")),
        (PLAIN | {"model_type": "gpt_oss", "head_dim": 64}, ("flex",)),
        (
            PLAIN | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
            ("flex",),
        ),
        ({"n_embd": 768}, ()),
    ],
    ids=["plain", "narrow", "capped", "not capped", "sinks", "latent", "unknown"],
)
def test_a_base_takes_the_paths_that_its_config_allows(
    fields: dict[str, Any], paths: tuple[AttentionPath, ...], tmp_path: Path
) -> None:
    assert planned_attention(save_config(tmp_path, **fields), "bfloat16", is_on_gpu=True) == paths


def test_a_base_that_is_not_here_or_damaged(tmp_path: Path) -> None:
    assert planned_attention("some/hub-name", "bfloat16", is_on_gpu=True) == ()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match=r"config\.json"):
        planned_attention(str(tmp_path), "bfloat16", is_on_gpu=True)


@pytest.mark.usefixtures("tiny")
def test_explain_says_how_a_gpu_attends_and_memory_counts_no_gathered_keys_there() -> None:
    on_gpu = planned(grpo_graph(beta=0.04), Cluster(cores=2, memory=2**36, gpus=(2**36,)))
    on_cpu = planned(grpo_graph(beta=0.04), Cluster(cores=2, memory=2**36))
    line = "attention: flex over the prefix tree"
    assert explain(on_gpu).count(line) == 2  # reference and train_policy; rollout has a cache
    assert "attention:" not in explain(on_cpu)
    for name in ("reference", "train_policy"):
        gpu_bytes, cpu_bytes = (
            plan.node(name).estimate.bytes["activations"] for plan in (on_gpu, on_cpu)
        )
        assert gpu_bytes < cpu_bytes
    assert on_cpu.node("train_policy").estimate.attention == ("dense",)
    assert on_gpu.node("rollout").estimate.attention == ()
