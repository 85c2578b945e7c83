"""Random episodes: rows of several turns as `interact` makes them, and samples of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys, Ragged
from dataflow.schema import Episode, Schema, TruncatedEpisode
from engine.keep.samples import sample_table
from tests.kit.ragged_lists import ragged

_TOKEN_COLUMNS = {
    "completion_ids": np.int32,
    "completion_mask": np.uint8,
    "sampler_logprobs": np.float32,
    "sampler_mass": np.float32,
    "version": np.int32,
    "turn": np.uint16,
}
_TURN_COLUMNS = ("model_seconds", "environment_seconds")


@dataclass(slots=True)
class DrawnEpisode:
    """One row: its columns' values, and the conversation so far."""

    draw: np.random.Generator
    longest: int
    vocabulary: int
    columns: dict[str, list[Any]] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    version: int = 0

    def add(self, name: str, *entries: Any) -> None:
        self.columns.setdefault(name, []).extend(entries)

    def add_tokens(self, turn: int, *, written: bool) -> None:
        """Between 1 and `longest` tokens, which the model wrote or its environment answered."""
        count = int(self.draw.integers(1, self.longest + 1))
        self.add("completion_ids", *self.draw.integers(0, self.vocabulary, count).tolist())
        self.add("completion_mask", *[int(written)] * count)
        logprobs = -self.draw.random(count) - 0.1
        self.add("sampler_logprobs", *(logprobs * written + 0.0).tolist())
        self.add("sampler_mass", *(0.0 - self.draw.random(count) * written).tolist())
        if written:
            self.version += int(self.draw.integers(0, 2))
        self.add("version", *[self.version] * count)
        self.add("turn", *[turn] * count)

    def add_turn(self, turn: int) -> None:
        """What the model writes in a turn, with a call of a tool in about half of them."""
        self.add_tokens(turn, written=True)
        self.add("turn_end", len(self.columns["completion_ids"]))
        self.add("turn_reward", float(self.draw.random()) if turn % 2 else None)
        self.add("model_seconds", float(self.draw.random()))
        self.add("environment_seconds", float(self.draw.random()))
        message: dict[str, Any] = {"role": "assistant", "content": f"turn {turn} says so"}
        if turn % 2 == 0:
            called = {"name": "search", "arguments": {"query": f"word {turn}"}}
            message["tool_calls"] = [{"type": "function", "function": called}]
            message["reasoning_content"] = f"in turn {turn} I search"
        self.messages.append(message)

    def add_answer(self, turn: int) -> None:
        """What the environment answers to a turn: a tool's result, or what a user says."""
        self.add_tokens(turn, written=False)
        if turn % 2 == 0:
            answer = {"role": "tool", "name": "search", "content": f"found {turn}"}
        else:
            answer = {"role": "user", "content": f"and then, after {turn}?"}
        self.messages.append(answer)


def episode_batch(
    rows: int = 4,
    turns: int = 3,
    *,
    seed: int = 0,
    longest: int = 6,
    vocabulary: int = 98,
    truncated: bool = False,
) -> Batch:
    """So many episodes of 1..`turns` turns (the first one has all), each turn and each answer of
    1..`longest` tokens; what they say is no text of these ids. truncated: of a sampler that drew
    from a part of its distribution.

    The batch has the columns of Episode (TruncatedEpisode), and `model_seconds` and
    `environment_seconds`.
    """
    draw = np.random.default_rng(seed)
    episodes: list[DrawnEpisode] = []
    for row in range(rows):
        count = turns if row == 0 else int(draw.integers(1, turns + 1))
        episodes.append(_draw_episode(draw, count, longest, vocabulary))
    schema: type[Schema] = TruncatedEpisode if truncated else Episode
    prompts = draw.integers(0, vocabulary, (rows, 3)).tolist()
    columns: dict[str, Any] = {"prompt_ids": ragged(prompts)}
    for name, kind in _TOKEN_COLUMNS.items():
        if name != "sampler_mass" or truncated:
            columns[name] = ragged([each.columns[name] for each in episodes], kind)
    columns["turn_end"] = ragged([each.columns["turn_end"] for each in episodes])
    rewards = [each.columns["turn_reward"] for each in episodes]
    columns["turn_reward"] = pa.array(rewards, pa.large_list(pa.float32()))
    for name in _TURN_COLUMNS:
        columns[name] = ragged([each.columns[name] for each in episodes], np.float32)
    columns |= _texts(episodes, draw)
    keys = Keys.of(np.arange(rows) // 2 + 10, np.arange(rows) % 2)
    return Batch.make(keys, columns, schema)


def _draw_episode(
    draw: np.random.Generator, turns: int, longest: int, vocabulary: int
) -> DrawnEpisode:
    episode = DrawnEpisode(draw=draw, longest=longest, vocabulary=vocabulary)
    episode.messages.append({"role": "system", "content": "You may search."})
    episode.messages.append({"role": "user", "content": "What is the word?"})
    for turn in range(turns):
        episode.add_turn(turn)
        if turn + 1 < turns:
            episode.add_answer(turn)
    return episode


def _texts(episodes: list[DrawnEpisode], draw: np.random.Generator) -> dict[str, Any]:
    finishes = draw.choice(["stop", "length", "turns", "timeout"], len(episodes))
    final_rewards: list[float | None] = []
    answers: list[str] = []
    for place, episode in enumerate(episodes):
        final_rewards.append(None if place % 3 == 2 else float(draw.random()))
        written = [m["content"] for m in episode.messages if m["role"] == "assistant"]
        answers.append("\n".join(written))
    states = [{"words_left": place} for place in range(len(episodes))]
    return {
        "completion": answers,
        "finish": finishes.tolist(),
        "final_reward": pa.array(final_rewards, pa.float32()),
        "messages": [json.dumps(episode.messages) for episode in episodes],
        "environment_state": [json.dumps(state) for state in states],
    }


def episode_samples(step: int, rows: Batch, *, full: bool = False) -> pa.Table:
    """The sample table of a Step that trained these episodes; full: as `--samples full` has it."""
    ids = rows.ragged("completion_ids")
    prompts = [json.dumps(json.loads(text)[:2]) for text in rows.array("messages").to_pylist()]
    rewards = np.linspace(0.0, 1.0, len(rows), dtype=np.float32)
    advantages = np.repeat(rewards - 0.5, rows.lengths("completion_ids")).astype(np.float32)
    shown = rows.select(_recorded_columns(rows, full=full))
    columns = {"prompt": pa.array(prompts), "reward": pa.array(rewards)}
    columns["advantage"] = _lists(ids.like(advantages))
    if full:
        columns["logprobs"] = _lists(ids.like(rows.ragged("sampler_logprobs").values - 0.1))
    return sample_table(step, {"train_policy": shown.with_columns(columns)})


def _recorded_columns(rows: Batch, *, full: bool) -> list[str]:
    names = [*Episode.shown, *(Episode.inside if full else ())]
    return [name for name in names if name in rows.names]


def _lists(numbers: Ragged) -> pa.Array:
    offsets = pa.array(numbers.offsets, pa.int64())
    return pa.LargeListArray.from_arrays(offsets, pa.array(numbers.values, pa.float32()))
