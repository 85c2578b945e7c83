"""Plans of graphs whose rows have several turns: lengths, keys between turns, environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataflow.check import check
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.schema import (
    Completion,
    Episode,
    Rollout,
    TruncatedEpisode,
    TruncatedRollout,
    common_schema,
)
from engine.plan.checks.memory import find_memory_rooms
from engine.plan.cluster import Cluster
from engine.plan.plan import Plan
from operators.advantage import group_advantage
from operators.data import prompts
from operators.environments import isolated
from operators.forward import logprobs
from operators.generate import generate
from operators.interact import interact
from operators.losses import clipped_policy_loss, kl_loss
from operators.reward import reward
from operators.train import evaluate, train
from tests.kit.plans import CLUSTER, headers, planned, planned_on, save_tiny_header
from tests.kit.run_graphs import vowels

KEYS = 2 * 2 * 128 * 4
"""Bytes of a token's: of two layers, for keys and values, in float32."""


class CountingRounds:
    """An environment, as far as a plan looks at it."""

    def reset(self, **row: Any) -> str:
        return "go"

    def step(self, message: Any) -> str:
        return "on"


@pytest.fixture
def in_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_tiny_header(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def graph(environment: Any = CountingRounds, **how: Any) -> Graph:
    """GRPO over episodes, and an evaluation of them."""
    policy, reference = Model("policy", "tiny", trainable=True), Model("reference", "tiny")
    usual: dict[str, Any] = {"n": 4, "max_turns": 4, "max_tokens": 64}
    how = usual | how
    tasks = prompts("tasks", batch=8)
    episodes = interact(policy, tasks, environment, name="episodes", **how)
    score = reward(vowels, episodes, name="score")
    loss = clipped_policy_loss(group_advantage(episodes, score)) + 0.04 * kl_loss(
        logprobs(reference, episodes)
    )
    # An evaluation takes each row for an episode.
    one_row = {"overflow": "stop", "segments": 1, "compact": None}
    alone: dict[str, Any] = how | one_row | {"n": 1}
    questions = prompts("held", name="questions")
    held_out = interact(policy, questions, environment, name="held_out", **alone)
    exam = evaluate(policy, reward(vowels, held_out, name="mark"), every=2)
    return Graph("episodes", train(policy, episodes, loss=loss, lr=1e-5), exam)


def notes_of(plan: Plan, node: str = "episodes") -> list[str]:
    return [note.removeprefix(f"{node}: ") for note in plan.notes if note.startswith(f"{node}: ")]


@pytest.mark.parametrize(
    ("stated", "row"),
    [
        ({"max_prompt_tokens": 100}, "164 tokens a row: prompt 100, 64"),
        ({"max_prompt_tokens": 100, "max_context": 120}, "120 tokens a row: prompt 100, 64"),
        ({"max_tokens": 900, "max_context": 300}, "300 tokens a row: prompt 299, 300"),
    ],
)
def test_a_row_is_a_prompt_and_what_is_written_and_answered(
    in_tiny: Path, stated: dict[str, Any], row: str
) -> None:
    assert f"at most {row} written and answered" in notes_of(planned(graph(**stated)))


def test_keys_between_turns_are_those_of_all_rows_where_there_is_room(in_tiny: Path) -> None:
    plan = planned(graph(max_prompt_tokens=100))
    node = plan.node("episodes")
    assert node.layout.parked == 8 * 4 * 164
    assert node.estimate.bytes["parked"] == 8 * 4 * 164 * KEYS
    (line,) = [note for note in notes_of(plan) if note.startswith("keys of")]
    assert line == (
        "keys of up to 32 rows between turns: 10.2 MiB, 5,248 tokens; what is beyond is computed"
        " again"
    )
    assert plan.node("held_out").layout.parked > 0
    assert {n.layout.parked for n in plan.nodes if not n.traits.generates} == {0}


def test_keys_between_turns_take_a_half_of_what_is_free(in_tiny: Path) -> None:
    with_one = planned(graph(max_prompt_tokens=100, parked_tokens=1))
    (room,) = find_memory_rooms(with_one, CLUSTER)
    tight = Cluster(cores=2, memory=room.need - KEYS + 2 * 1000 * KEYS)
    plan = planned(graph(max_prompt_tokens=100), tight)
    assert plan.node("episodes").layout.parked == 1000
    assert next(find_memory_rooms(plan, tight)).need <= tight.memory


def keep_last(messages: Any) -> Any:
    return messages[-1:]


def test_rows_of_one_episode_are_not_there_at_once(in_tiny: Path) -> None:
    """Memory is that of n rows of a prompt, each with a prompt of its own; seconds are those of all
    rows, one after another.
    """
    one = planned(graph(max_prompt_tokens=100))
    several = {"overflow": "segment", "segments": 3, "compact": keep_last}
    three = planned(graph(max_prompt_tokens=100, **several))
    node, plain = three.node("episodes"), one.node("episodes")
    assert (node.rows, node.live_rows, plain.live_rows) == (12, 4, 4)
    assert node.layout.parked == plain.layout.parked == 8 * 4 * 164
    assert node.estimate.bytes["logits"] == plain.estimate.bytes["logits"]
    assert node.estimate.bytes["kv_cache"] == 8 * 4 * (100 + 64) * KEYS
    assert node.estimate.bytes["outbox"] > 2.9 * plain.estimate.bytes["outbox"]
    assert node.estimate.seconds == pytest.approx(3 * (plain.estimate.seconds or 0.0))
    assert (
        "an episode has up to 3 rows, one after another: memory of 4 rows of a prompt at once,"
        " seconds and bytes as if all were needed"
    ) in notes_of(three)
    assert not any("one after another" in note for note in notes_of(one))


def test_keys_between_turns_are_those_of_the_largest_chunk(in_tiny: Path) -> None:
    cluster = Cluster(cores=4, memory=64 << 30)
    plan = planned_on(cluster, graph(max_prompt_tokens=100), workers=3, replicas={"episodes": 3})
    node = plan.node("episodes")
    assert node.chunks == 3, "of three, three and two prompts"
    assert node.layout.parked == 3 * 4 * 164


def test_a_stated_number_of_tokens_stays(in_tiny: Path) -> None:
    plan = planned(graph(parked_tokens=1000))
    assert plan.node("episodes").layout.parked == 1000
    assert plan.node("episodes").estimate.bytes["parked"] == 1000 * KEYS


def test_a_plan_says_where_environments_run(in_tiny: Path) -> None:
    usual = "each episode in a process of its own, forked from 1 process, the run's python"
    notes = notes_of(planned(graph()))
    assert f"environments: CountingRounds, {usual}" in notes
    assert any("seconds as if all" in note for note in notes)
    placed = isolated(CountingRounds, processes=4, isolation="shared", python="/opt/bin/python")
    shared = "all episodes in 4 processes, with an event loop each, /opt/bin/python"
    assert f"environments: CountingRounds, {shared}" in notes_of(planned(graph(placed)))


def test_rows_of_one_turn_keep_nothing(in_tiny: Path) -> None:
    policy = Model("policy", "tiny", trainable=True)
    rollout = generate(policy, prompts("tasks", batch=8), n=4, max_tokens=64, name="rollout")
    advantage = group_advantage(rollout, reward(vowels, rollout, name="score"))
    plan = planned(Graph("g", train(policy, rollout, loss=clipped_policy_loss(advantage), lr=1e-5)))
    assert plan.node("rollout").layout.parked == 0
    assert not any("between turns" in note for note in plan.notes)


# --- the check ------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "positions": ({"max_tokens": 2000}, "has 1,024 positions, and max_tokens=2000 leaves none"),
    "context": ({"max_context": 2048}, "has 1,024 positions, found max_context=2048"),
    "prompt": (
        {"max_context": 512, "max_prompt_tokens": 512},
        "max_prompt_tokens=512 leaves nothing of max_context=512",
    ),
    "group of one": ({"n": 1}, "groups have 1 row"),
    "sampler": (
        {"sampler": "vllm", "top_k": 5},
        "sampler='vllm' does not record the probability that top_k and top_p keep",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_faults_of_rollouts_are_faults_of_episodes(in_tiny: Path, name: str) -> None:
    how, problem = WRONG[name]
    with pytest.raises(GraphError, match=problem):
        check(graph(**how), headers)


class WantingTests(CountingRounds):
    """Needs a column that the data do not have."""

    def reset(self, tests: list[str]) -> str:  # type: ignore[override]
        return "go"


def test_a_column_that_an_environment_needs_is_asked_of_the_data(in_tiny: Path) -> None:
    fix = "a column 'tests' in the data, or an environment whose reset does without it"
    with pytest.raises(GraphError, match=f"'episodes': wants 'tests', .*Fix: {fix}"):
        check(graph(WantingTests), headers)


def test_a_context_bounds_rows_whatever_they_may_be_given(in_tiny: Path) -> None:
    check(graph(max_tokens=5000, max_context=1024), headers)


def test_a_temperature_and_the_most_tokens_are_those_of_the_episodes(in_tiny: Path) -> None:
    plan = planned(graph(temperature=0.7))
    assert plan.program is not None
    params = plan.program.node("train_policy").params
    assert (params["temperature"], params["max_tokens"]) == (0.7, 64)
    assert plan.program.node("reference").params["temperature"] == 0.7


@pytest.mark.parametrize(
    ("schemas", "common"),
    [
        ((Episode, Rollout), Rollout),
        ((TruncatedEpisode, Rollout), TruncatedRollout),
        ((TruncatedEpisode, Episode), TruncatedEpisode),
        ((Episode, Completion), Completion),
    ],
)
def test_episodes_stand_beside_rollouts(schemas: tuple[Any, ...], common: Any) -> None:
    assert common_schema(schemas) is common
