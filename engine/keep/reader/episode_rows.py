"""Recorded episodes: a conversation by turns, with what each turn took and brought.

Owns: which tokens, rewards, seconds and versions belong to which message, and pages of messages in
JSON. Does not own: reading a row (sample_rows.py), what messages say (dataflow/conversation.py).

The turns of a row are its last messages by the assistant, as many as it has ends of turns: those
before them stood in the prompt. What stands behind a turn answers it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflow.conversation import SaidCall, SaidMessage, read_conversation
from engine.keep.metrics.metric_lines import finite

PAGE = 40
"""Messages of a page."""
_TEXT = 20_000
"""Characters of a text that are sent."""
COLUMNS = (
    *("messages", "turns", "turn", "turn_end", "turn_reward", "final_reward"),
    *("environment_state", "model_seconds", "environment_seconds", "episode", "segment"),
)
"""What only episodes have in samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """Places of completion tokens: the model wrote begin..end, its environment end..until."""

    begin: int
    end: int
    until: int


class RecordedEpisode:
    """One row of samples, for which `is_episode` holds."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row
        self._ends: list[int] = row["turn_end"]
        self.messages = read_conversation(row["messages"]) or []
        self._turns = _turns_of(self.messages, len(self._ends))
        self._tokens = turn_tokens(row)

    def summary(self) -> dict[str, Any]:
        """What is told of the episode as a whole."""
        written = sum(each.end - each.begin for each in self._tokens)
        return {
            "turns": len(self._ends),
            "segment": self._row.get("segment"),
            "messages": len(self.messages),
            "final_reward": finite(self._row.get("final_reward")),
            "turn_reward": _sum(self._row.get("turn_reward")),
            "model_seconds": _sum(self._row.get("model_seconds")),
            "environment_seconds": _sum(self._row.get("environment_seconds")),
            "written": written,
            "state": _shorten(_as_text(self._row.get("environment_state"))),
        }

    def page(self, first: int) -> dict[str, Any]:
        """At most PAGE messages from this one on."""
        last = min(len(self.messages), first + PAGE)
        messages = list(map(self._message, range(first, last)))
        return {"from": first, "total": len(self.messages), "messages": messages}

    def _message(self, number: int) -> dict[str, Any]:
        message = self.messages[number]
        described = {
            "number": number,
            "role": message.role[:40],
            "name": message.name[:200],
            "text": _shorten(message.text),
            "reasoning": _shorten(message.reasoning),
            "calls": [_call(call) for call in message.calls],
            "errors": [_shorten(error) for error in message.errors],
        }
        return described | self._turn_of(number)

    def _turn_of(self, number: int) -> dict[str, Any]:
        """What is known of a message's turn: of one that the model wrote all, of the first one that
        answers it the tokens of the answer.
        """
        turn = self._turns.get(number)
        if turn is not None:
            return self._measured(turn)
        before = self._turns.get(number - 1)
        if before is None:
            return {}
        tokens = self._tokens[before]
        return {"answers": before, "from": tokens.end, "to": tokens.until}

    def _measured(self, turn: int) -> dict[str, Any]:
        tokens = self._tokens[turn]
        measured: dict[str, Any] = {"turn": turn, "from": tokens.begin, "to": tokens.end}
        row_versions = self._row.get("versions") or []
        versions = row_versions[tokens.begin : tokens.end]
        if versions:
            measured["versions"] = [min(versions), max(versions)]
        for name in ("turn_reward", "model_seconds", "environment_seconds"):
            measured[name] = finite(_entry(self._row.get(name), turn))
        return measured


def is_episode(row: Mapping[str, Any]) -> bool:
    """Whether a recorded row is an episode with its messages."""
    return has_turns(row) and isinstance(row.get("messages"), str)


def has_turns(row: Mapping[str, Any]) -> bool:
    """Whether a recorded row says where its turns end."""
    ends = row.get("turn_end")
    return isinstance(ends, list) and all(isinstance(end, int) for end in ends)


def turn_tokens(row: Mapping[str, Any]) -> list[TurnTokens]:
    """Which tokens each turn of a row has. What the model wrote in it begins behind the answer to
    the turn before, which is where the mask is 0.
    """
    ends: Sequence[int] = row["turn_end"]
    mask = np.array(row.get("completion_mask") or [], np.uint8)
    begins: list[int] = []
    for before, end in zip([0, *ends], ends, strict=False):
        written = np.flatnonzero(mask[before:end])
        if len(written):
            begins.append(before + int(written[0]))
        else:
            begins.append(before)
    tokens: list[TurnTokens] = []
    for begin, end, until in zip(begins, ends, [*begins, len(mask)][1:], strict=True):
        tokens.append(TurnTokens(begin=begin, end=end, until=max(end, until)))
    return tokens


def token_turns(row: Mapping[str, Any]) -> list[int]:
    """The turn of each completion token of an episode, whether or not it was recorded."""
    recorded = row.get("turn")
    if isinstance(recorded, list):
        return recorded
    turns: list[int] = []
    for turn, tokens in enumerate(turn_tokens(row)):
        turns += [turn] * (tokens.until - len(turns))
    return turns


def _turns_of(messages: Sequence[SaidMessage], turns: int) -> dict[int, int]:
    """Message -> its turn, for those that the model wrote."""
    written: list[int] = []
    for number, message in enumerate(messages):
        if message.role == "assistant":
            written.append(number)
    first_one = max(0, len(written) - turns)
    last_ones = written[first_one:]
    first_turn = turns - len(last_ones)
    turn_of: dict[int, int] = {}
    for turn, number in enumerate(last_ones, start=first_turn):
        turn_of[number] = turn
    return turn_of


def _call(call: SaidCall) -> dict[str, Any]:
    arguments = [[name[:200], _shorten(text)] for name, text in call.arguments[:64]]
    return {"name": call.name[:200], "arguments": arguments}


def _shorten(text: str) -> str:
    if len(text) <= _TEXT:
        return text
    return f"{text[:_TEXT]}... ({len(text)} characters)"


def _as_text(text: Any) -> str:
    if isinstance(text, str):
        return text
    return ""


def _entry(numbers: Any, place: int) -> Any:
    if isinstance(numbers, list) and place < len(numbers):
        return numbers[place]
    return None


def _sum(numbers: Any) -> float | None:
    """The sum of what a list has; None where it has nothing."""
    if not isinstance(numbers, list):
        return None
    known = [number for number in numbers if number is not None]
    if not known:
        return None
    return finite(sum(known))
