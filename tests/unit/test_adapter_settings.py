"""Settings of adapters edit a finished graph into the one with other adapters."""

from __future__ import annotations

import re

import pytest

from dataflow.adapters import Lora, lora
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.program import Phase, Program
from dataflow.set_expressions import edited, settable
from graphs.grpo import grpo
from graphs.ppo import ppo
from graphs.sft import sft
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import kl_loss
from operators.train import train
from tests.kit.rewards import exact


def small(adapter: Lora | None) -> Graph:
    return grpo("tiny", "a.jsonl", exact, adapter=adapter)


def adapters_of(graph: Graph) -> dict[str, Lora | None]:
    return {state.name: state.adapter for state in graph.states if isinstance(state, Model)}


@pytest.mark.parametrize(
    ("setting", "fields"),
    [
        ("rank=32", {"rank": 32}),
        ("alpha=8", {"alpha": 8.0}),
        ("scale=rslora", {"scale": "rslora"}),
        ("targets=q_proj", {"targets": "q_proj"}),
        ("targets=('q_proj', 'v_proj')", {"targets": ("q_proj", "v_proj")}),
        ("start=some/folder", {"start": "some/folder"}),
    ],
)
def test_each_field_is_reached(setting: str, fields: dict[str, object]) -> None:
    graph = edited(small(lora()), [f"policy.adapter.{setting}"])
    assert adapters_of(graph)["policy"] == lora(**fields)  # type: ignore[arg-type]
    assert graph == small(lora(**fields))  # type: ignore[arg-type]


def test_it_goes_with_settings_of_nodes() -> None:
    graph = edited(small(lora()), ["rollout.temperature=0.5", "policy.adapter.rank=2"])
    assert adapters_of(graph)["policy"] == lora(rank=2)
    assert graph.node("rollout").params["temperature"] == 0.5


def test_each_model_has_its_own() -> None:
    graph = edited(ppo("tiny", "a.jsonl", exact, adapter=lora()), ["critic.adapter.rank=2"])
    assert adapters_of(graph) == {"policy": lora(), "critic": lora(rank=2), "reference": None}


def test_what_changes_nothing_is_the_same_graph() -> None:
    graph = small(lora())
    assert edited(graph, ["policy.adapter.rank=16"]) is graph


def test_followers_have_the_new_one_too() -> None:
    policy = Model("policy", "tiny", trainable=True, adapter=lora())
    before = Model("before", "tiny", follows=policy)
    rollout = generate(policy, prompts("a.jsonl", batch=4), n=2, max_tokens=8, name="rollout")
    loss = kl_loss(logprobs(before, rollout, name="reference"))
    graph = Graph("g", train(policy, rollout, loss=loss, lr=1e-4))
    assert set(adapters_of(edited(graph, ["policy.adapter.rank=4"])).values()) == {lora(rank=4)}
    message = "Model 'before' has the adapter of 'policy', which it follows. Fix: policy.adapter."
    with pytest.raises(GraphError, match=re.escape(message)):
        edited(graph, ["before.adapter.rank=4"])


def test_all_phases_of_a_program_have_it() -> None:
    first = sft("tiny", "demos.jsonl", adapter=lora())
    program = Program(Phase(first, steps=1), Phase(small(lora()), steps=1))
    changed = edited(program, ["policy.adapter.alpha=64"])
    for phase in changed.phases:
        assert adapters_of(phase.graph)["policy"] == lora(alpha=64)


REFUSED = {
    "Model 'policy' has no adapter. Fix: --adapter 'lora(rank=4)'": (None, ["rank=4"]),
    "an adapter has no field 'lora_alpha'. Fix: policy.adapter.alpha=4": (
        lora(),
        ["lora_alpha=4"],
    ),
    "for rank expected a whole number, found 'many'": (lora(), ["rank=many"]),
    "lora: expected rank to be a whole number >= 1, found 0. Fix: rank=16": (lora(), ["rank=0"]),
    "policy.adapter.rank is set twice. Fix: leave one out": (lora(), ["rank=2", "rank=4"]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_adapter_takes_is_refused(message: str) -> None:
    adapter, settings = REFUSED[message]
    with pytest.raises(GraphError, match=re.escape(message)):
        edited(small(adapter), [f"policy.adapter.{setting}" for setting in settings])


def test_adapters_are_listed_behind_the_nodes() -> None:
    listed = settable(ppo("tiny", "a.jsonl", exact, adapter=lora()))
    assert {node.name for node in listed[-2:]} == {"policy.adapter", "critic.adapter"}
    fields = {parameter.name: parameter for parameter in listed[-1].parameters}
    assert list(fields) == ["rank", "alpha", "targets", "start", "scale"]
    assert fields["rank"].about.startswith("rows of A")
    assert not [node for node in settable(small(None)) if node.name.endswith(".adapter")]
