"""The shapes of users' data, told apart by their columns: TRL's, verl's, pairs, conversations.

Owns: which columns make prompts, demonstrations or preferences, and what is said if they are not
there. Does not own: reading (data_files.py), ShareGPT's messages (data_messages.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import pyarrow as pa

from dataflow.errors import DataError, nearest
from dataflow.prompt_types import is_conversations, is_token_ids

Shape = Literal["trl", "verl", "messages", "text", "pairs", "implicit"]
"""trl: `prompt` and dataset columns; verl: also `data_source` and `reward_model`; pairs: `prompt`,
`chosen` and `rejected`; implicit: whole `chosen` and `rejected`; others: no prompt.
"""

_OTHER_NAMES = ("question", "problem", "instruction", "query", "input", "text")
_PROMPT = "'prompt' (text, a list of messages with role and content, or token ids)"


def prompt_shape(name: str, columns: Mapping[str, pa.DataType]) -> Shape:
    """The shape of a source of prompts. Raises DataError, naming the columns, if there is none."""
    if "prompt" not in columns:
        raise DataError(_describe_no_prompt(name, columns))
    if not is_prompt(columns["prompt"]):
        raise DataError(
            f"{name}: expected a column {_PROMPT}, found prompt: {columns['prompt']}. "
            'Fix: a string, or [{"role": "user", "content": "..."}].'
        )
    if "reward_model" in columns and "data_source" in columns:
        return "verl"
    return "trl"


def demonstration_shape(name: str, columns: Mapping[str, pa.DataType]) -> Shape:
    """The shape of demonstrations: `prompt` with `completion`, or `messages`, or `text`."""
    if "prompt" in columns and "completion" in columns:
        _require_completion(name, columns)
        return prompt_shape(name, columns)
    if "messages" in columns and is_chat(columns["messages"]):
        return "messages"
    if "text" in columns and is_text(columns["text"]):
        return "text"
    fix = "rename the columns that hold the task and its answer to 'prompt' and 'completion'"
    if {"instruction", "output"} <= set(columns):
        fix = (
            "Alpaca's columns have no template of their own: write 'instruction' (and 'input' below"
            " it) as 'prompt', and rename 'output' to 'completion'"
        )
    raise DataError(
        f"{name}: expected columns 'prompt' and 'completion', or 'messages', or 'text', found:"
        f" {list_names(columns)}. Fix: {fix}."
    )


def _require_completion(name: str, columns: Mapping[str, pa.DataType]) -> None:
    """Raise DataError unless a completion, and the prompt beside it, can be tokenised."""
    if is_token_ids(columns["prompt"]) or is_token_ids(columns["completion"]):
        raise DataError(
            f"{name}: expected prompt and completion as text or as messages, found token ids."
            " Fix: the text; it is tokenised for the Model that is trained on it."
        )
    kind = columns["completion"]
    if not (is_text(kind) or is_chat(kind) or pa.types.is_null(kind)):
        raise DataError(
            f"{name}: expected a column 'completion' (text, or a list of messages with role and"
            f" content), found completion: {kind}. Fix: a string."
        )


def preference_shape(name: str, columns: Mapping[str, pa.DataType]) -> Shape:
    """The shape of preferences: `chosen` and `rejected`, with or without their `prompt`.

    Raises DataError if one of them is missing, or if they are not all text or all messages.
    """
    for column in ("chosen", "rejected"):
        if column not in columns:
            near = nearest(column, columns)
            fix = f"rename {near!r} to {column!r}" if near else f"a column {column!r}"
            raise DataError(
                f"{name}: expected columns 'chosen' and 'rejected', and 'prompt' unless both begin"
                f" with it, found columns: {list_names(columns)}. Fix: {fix}."
            )
    kinds = {n: columns[n] for n in ("prompt", "chosen", "rejected") if n in columns}
    are_texts = all(map(is_text, kinds.values()))
    are_chats = all(map(is_chat, kinds.values()))
    if not (are_texts or are_chats):
        kinds_text = ", ".join(f"{column}: {kind}" for column, kind in kinds.items())
        raise DataError(
            f"{name}: expected {', '.join(kinds)} all as text or all as messages (role and"
            f" content), found {kinds_text}. Fix: one form for all of them."
        )
    return "pairs" if "prompt" in columns else "implicit"


def is_prompt(kind: pa.DataType) -> bool:
    """Whether a column of this type can be a prompt: text, a list of messages, or token ids."""
    return is_text(kind) or is_chat(kind) or is_token_ids(kind)


def _describe_no_prompt(name: str, columns: Mapping[str, pa.DataType]) -> str:
    other_names = (column for column in _OTHER_NAMES if column in columns)
    near = nearest("prompt", columns) or next(other_names, None)
    if {"instruction", "input"} <= set(columns):
        fix = "write 'instruction', and 'input' below it, as 'prompt'"
    elif near and name.startswith("hf:"):
        fix = f"prompt={near} among the settings of {name}"
    elif near:
        fix = f"rename {near!r} to 'prompt'"
    else:
        fix = "a column 'prompt'"
    return f"{name}: expected a column {_PROMPT}, found columns: {list_names(columns)}. Fix: {fix}."


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type has texts."""
    return (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def is_chat(kind: pa.DataType) -> bool:
    """Whether a column of this type has lists of messages with role and content."""
    if not is_conversations(kind):
        return False
    content = kind.value_type.field("content")  # type: ignore[attr-defined]
    return _is_content(content.type)


def _is_content(kind: Any) -> bool:
    """Text, or none in any of the messages."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return is_text(kind) or pa.types.is_null(kind)


def list_names(columns: Iterable[str]) -> str:
    """Join names with commas; `none` without any."""
    return ", ".join(columns) or "none"
