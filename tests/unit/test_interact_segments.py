"""Episodes that go on in another row: its prompt, what each row has, and what is lost together."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.prompt_types import Message
from dataflow.schema import Segment, TruncatedSegment
from engine.protocol.refs import Key
from operators.environments import Turn
from operators.kernels.text import load_tokenizer
from operators.kernels.torch.interact import TorchInteract
from tests.kit.chat_templates import save_family
from tests.kit.environments import Chatter, Flaky, Talker, VowelTurns, first_and_last
from tests.kit.generate_suite import MIXED, tokens_of
from tests.kit.interact_kernels import kernels as kernels
from tests.kit.interact_kernels import (
    open_interact,
    require_sound,
    run_episodes,
    with_arguments,
)
from tests.kit.kernels import FakeSession

CONTEXT = 48


def explain_all(messages: list[Message]) -> list[Message]:
    """Makes the conversation longer."""
    return [{"role": "user", "content": "x" * CONTEXT}, *messages]


HOW: dict[str, Any] = {
    "n": 2,
    "max_turns": 9,
    "max_turn_tokens": 8,
    "max_context": CONTEXT,
    "overflow": "segment",
    "segments": 4,
    "compact": first_and_last,
}


@pytest.fixture
def open_one(base: str, kernels: list[TorchInteract]) -> Callable[..., tuple[Any, FakeSession]]:
    """Opens a kernel that is closed at the end; and its session."""

    def opened(environment: Any, **how: Any) -> tuple[TorchInteract, FakeSession]:
        session = FakeSession(node="episode")
        kernel = open_interact(base, environment, session=session, **HOW | how)
        kernels.append(kernel)
        return kernel, session

    return opened


Open = Callable[..., tuple[TorchInteract, FakeSession]]


def episodes_of(batch: Batch) -> list[list[dict[str, Any]]]:
    """The rows of each episode, by column."""
    episodes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for key, row in zip(batch.keys.rows(), batch.records.to_pylist(), strict=True):
        episodes.setdefault((key[0], row["episode"]), []).append(row | {"key": key})
    return list(episodes.values())


def require_segments(batch: Batch, *, n: int, segments: int) -> None:
    """Each episode's rows are at its first places, and only the last one ends it."""
    for rows in episodes_of(batch):
        assert [row["segment"] for row in rows] == list(range(len(rows)))
        for row in rows:
            assert row["key"][1] == row["episode"] * segments + row["segment"]
            assert row["episode"] < n
        *before, last = rows
        assert last["finish"] != "segment"
        for row, next_row in zip(before, rows[1:], strict=True):
            assert (row["finish"], row["final_reward"]) == ("segment", None)
            assert row["environment_state"] == "{}"
            conversation = json.loads(row["messages"])
            assert json.loads(next_row["messages"])[: len(conversation)] == conversation


def test_what_compact_leaves_begins_the_next_row(open_one: Open, base: str) -> None:
    kernel, session = open_one(Talker)
    batch = run_episodes(kernel, ["hello", "abc"])
    require_sound(batch, base, completion=60, context=CONTEXT)
    require_segments(batch, n=2, segments=4)
    tokenizer = load_tokenizer(base)
    episodes = episodes_of(batch)
    assert len(episodes) == 4
    for rows in episodes:
        assert 1 < len(rows) <= 4
        asked = json.loads(rows[0]["messages"])[0]["content"]
        expected = tokenizer.encode_prompts([asked + "x" * 10])[0].tolist()
        assert [row["prompt_ids"] for row in rows[1:]] == [expected] * (len(rows) - 1)
        roles = [message["role"] for message in json.loads(rows[-1]["messages"])]
        assert roles.count("assistant") == sum(len(row["turn_end"]) for row in rows) <= 9
        assert rows[-1]["final_reward"] == {"turns": 2.0, "length": 3.0}[rows[-1]["finish"]]
    # Places that no episode needed are given up, which is nobody's fault.
    assert len(batch) + len(session.lost_alone) == 16
    assert not any(session.charged)
    assert session.metrics["episode/segments"] == [(len(batch) / 4, 4)]
    turns = sum(len(rows) for rows in batch.array("turn_end").to_pylist())
    assert session.metrics["episode/turns"] == [(turns / 4, 4)]
    rewards = [sum(rewards) for rewards in batch.array("turn_reward").to_pylist()]
    finals = batch.array("final_reward").drop_null().to_pylist()
    [(mean, count)] = session.metrics["episode/reward"]
    assert count == len(finals) == 4
    assert mean * count == pytest.approx(sum([*rewards, *finals]), abs=1e-4)


