"""The torch kernel of interact: rows are what was fed, within budgets, whatever is answered."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch
from dataflow.errors import DataError, KernelError
from dataflow.kernel import Layout
from dataflow.schema import Episode
from operators.environments import Environment, isolated
from operators.kernels.environments.replies import EnvironmentReply
from operators.kernels.episode_pass import refuse_answer
from operators.kernels.torch.interact import TorchInteract
from tests.kit.environments import Aborting, Chatter, Failing, Flood, VowelTurns
from tests.kit.generate_suite import MIXED, PREFIXED
from tests.kit.interact_kernels import kernels as kernels
from tests.kit.interact_kernels import open_interact, require_sound, run_episodes
from tests.kit.kernels import FakeSession
from tests.kit.run_graphs import vowels
from tests.kit.turns import example_count


@settings(max_examples=example_count(15), deadline=None)
@given(
    n=st.integers(1, 3),
    max_turns=st.integers(1, 5),
    max_tokens=st.integers(1, 70),
    max_turn_tokens=st.one_of(st.none(), st.integers(1, 12)),
    room=st.one_of(st.none(), st.integers(1, 60)),
    slots=st.integers(1, 12),
    pace=st.sampled_from(["rounds", "free"]),
    messages=st.booleans(),
)
def test_rows_are_sound_for_any_budget(
    base: str, messages: bool, slots: int, room: int | None, **how: Any
) -> None:
    prompts: list[Any] = MIXED[:3]
    if messages:
        prompts = [[{"role": "user", "content": text}] for text in prompts]
    longest = 26 + Chatter.longest + 5
    context = 1 << 20 if room is None else longest + room
    session = FakeSession(node="episode")
    kernel = open_interact(
        base, session=session, layout=Layout(slots=slots, tokens=64), max_context=context, **how
    )
    try:
        batch = run_episodes(kernel, prompts)
    finally:
        kernel.close()
    assert len(batch) == 3 * how["n"]
    assert not session.tombstones
    require_sound(batch, base, completion=how["max_tokens"], context=context)
    most_turns = batch.ragged("turn_end").lengths.max()
    assert most_turns <= how["max_turns"]
    for name in ("episode/turns", "episode/context/max", "episode/overflow", "env/errors"):
        assert name in session.metrics


def test_columns_are_those_of_an_episode(base: str, kernels: list[TorchInteract]) -> None:
    kernel = open_interact(base, n=2)
    kernels.append(kernel)
    batch = run_episodes(kernel, MIXED)
    types = {name: batch.array(name).type for name in batch.names}
    assert types == {name: column.arrow.type for name, column in Episode.columns.items()}
    finishes = set(batch.array("finish").to_pylist())
    assert finishes <= {"stop", "length", "turns"}
    for row, text in enumerate(batch.array("messages").to_pylist()):
        messages = json.loads(text)
        roles = [message["role"] for message in messages]
        assert roles[0] == "user"
        assert roles.count("assistant") == len(batch.ragged("turn_end")[row])


def test_a_turn_has_the_reward_of_what_it_wrote(base: str, kernels: list[TorchInteract]) -> None:
    kernel = open_interact(base, VowelTurns, n=2)
    kernels.append(kernel)
    batch = run_episodes(kernel, MIXED)
    rewards = batch.array("turn_reward").to_pylist()
    for row, text in enumerate(batch.array("messages").to_pylist()):
        messages = json.loads(text)
        turns = [each["content"] for each in messages if each["role"] == "assistant"]
        assert len(turns) == len(rewards[row])
        # A row that has no room for the third turn's answer was not shown to the environment.
        for turn, reward in zip(turns, rewards[row], strict=True):
            assert reward is None or reward == pytest.approx(vowels(completions=[turn])[0])
        assert rewards[row][0] is not None


def test_the_same_bits_come_out_in_rounds(base: str, kernels: list[TorchInteract]) -> None:
    batches: list[Batch] = []
    for inproc in (True, False):
        kernel = open_interact(base, n=3, inproc=inproc)
        kernels.append(kernel)
        for _ in range(2):
            batches.append(run_episodes(kernel, PREFIXED))
    computed = [each for each in Episode.columns if not Episode.columns[each].measured]
    for batch in batches[1:]:
        assert batch.records.select(computed).equals(batches[0].records.select(computed))


def test_a_group_plays_one_task(base: str, kernels: list[TorchInteract]) -> None:
    kernel = open_interact(base, n=4, max_turns=1)
    kernels.append(kernel)
    batch = run_episodes(kernel, MIXED * 2)
    prompts = batch.ragged("prompt_ids")
    first_messages = [json.loads(text)[0] for text in batch.array("messages").to_pylist()]
    for row, first in enumerate(first_messages):
        # What `reset` returned stands behind the prompt.
        assert first["content"].startswith((MIXED * 2)[row // 4])
    by_group = [[prompts[row].tolist() for row in range(g * 4, g * 4 + 4)] for g in range(10)]
    assert all(group == group[:1] * 4 for group in by_group)
    assert any(one != other for one, other in itertools.pairwise([g[0] for g in by_group[::5]]))


def test_a_flood_ends_the_episode_and_not_the_run(base: str, kernels: list[TorchInteract]) -> None:
    session = FakeSession(node="episode")
    kernel = open_interact(base, Flood, session=session, max_context=80)
    kernels.append(kernel)
    batch = run_episodes(kernel, MIXED)
    assert set(batch.array("finish").to_pylist()) == {"length"}
    assert (batch.ragged("turn_end").lengths == 1).all()
    require_sound(batch, base, completion=60, context=80)
    assert session.metrics["episode/overflow"] == [(1.0, 5)]


def test_a_flood_may_give_up_its_group(base: str, kernels: list[TorchInteract]) -> None:
    session = FakeSession(node="episode")
    kernel = open_interact(base, Flood, session=session, n=2, overflow="drop_group")
    kernels.append(kernel)
    assert not len(run_episodes(kernel, MIXED))
    assert [key for key, _ in session.tombstones] == [(row, 0, 0) for row in range(5)]


@pytest.mark.parametrize("environment", [Failing, Aborting])
def test_a_failing_environment_loses_its_row_alone(
    base: str, kernels: list[TorchInteract], environment: type
) -> None:
    session = FakeSession(node="episode")
    kernel = open_interact(base, environment, session=session, n=4, inproc=False, retries=0)
    kernels.append(kernel)
    batch = run_episodes(kernel, MIXED * 2)
    lost_keys = [key for key, _ in session.tombstones]
    assert 0 < len(lost_keys) < 20
    assert len(batch) == 40 - len(lost_keys)
    assert set(session.lost_alone) == set(lost_keys)
    assert set(batch.keys.rows()).isdisjoint(lost_keys)
    assert "expected its environment to answer, found that it" in session.tombstones[0][1]


def test_the_run_stops_where_the_graph_says_so(base: str, kernels: list[TorchInteract]) -> None:
    kernel = open_interact(base, Failing, n=4, retries=0, on_error="stop")
    kernels.append(kernel)
    with pytest.raises(KernelError, match="the lamp went out"):
        run_episodes(kernel, MIXED * 2)


def test_tools_need_prompts_that_are_messages(base: str, kernels: list[TorchInteract]) -> None:
    from operators.environments import tools
    from tests.kit.environments import add

    kernel = open_interact(base, tools(add))
    kernels.append(kernel)
    with pytest.raises(DataError, match="expected prompts that are messages"):
        run_episodes(kernel, MIXED)


def test_where_an_environment_runs_is_a_setting_of_it() -> None:
    environment = isolated(Chatter, processes=2)
    assert isinstance(environment, Environment)
    assert (environment.processes, environment.columns) == (2, ("prompt",))
    assert environment.required == ("prompt",)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "nothing"),
        ([{"role": "user", "content": ""}], "nothing"),
        ([{"role": "user", "content": "!"}], "'!', of which the tokenizer makes no token"),
    ],
)
def test_an_answer_without_tokens_is_told_apart_from_none(messages: Any, words: str) -> None:
    reply = EnvironmentReply(episode=0, call="step", messages=messages)
    assert refuse_answer(reply).text == f"answered {words}, and the episode is not over"
