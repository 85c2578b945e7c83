"""Recorded episodes as the page gets them: turns with their tokens, and pages of messages."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Batch
from engine.keep.reader.episode_rows import (
    PAGE,
    RecordedEpisode,
    is_episode,
    token_turns,
    turn_tokens,
)
from engine.watch.json_answers import encode_answer
from tests.kit.episodes import episode_batch, episode_samples


def row_of(rows: Batch, *, full: bool = False) -> dict[str, Any]:
    return episode_samples(1, rows, full=full).to_pylist()[0]


@given(st.integers(0, 1000), st.integers(1, 6))
def test_each_token_is_of_one_turn_and_written_ones_have_the_mask(seed: int, turns: int) -> None:
    rows = episode_batch(rows=1, turns=turns, seed=seed)
    row = row_of(rows)
    assert "turn" not in row
    assert token_turns(row) == rows.ragged("turn")[0].tolist()
    mask = np.array(row["completion_mask"])
    tokens = turn_tokens(row)
    ends = [0, *(each.until for each in tokens)]
    assert [each.begin for each in tokens] == ends[:-1]
    assert ends[-1] == len(mask)
    for each in tokens:
        assert mask[each.begin : each.end].all()
        assert not mask[each.end : each.until].any()


def test_a_turn_has_what_it_took_and_brought() -> None:
    rows = episode_batch(rows=1, turns=3, seed=3)
    row = row_of(rows)
    messages = RecordedEpisode(row).page(0)["messages"]
    turns = [message for message in messages if "turn" in message]
    assert [message["turn"] for message in turns] == [0, 1, 2]
    assert [message["number"] for message in turns] == [2, 4, 6]
    for turn, message in enumerate(turns):
        assert message["to"] == row["turn_end"][turn]
        for name in ("turn_reward", "model_seconds", "environment_seconds"):
            assert message[name] == row[name][turn]
        versions = row["versions"][message["from"] : message["to"]]
        assert message["versions"] == [min(versions), max(versions)]
    answers = [message["answers"] for message in messages if "answers" in message]
    assert answers == [0, 1]
    assert turns[0]["calls"] == [{"name": "search", "arguments": [["query", "word 0"]]}]
    assert turns[0]["reasoning"] == "in turn 0 I search"


def test_an_episode_is_summed_up() -> None:
    row = row_of(episode_batch(rows=1, turns=4))
    summary = RecordedEpisode(row).summary()
    assert (summary["turns"], summary["messages"]) == (4, 9)
    assert summary["written"] == sum(row["completion_mask"])
    assert summary["model_seconds"] == pytest.approx(sum(row["model_seconds"]))
    assert json.loads(summary["state"]) == {"words_left": 0}


def test_messages_of_the_prompt_by_the_assistant_are_no_turns() -> None:
    row = row_of(episode_batch(rows=1, turns=2))
    shots = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    row["messages"] = json.dumps([*shots, *json.loads(row["messages"])])
    messages = RecordedEpisode(row).page(0)["messages"]
    assert [message.get("turn") for message in messages if message["role"] == "assistant"] == [
        *(None, 0, 1)
    ]


def test_what_is_missing_is_left_out() -> None:
    row = row_of(episode_batch(rows=1, turns=2))
    for name in ("model_seconds", "environment_seconds", "versions", "completion_mask"):
        row[name] = None
    row["turn_reward"] = [None, float("nan")]
    episode = RecordedEpisode(row)
    assert episode.summary()["model_seconds"] is None
    assert episode.summary()["turn_reward"] is None
    turns = [message for message in episode.page(0)["messages"] if "turn" in message]
    assert [message["turn_reward"] for message in turns] == [None, None]


def test_fewer_messages_than_turns_are_the_last_turns() -> None:
    row = row_of(episode_batch(rows=1, turns=3))
    row["messages"] = json.dumps([{"role": "assistant", "content": "end"}])
    (message,) = RecordedEpisode(row).page(0)["messages"]
    assert message["turn"] == 2
    row["messages"] = "no messages"
    assert RecordedEpisode(row).page(0)["messages"] == []


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"messages": "[]"},
        {"messages": None, "turn_end": [1]},
        {"messages": "[]", "turn_end": None},
        {"messages": "[]", "turn_end": ["x"]},
    ],
)
def test_other_rows_are_no_episodes(row: dict[str, Any]) -> None:
    assert not is_episode(row)


@given(ends=st.lists(st.integers(-5, 20), max_size=5), mask=st.lists(st.integers(0, 1)))
def test_ends_of_any_kind_are_read(ends: list[int], mask: list[int]) -> None:
    row = {"messages": '[{"role": "assistant"}]', "turn_end": ends, "completion_mask": mask}
    episode = RecordedEpisode(row)
    encode_answer([episode.summary(), episode.page(0), token_turns(row)])


def test_a_very_long_conversation_is_sent_in_pages_and_long_texts_are_cut() -> None:
    row = row_of(episode_batch(rows=1, turns=300))
    messages = json.loads(row["messages"])
    for message in messages:
        message["content"] = "x" * 30_000
    row["messages"] = json.dumps(messages)
    episode = RecordedEpisode(row)
    page = episode.page(0)
    assert (len(page["messages"]), page["total"]) == (PAGE, len(messages))
    assert len(encode_answer(page)) < 1_000_000
    assert page["messages"][0]["text"].endswith("... (30000 characters)")
    last = episode.page(len(messages) - 1)["messages"]
    assert [message["turn"] for message in last] == [299]
    assert episode.page(10_000)["messages"] == []