def test_compact_gets_what_the_row_shows_and_changes_nothing_of_it(open_one: Open) -> None:
    conversations: list[list[Message]] = []

    def edit(messages: list[Message]) -> list[Message]:
        conversations.append([dict(message) for message in messages])
        messages[-1]["content"] = "y"
        return first_and_last(messages)

    kernel, _ = open_one(Talker, compact=edit, n=1)
    [rows] = episodes_of(run_episodes(kernel, ["hello"]))
    conversation = json.loads(rows[-1]["messages"])
    begin = 1
    for row, shown in zip(rows, conversations, strict=False):
        # What begins a further row: the prompt, and the last answer as `edit` left it.
        opening = conversation[:1]
        if row["segment"]:
            opening = [*opening, {"role": "user", "content": "y"}]
        end = begin + 2 * len(row["turn_end"])
        assert shown == [*opening, *conversation[begin:end]]
        begin = end
    assert "y" not in [message["content"] for message in conversation]


def test_an_episode_ends_where_it_may_have_no_further_row(open_one: Open) -> None:
    kernel, session = open_one(Talker, segments=2, max_turns=40)
    episodes = episodes_of(run_episodes(kernel, ["hello", "abc"]))
    assert [[row["finish"] for row in rows] for rows in episodes] == [["segment", "length"]] * 4
    assert session.metrics["episode/segments"] == [(2.0, 4)]


def test_what_compact_leaves_has_to_fit(open_one: Open) -> None:
    kernel, _ = open_one(Talker, compact=explain_all, max_turns=40)
    episodes = episodes_of(run_episodes(kernel, ["hello", "abc"]))
    assert [[row["finish"] for row in rows] for rows in episodes] == [["length"]] * 4


def test_rows_of_an_episode_that_had_one_are_those_without_segments(open_one: Open) -> None:
    """But for the random numbers, which belong to a row's place."""
    greedy = {"temperature": 0.0, "max_context": 400}
    with_segments, session = open_one(VowelTurns, **greedy)
    alone = {"segments": 1, "overflow": "stop", "compact": None}
    without, _ = open_one(VowelTurns, **greedy, **alone)
    batch = run_episodes(with_segments, MIXED)
    expected = run_episodes(without, MIXED)
    for name in ("completion_ids", "turn_end", "turn_reward", "messages"):
        assert batch.array(name).to_pylist() == expected.array(name).to_pylist()
    assert set(batch.names) - set(expected.names) == {"episode", "segment"}
    assert len(session.lost_alone) == 3 * len(expected)
    assert not any(session.charged)


def test_truncated_segments_have_their_mass(open_one: Open) -> None:
    kernel, _ = open_one(Talker, top_k=5)
    batch = run_episodes(kernel, ["hello"])
    assert set(batch.names) == set(TruncatedSegment.columns)
    assert set(Segment.columns) < set(batch.names)


# --- failures -------------------------------------------------------------------------------------


class FailsLate(Talker):
    """Raises in its fifth turn, when its first row is over; `Flaky` says in which episodes."""

    def __init__(self, folder: str, every: int) -> None:
        self._flaky = Flaky(folder, every)

    def reset(self) -> None:
        super().reset()
        self._flaky.reset()

    def step(self, message: dict[str, Any]) -> Turn:
        if self._flaky._fails and self._turns_left == self.turns - 4:
            raise RuntimeError("the lamp went out")
        return super().step(message)


def test_an_episode_that_fails_in_a_later_row_begins_again(open_one: Open, tmp_path: Path) -> None:
    steady, _ = open_one(Talker)
    environment = with_arguments(FailsLate, folder=str(tmp_path), every=3)
    flaky, session = open_one(environment)
    expected = run_episodes(steady, ["hello", "abc"])
    batch = run_episodes(flaky, ["hello", "abc"])
    assert tokens_of(batch) == tokens_of(expected)
    assert session.metrics["env/errors"] == [(1.0, 1.0)]
    assert not any(session.charged)


def test_an_episode_that_is_lost_loses_all_its_rows(open_one: Open, tmp_path: Path) -> None:
    environment = with_arguments(FailsLate, folder=str(tmp_path), every=4)
    kernel, session = open_one(environment, retries=0)
    batch = run_episodes(kernel, ["hello", "abc"])
    require_segments(batch, n=2, segments=4)
    assert len(episodes_of(batch)) == 3
    assert sum(session.charged) == 4
    assert len({key for key, _ in session.tombstones}) == 16 - len(batch)


class NotedSeeds(FakeSession):
    """asked: the keys of all rows that a random stream was asked for."""

    def __init__(self) -> None:
        super().__init__(node="episode")
        self.asked: list[Key] = []

    def row_seeds(self, keys: Keys) -> np.ndarray:
        self.asked += keys.rows()
        return super().row_seeds(keys)


def test_each_row_of_an_episode_has_a_random_stream_of_its_own(
    base: str, kernels: list[TorchInteract]
) -> None:
    session = NotedSeeds()
    kernel = open_interact(base, Talker, session=session, **HOW)
    kernels.append(kernel)
    batch = run_episodes(kernel, ["hello", "abc"])
    require_segments(batch, n=2, segments=4)
    assert sorted(session.asked) == sorted(batch.keys.rows())
    assert max(map(len, episodes_of(batch))) > 1


class SlowTalker(Talker):
    """Takes its time with each turn."""

    def step(self, message: dict[str, Any]) -> Turn:
        threading.Event().wait(0.3)
        return super().step(message)


