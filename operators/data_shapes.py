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
        raise DataError(_no_prompt(name, columns))
    if not is_prompt(columns["prompt"]):
        raise DataError(
            f"{name}: expected a column {_PROMPT}, found prompt: {columns['prompt']}. "
            'Fix: a string, or [{"role": "user", "content": "..."}].'
        )
    return "verl" if "reward_model" in columns and "data_source" in columns else "trl"


def demonstration_shape(name: str, columns: Mapping[str, pa.DataType]) -> Shape:
    """The shape of demonstrations: `prompt` with `completion`, or `messages`, or `text`."""
    if "prompt" in columns and "completion" in columns:
        if is_token_ids(columns["prompt"]) or is_token_ids(columns["completion"]):
            raise DataError(
                f"{name}: expected prompt and completion as text or as messages, found token ids."
                " Fix: the text; it is tokenised for the Model that is trained on it."
            )
        answer = columns["completion"]
        if not (is_text(answer) or is_chat(answer) or pa.types.is_null(answer)):
            raise DataError(
                f"{name}: expected a column 'completion' (text, or a list of messages with role and"
                f" content), found completion: {answer}. Fix: a string."
            )
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
        f" {listed(columns)}. Fix: {fix}."
    )


def preference_shape(name: str, columns: Mapping[str, pa.DataType]) -> Shape:
    """The shape of preferences: `chosen` and `rejected`, with or without their `prompt`.

    Raises DataError if one of them is missing, or if they are not all text or all messages.
    """
    for wanted in ("chosen", "rejected"):
        if wanted not in columns:
            near = nearest(wanted, columns)
            fix = f"rename {near!r} to {wanted!r}" if near else f"a column {wanted!r}"
            raise DataError(
                f"{name}: expected columns 'chosen' and 'rejected', and 'prompt' unless both begin"
                f" with it, found columns: {listed(columns)}. Fix: {fix}."
            )
    kinds = {n: columns[n] for n in ("prompt", "chosen", "rejected") if n in columns}
    if not (all(map(is_text, kinds.values())) or all(map(is_chat, kinds.values()))):
        shown = ", ".join(f"{n}: {kind}" for n, kind in kinds.items())
        raise DataError(
            f"{name}: expected {', '.join(kinds)} all as text or all as messages (role and"
            f" content), found {shown}. Fix: one form for all of them."
        )
    return "pairs" if "prompt" in columns else "implicit"


def is_prompt(kind: pa.DataType) -> bool:
    """Whether a column of this type can be a prompt: text, a list of messages, or token ids."""
    return is_text(kind) or is_chat(kind) or is_token_ids(kind)


def _no_prompt(name: str, columns: Mapping[str, pa.DataType]) -> str:
    near = nearest("prompt", columns) or next((c for c in _OTHER_NAMES if c in columns), None)
    fix = f"rename {near!r} to 'prompt'" if near else "a column 'prompt'"
    if {"instruction", "input"} <= set(columns):
        fix = "write 'instruction', and 'input' below it, as 'prompt'"
    elif near and name.startswith("hf:"):
        fix = f"prompt={near} among the settings of {name}"
    return f"{name}: expected a column {_PROMPT}, found columns: {listed(columns)}. Fix: {fix}."


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type has texts."""
    return (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def is_chat(kind: pa.DataType) -> bool:
    """Whether a column of this type has lists of messages with role and content."""
    return is_conversations(kind) and _is_content(kind.value_type.field("content").type)  # type: ignore[attr-defined]


def _is_content(kind: Any) -> bool:
    """Text, or none in any of the messages."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return is_text(plain) or pa.types.is_null(plain)


def listed(columns: Iterable[str]) -> str:
    """Names with commas, or `none`."""
    return ", ".join(columns) or "none"
