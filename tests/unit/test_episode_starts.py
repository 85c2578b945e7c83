"""First prompts of episodes: each row is shown what its own environment returned."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from dataflow.batch import Batch, Keys
from dataflow.schema import MESSAGE, Prompt
from operators.kernels.environments.replies import EnvironmentReply
from operators.kernels.episode_prompts import PromptRows
from operators.kernels.episode_starts import EpisodeStarts, PromptRoom
from operators.kernels.overlong import Room
from operators.kernels.turn_rendering import TurnRenderer
from tests.kit.chat_templates import family_tokenizer
from tests.kit.environment_pools import opened_here
from tests.kit.kernels import FakeSession


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ROOM = PromptRoom(
    node="node",
    model="policy",
    vocabulary=1 << 20,
    room=Room(node="node", most=None, why="", policy="error"),
    require_fit=lambda keys, prompts: None,
)


def test_rows_of_one_prompt_are_shown_their_own_tools_and_texts() -> None:
    tokenizer = family_tokenizer("qwen2")
    talk = [[{"role": "user", "content": "2+2?"}]]
    prompts = PromptRows(
        Batch.make(Keys.of([0]), {"prompt": pa.array(talk, pa.list_(MESSAGE))}, Prompt)
    )
    replies: list[EnvironmentReply] = []
    for number, (name, text) in enumerate([("add", None), ("sub", None), ("add", " Now.")]):
        tools = [tool(name)]
        reply = EnvironmentReply(episode=number, call="reset", tools=tools, text=text)
        replies.append(reply)
    with opened_here() as pool:
        starts_of_node = EpisodeStarts(pool, TurnRenderer(tokenizer), FakeSession(), ROOM)
        starts, faults = starts_of_node.render(replies, prompts, [0, 0, 0])
    assert not faults
    shown = [tokenizer.inner.decode(starts[number].ids.tolist()) for number in range(3)]
    names = [['"name": "add"' in text, '"name": "sub"' in text] for text in shown]
    assert names == [[True, False], [False, True], [True, False]]
    assert ["2+2? Now." in text for text in shown] == [False, False, True]
    assert [start.number for start in starts.values()] == [0, 1, 2]