def test_the_time_of_an_episode_is_that_of_all_its_rows(open_one: Open) -> None:
    kernel, _ = open_one(SlowTalker, n=1, timeout=1.0)
    [rows] = episodes_of(run_episodes(kernel, ["hello"]))
    assert rows[-1]["finish"] == "timeout"
    assert sum(len(row["turn_end"]) for row in rows) < 9


def test_a_group_that_is_given_up_begins_no_further_row(open_one: Open, tmp_path: Path) -> None:
    environment = with_arguments(FailsLate, folder=str(tmp_path), every=4)
    kernel, session = open_one(environment, retries=0, on_error="drop_group")
    batch = run_episodes(kernel, ["hello", "abc"])
    assert len(set(batch.keys.position)) == 1
    assert not kernel._pool._episodes, "all environments are closed"  # type: ignore[attr-defined]
    assert len(session.tombstones) - len(session.lost_alone) == 1
    lost = set(session.lost_alone)
    assert {key[0] for key in lost} <= set(batch.keys.position)


def raises(messages: list[Message]) -> Sequence[Message]:
    raise ValueError("too much to say")


def answers_nothing(messages: list[Message]) -> Sequence[Message]:
    return []


def ends_with_the_model(messages: list[Message]) -> Sequence[Message]:
    return messages[:2]


@pytest.mark.parametrize(
    ("compact", "why"),
    [
        (raises, "compact raised ValueError: too much to say"),
        (answers_nothing, "expected a list of messages, each with a `role`"),
        (ends_with_the_model, "the last one not the assistant's"),
    ],
)
def test_a_compact_that_fails_costs_the_episode(open_one: Open, compact: Any, why: str) -> None:
    kernel, session = open_one(Talker, compact=compact, retries=0)
    assert not len(run_episodes(kernel, ["hello"]))
    assert len(session.tombstones) == 8
    assert all(why in text for _, text in session.tombstones)


# --- a user's turn begins a row -------------------------------------------------------------------


def test_a_template_that_drops_reasoning_begins_a_row_with_each_users_turn(
    tmp_path: Path, kernels: list[TorchInteract]
) -> None:
    base = save_family(tmp_path, "qwen3")
    talks = [[{"role": "user", "content": text}] for text in ("hello", "abc")]
    how: dict[str, Any] = {"n": 2, "max_tokens": 200, "max_turn_tokens": 20, "segments": 3}
    session = FakeSession(node="episode")
    kernel = open_interact(base, VowelTurns, session=session, thinking="template", **how)
    kernels.append(kernel)
    batch = run_episodes(kernel, talks)
    require_sound(batch, base, completion=200, context=512)
    require_segments(batch, n=2, segments=3)
    assert [len(rows) for rows in episodes_of(batch)] == [3] * 4
    assert (batch.lengths("turn_end") == 1).all()
    tokenizer = load_tokenizer(base)
    for rows in episodes_of(batch):
        for row in rows[1:]:
            conversation = json.loads(row["messages"])
            before_this_turn = conversation[: 2 * row["segment"] + 1]
            ids = tokenizer.inner.apply_chat_template(
                before_this_turn, add_generation_prompt=True, return_dict=False
            )
            assert row["prompt_ids"] == ids


# --- whatever happens -----------------------------------------------------------------------------


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    n=st.integers(1, 3),
    segments=st.integers(2, 4),
    max_turns=st.integers(1, 8),
    context=st.integers(30, 70),
    turn=st.one_of(st.none(), st.integers(1, 9)),
    pace=st.sampled_from(["rounds", "free"]),
)
def test_rows_of_random_episodes_are_sound(
    base: str, n: int, segments: int, max_turns: int, context: int, turn: int | None, pace: str
) -> None:
    session = FakeSession(node="episode")
    how: dict[str, Any] = {
        "n": n,
        "segments": segments,
        "max_turns": max_turns,
        "max_context": context,
    }
    how |= {"max_turn_tokens": turn, "pace": pace}
    kernel = open_interact(base, Chatter, session=session, **HOW | how)
    batch = run_episodes(kernel, ["hello", "abc", "b"])
    kernel.close()
    require_sound(batch, base, completion=60, context=context)
    require_segments(batch, n=n, segments=segments)
    lost = {key for key, _ in session.tombstones}
    assert len(lost) == len(session.lost_alone) == 3 * n * segments - len(batch)
    assert lost.isdisjoint(batch.keys.rows())
    encode = load_tokenizer(base).encode_behind
    for rows in episodes_of(batch):
        assert sum(len(row["turn_end"]) for row in rows) <= max_turns
        for row in rows[:-1]:  # each was left as a whole turn had no room behind the answer
            room = min(60, context - len(row["prompt_ids"]))
            [answer] = encode([json.loads(row["messages"])[-1]["content"]])
            assert row["turn_end"][-1] + len(answer) + (turn or 1) > room
    assert np.isfinite(batch.ragged("sampler_logprobs").values).all()
