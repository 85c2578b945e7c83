"""Episodes as rows: written by hand, and an operator that makes some of rollouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Keys, Ragged
from dataflow.kernel import Chunk
from dataflow.schema import Episode, Rollout
from dataflow.user import Columns, operator
from tests.kit.rows import ragged


@dataclass(frozen=True, kw_only=True)
class WrittenTurn:
    """What a turn wrote, what it was answered (of the last turn nothing), and its reward."""

    written: Sequence[int]
    answer: Sequence[int] = ()
    reward: float | None = None


def make_episodes(
    episodes: Sequence[Sequence[WrittenTurn]],
    *,
    final: Sequence[float | None] | None = None,
    keys: Keys | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    **columns: Any,
) -> Batch:
    """These episodes, with a log-prob and a version that tell each token apart. columns: further
    or replaced ones.
    """
    ids: list[list[int]] = []
    masks: list[list[int]] = []
    turns: list[list[int]] = []
    ends: list[list[int]] = []
    for episode in episodes:
        for row in (ids, masks, turns, ends):
            row.append([])
        for number, turn in enumerate(episode):
            ids[-1] += [*turn.written, *turn.answer]
            masks[-1] += [1] * len(turn.written) + [0] * len(turn.answer)
            turns[-1] += [number] * (len(turn.written) + len(turn.answer))
            ends[-1].append(len(ids[-1]) - len(turn.answer))
    count = len(episodes)
    completion_ids = ragged(ids)
    place = np.arange(len(completion_ids.values))
    rewards = [[turn.reward for turn in episode] for episode in episodes]
    usual_columns: dict[str, Any] = {
        "prompt_ids": ragged(prompts or [[1, 2]] * count),
        "completion_ids": completion_ids,
        "completion_mask": ragged(masks, np.uint8),
        "sampler_logprobs": completion_ids.like(-place.astype(np.float32)),
        "version": completion_ids.like(place.astype(np.int32)),
        "finish": ["stop"] * count,
        "turn": ragged(turns, np.uint16),
        "turn_end": ragged(ends),
        "turn_reward": pa.array(rewards, pa.large_list(pa.float32())),
        "final_reward": pa.array(final or [None] * count, pa.float32()),
        "completion": [f"text {row}" for row in range(count)],
        "messages": ["[]"] * count,
        "environment_state": ["{}"] * count,
    }
    return Batch.make(keys or Keys.of(range(count)), usual_columns | columns, Episode)


def episode_chunk(rows: Batch, name: str = "episode") -> Chunk:
    """A chunk of these episodes."""
    return Chunk(id=1, step=3, keys=rows.keys, inputs={name: rows})


def columns_of(rows: Batch) -> Columns[Episode]:
    """What a function on columns gets."""
    return Columns(rows, Episode)


@operator()
def as_episodes(rollout: Columns[Rollout]) -> Columns[Episode]:
    """Answers of more than three tokens have two turns, the third token being the answer to the
    first; others have one. A turn's reward is 1, and the state has the row's length.
    """
    ids = rollout["completion_ids"]
    mask, turn = np.ones(len(ids.values), np.uint8), np.zeros(len(ids.values), np.uint16)
    ends: list[list[int]] = []
    for start, length in zip(ids.offsets[:-1].tolist(), ids.lengths.tolist(), strict=True):
        is_long = length > 3
        ends.append([2, length] if is_long else [length])
        if is_long:
            mask[start + 2] = 0
            turn[start + 3 : start + length] = 1
    logprobs: Ragged = rollout["sampler_logprobs"]
    seconds = pa.array([[0.0] * len(row) for row in ends], pa.large_list(pa.float32()))
    states = [json.dumps({"length": length}) for length in ids.lengths.tolist()]
    messages = [json.dumps([{"role": "assistant", "content": "a"} for _ in row]) for row in ends]
    return Columns.make(
        Episode,
        like=rollout,
        prompt_ids=rollout["prompt_ids"],
        completion_ids=ids,
        completion=rollout.batch.array("completion"),
        version=rollout["version"],
        finish=rollout.batch.array("finish"),
        completion_mask=ids.like(mask),
        sampler_logprobs=logprobs.like(np.where(mask > 0, logprobs.values, np.float32(0.0))),
        turn=ids.like(turn),
        turn_end=ragged(ends),
        turn_reward=pa.array([[1.0] * len(row) for row in ends], pa.large_list(pa.float32())),
        model_seconds=seconds,
        environment_seconds=seconds,
        final_reward=pa.array([None] * len(ends), pa.float32()),
        messages=messages,
        environment_state=states,
    )
