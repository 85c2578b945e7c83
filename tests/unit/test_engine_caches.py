"""How much memory an engine's cache gets, by what else is on its devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dataflow.kernel import Layout
from engine.plan.cluster import Cluster
from engine.plan.cost.kv_cache import GPU_SHARE, MOST
from engine.plan.plan import Plan
from operators.data import prompts
from operators.interact import interact
from tests.kit.environments import VowelTurns
from tests.kit.graphs import DATA, graph_of, policy, sampled, small_grpo
from tests.kit.plans import CONFIG, planned_on

pytestmark = pytest.mark.usefixtures("tiny", "all_installed")
GPU = 400 << 30
LAYERS = 512
"""So that the rows of all slots need more than MOST."""


@pytest.fixture(autouse=True)
def many_layers(tiny: None) -> None:
    (Path("tiny") / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": LAYERS}))


def plan(gpus: int, **asked: Any) -> Plan:
    cluster = Cluster(cores=16, memory=2**42, gpus=(GPU,) * gpus, kind="H100" if gpus else "")
    graph = small_grpo(batch=64, n=8, max_tokens=900)
    return planned_on(cluster, graph, kernel={"rollout": "vllm"}, workers="apart", **asked)


def cache(of: Plan) -> int:
    return of.node("rollout").layout.cache_bytes


@pytest.mark.parametrize("gpus", [0, 1])
def test_on_a_host_or_beside_workers_that_are_awake_an_engine_keeps_to_its_limit(gpus: int) -> None:
    assert MOST - 2**28 < cache(plan(gpus)) <= MOST


def test_on_a_gpu_of_its_own_it_has_what_weights_leave() -> None:
    found = plan(4)
    weights = found.node("rollout").estimate.bytes["weights"]
    assert len(set(found.devices.values())) == 3, "one each"
    assert MOST < cache(found) <= GPU_SHARE * GPU - weights


def test_in_turns_it_has_the_memory_of_those_that_sleep() -> None:
    pins = {"rollout": "gen", "train_policy": "train", "reference": "train"}
    assert cache(plan(1, pin=pins, turns=(("gen", "train"),))) > MOST


def layout_with(turns: dict[str, Any], **params: Any) -> Layout:
    """Of 64 prompts of 16 rows in 2 chunks, on a GPU of its own. turns: parameters of `interact`;
    without any it is `generate`.
    """
    how = {"n": 16, "max_tokens": 64, **params}
    rollout = sampled(**how)
    if turns:
        source = prompts(DATA, batch=64)
        rollout = interact(policy, source, VowelTurns, name="rollout", **how, **turns)
    asked = {"kernel": {"rollout": "vllm"}, "chunks": {"rollout": 2}, "workers": "apart"}
    cluster = Cluster(cores=16, memory=2**42, gpus=(GPU,) * 4, kind="H100")
    return planned_on(cluster, graph_of(rollout), **asked).node("rollout").layout


def test_rows_that_take_turns_keep_their_keys_until_their_chunk_ends() -> None:
    in_one, in_turns = (
        layout_with(turns, max_prompt_tokens=64) for turns in ({}, {"max_turns": 4})
    )
    assert in_one.slots == 256
    assert in_turns.cache_bytes == 2 * in_one.cache_bytes


@pytest.mark.parametrize(
    ("turns", "longest"),
    [
        ({"max_turns": 4, "max_context": 1000}, 1000),
        ({"max_turns": 4, "max_context": 8192}, 8192),
        ({"max_turns": 4, "max_context": None}, 4096 + 64),
    ],
)
def test_an_engine_has_room_for_what_environments_add(turns: dict[str, Any], longest: int) -> None:
    """The data's prompts are short; the Model has 8,192 positions."""
    config = {**CONFIG, "num_hidden_layers": 2, "max_position_embeddings": 8192}
    (Path("tiny") / "config.json").write_text(json.dumps(config))
    assert layout_with(turns).longest == longest
