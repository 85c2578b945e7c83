"""Columns as the keywords of TRL's signature: plain Python lists with an entry for each row.

Owns: what each keyword is made of. Does not own: which columns a function gets
(scoring_columns.py), the call (scoring_child.py). Runs in the function's own process.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from dataflow.prompt_types import Message, with_json_values
from operators.rewards import EPISODE_COLUMNS, Wants

CONVERSATIONAL = b"conversational"
"""Schema metadata: prompts are message lists, so completions become message lists, too."""

STEPS = b"steps"
"""Schema metadata: the column `steps` has each completion's steps, and each wants a number."""

ENTRIES = b"entries"
"""Schema metadata: the rows are episodes; a JSON list of the entries of the environment's state
that are passed by their own names.
"""

_ONLY_BY_NAME = frozenset(EPISODE_COLUMNS) - {"environments"}
"""Of episodes: a function gets these if it names them, not for its **kwargs."""


def keywords_for(asked: Wants, records: pa.RecordBatch) -> dict[str, Any]:
    """The keywords of one call: of all that the columns make, those that the function takes."""
    keywords: dict[str, Any] = {}
    has_episodes = ENTRIES in (records.schema.metadata or {})
    for name, column in as_keywords(records).items():
        by_name = has_episodes and name in _ONLY_BY_NAME
        if name in asked.names or (asked.everything and not by_name):
            keywords[name] = column
    return keywords


def as_keywords(records: pa.RecordBatch) -> dict[str, Any]:
    """The columns as TRL passes them to a function: plain Python lists, by keyword."""
    keywords: dict[str, Any] = {}
    for name, column in zip(records.column_names, records.columns, strict=True):
        keyword = {"prompt": "prompts", "completion": "completions"}.get(name)
        keywords[keyword or name] = _as_list(name, column)
    metadata = records.schema.metadata or {}
    is_conversational = CONVERSATIONAL in metadata
    if ENTRIES in metadata:
        entries = json.loads(metadata[ENTRIES])
        return _as_episodes(keywords, entries, conversational=is_conversational)
    if is_conversational:
        texts = keywords["completions"]
        keywords["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
    return keywords


def _as_list(name: str, column: pa.Array) -> list[Any]:
    if name != "completion_ids":
        return with_json_values(column)
    offsets = column.offsets.to_pylist()
    ids = column.values.to_numpy().tolist()
    return [ids[start:end] for start, end in itertools.pairwise(offsets)]


def _as_episodes(
    columns: Mapping[str, Any], entries: Sequence[str], *, conversational: bool
) -> dict[str, Any]:
    """The keywords of episodes. entries: names of the state's entries that are passed by name."""
    keywords = dict(columns)
    if "turn_reward" in columns:
        keywords["turn_rewards"] = keywords.pop("turn_reward")
    if "environment_state" in columns:
        states = [json.loads(text) for text in columns["environment_state"]]
        keywords["environment_state"] = states
        keywords["environments"] = [_as_object(state) for state in states]
        for name in entries:
            keywords[name] = [state.get(name) for state in states]
    if "messages" in columns:
        keywords["messages"] = [json.loads(text) for text in columns["messages"]]
        if conversational:
            conversations = zip(columns["prompts"], keywords["messages"], strict=True)
            parts = [cut_conversation(messages, len(prompt)) for prompt, messages in conversations]
            keywords["prompts"] = [prompt for prompt, _ in parts]
            keywords["completions"] = [completion for _, completion in parts]
    return keywords


def _as_object(state: Mapping[str, Any]) -> SimpleNamespace:
    """An object with the entries of an environment's state as attributes."""
    environment = SimpleNamespace()
    vars(environment).update(state)
    return environment


def cut_conversation(
    messages: Sequence[Message], prompt: int
) -> tuple[list[Message], list[Message]]:
    """Cut a conversation at the model's first turn. prompt: how many messages the data's prompt
    has, in which the assistant may have said something; `reset` may have added others behind.
    """
    start = len(messages)
    for index in range(prompt, len(messages)):
        if messages[index]["role"] == "assistant":
            start = index
            break
    return list(messages[:start]), list(messages[start:])
