"""Samples with their texts: short for a list, one in full with its tokens.

Owns: their form in JSON. Does not own: which rows are shown (sample_index.py), the turns of an
episode (episode_rows.py), what a token id says (engine/watch/token_texts.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from engine.keep.reader.arrow_numbers import row_numbers
from engine.keep.reader.episode_rows import (
    COLUMNS,
    RecordedEpisode,
    has_turns,
    is_episode,
    token_turns,
)
from engine.keep.reader.open_folder import NotServed, OpenFolder, inside
from engine.keep.reader.sample_index import SAMPLES, opened_table

SHORT = 300
"""Characters of a text in a list."""
LONG = 200_000
"""Characters of a text in full."""
_LISTED = (
    *("step", "node", "position", "sample", "prompt", "completion", "reward", "length", "finish"),
    *("version", "advantage", "turns"),
)
_TOKENS = {
    "advantage": ("advantages",),
    "version": ("versions",),
    "mask": ("completion_mask",),
}
"""What is told of a token, and the columns that have it."""
SAMPLER, TRAINER, IDS = "sampler_logprobs", "trainer_logprobs", "completion_ids"
_TOKEN_COLUMNS = (
    *(IDS, "completion_mask", "versions", "advantages", SAMPLER, TRAINER),
    *("turn", "turn_end"),
)
_MOST_TOKENS = 50_000
PART = 2_000
"""Tokens of an episode that are sent together."""

Rows = Iterable[tuple[str, int]]


def short_rows(run: OpenFolder, places: Rows) -> list[dict[str, Any]]:
    """Rows as a list shows them, in this order."""
    return [_short(row) for row in _read(run, list(places), _LISTED)]


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: plain(row.get(name)) for name in _LISTED}
    for name in ("prompt", "completion"):
        shown[name] = as_text(row.get(name))[:SHORT]
    return shown


def _read(
    run: OpenFolder, places: list[tuple[str, int]], columns: Iterable[str] | None
) -> list[dict[str, Any]]:
    """Read these rows; every file is opened once, only these columns are read (None: all)."""
    rows_by_place: dict[tuple[str, int], dict[str, Any]] = {}
    with inside(run, SAMPLES) as folder:
        for name in dict.fromkeys(name for name, _ in places) if folder is not None else ():
            assert folder is not None
            with opened_table(folder, name) as file:
                stored_columns = file.schema_arrow.names
                if columns is not None:
                    wanted_columns = [c for c in columns if c in stored_columns]
                else:
                    wanted_columns = stored_columns
                table = file.read(columns=wanted_columns, use_threads=False)
                rows = [row for of, row in places if of == name and row < len(table)]
                taken = table.take(row_numbers(rows)).to_pylist()
            rows_by_place |= {(name, row): each for row, each in zip(rows, taken, strict=True)}
    return [rows_by_place[place] for place in places if place in rows_by_place]


def whole_row(
    run: OpenFolder, place: tuple[str, int], texts: Callable[[list[int]], list[str]] | None
) -> dict[str, Any]:
    """A row in full; of an episode its first messages and none of its tokens, for which one asks
    page by page. texts: what token ids say; None where no tokenizer is known. Raises NotServed
    where the row is there no more.
    """
    row = _read_row(run, place)
    shown = {name: plain(row.get(name)) for name in _LISTED}
    shown["prompt"] = prompt_of(row.get("prompt"))
    shown["completion"] = as_text(row.get("completion"))[:LONG]
    shown["rewards"] = {
        name.partition("/")[2]: plain(reward)
        for name, reward in row.items()
        if name.startswith("reward/")
    }
    if is_episode(row):
        episode = RecordedEpisode(row)
        shown["tokens"] = None
        shown["episode"] = episode.summary() | {"page": episode.page(0)}
        row = {name: recorded for name, recorded in row.items() if name not in COLUMNS}
    else:
        shown["tokens"] = _tokens(row, texts, 0, _MOST_TOKENS)
    known = {*_LISTED, *(c for columns in _TOKENS.values() for c in columns), SAMPLER, TRAINER}
    others = {n: v for n, v in row.items() if n not in known and not n.startswith("reward/")}
    shown["others"] = {
        n: shorten_for_json(v) for n, v in others.items() if n not in (IDS, "prompt_ids")
    }
    return shown


def _read_row(
    run: OpenFolder, place: tuple[str, int], columns: Iterable[str] | None = None
) -> dict[str, Any]:
    """One row, with all columns or with these."""
    rows = _read(run, [place], columns)
    if not rows:
        raise NotServed(f"{place[0]} has no row {place[1]} any more")
    return rows[0]


def conversation_page(run: OpenFolder, place: tuple[str, int], first: int) -> dict[str, Any]:
    """A page of an episode's messages. Raises NotServed for a row that is none."""
    row = _read_row(run, place, (*COLUMNS, "completion_mask", "versions"))
    if not is_episode(row):
        raise NotServed(f"row {place[1]} of {place[0]} is no episode")
    return RecordedEpisode(row).page(first)


def row_tokens(
    run: OpenFolder,
    place: tuple[str, int],
    texts: Callable[[list[int]], list[str]] | None,
    first: int,
    last: int,
) -> dict[str, Any]:
    """The tokens first..last of a row, the last one not included, and at most PART of them."""
    row = _read_row(run, place, _TOKEN_COLUMNS)
    tokens = _tokens(row, texts, first, min(last, first + PART)) or []
    if has_turns(row):
        for token, turn in zip(tokens, token_turns(row)[first:], strict=False):
            token["turn"] = turn
    return {"from": first, "total": len(row.get(IDS) or []), "tokens": tokens}


def _tokens(
    row: Mapping[str, Any], texts: Callable[[list[int]], list[str]] | None, first: int, last: int
) -> list[dict[str, Any]] | None:
    """What is known of the tokens first..last of the completion; None where its ids were not
    recorded.
    """
    ids = row.get(IDS)
    if not ids:
        return None
    ids = ids[:last]
    if texts is not None:
        words = texts(ids)
    else:
        words = [None] * len(ids)
    columns = {name: _column(row, names, len(ids)) for name, names in _TOKENS.items()}
    trainer, sampler = (_column(row, (name,), len(ids)) for name in (TRAINER, SAMPLER))
    tokens = []
    for at, (number, word) in enumerate(zip(ids, words, strict=True)):
        if at < first:  # a character may begin there
            continue
        token = {"id": number, "text": word}
        for name, column in columns.items():
            token[name] = plain(column[at])
        token["difference"] = _difference(trainer[at], sampler[at])
        tokens.append(token)
    return tokens


def _column(row: Mapping[str, Any], names: Iterable[str], count: int) -> list[Any]:
    values = next((row[name] for name in names if isinstance(row.get(name), list)), [])
    return [*values[:count], *([None] * (count - len(values)))]


def _difference(trainer: Any, sampler: Any) -> float | None:
    if trainer is not None and sampler is not None:
        return plain(trainer - sampler)
    return None


def prompt_of(prompt: Any) -> Any:
    """A prompt as text, or as messages; messages that were written as JSON are read again."""
    if not isinstance(prompt, str):
        return shorten_for_json(prompt)
    return _messages(prompt) or prompt[:LONG]


def _messages(text: str) -> list[Any] | None:
    """The messages that a text is the JSON of; None for any other text. A model may have written
    it: brackets a thousand deep, a number of any length, half a character are plain text, too.
    """
    if not text.startswith("[{") or len(text) >= LONG:
        return None
    try:
        read = json.loads(text)
        shown = shorten_for_json(read)
        msgspec.json.encode(shown)  # as the answer will be
    except (ValueError, RecursionError):
        return None
    has_roles = all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in read)
    if has_roles:
        return shown
    return None


def as_text(text_or_messages: Any) -> str:
    """A prompt or completion as one text."""
    prompt = prompt_of(text_or_messages)
    if isinstance(prompt, list):
        parts = [m if isinstance(m, dict) else {"content": m} for m in prompt]
        return "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" for m in parts)
    if prompt is None:
        return ""
    return str(prompt)


def plain(scalar: Any) -> Any:
    """A value for JSON: what is not finite is null."""
    if isinstance(scalar, float) and not math.isfinite(scalar):
        return None
    if isinstance(scalar, str | int | float | bool | None):
        return scalar
    return str(scalar)


def shorten_for_json(whole: Any, most: int = 64, text: int = 4000) -> Any:
    """Any value for JSON: long lists end in how many there are, long texts in how long they are."""
    if isinstance(whole, dict):
        return {
            str(k)[:200]: shorten_for_json(v, most, text) for k, v in list(whole.items())[:most]
        }
    if isinstance(whole, list | tuple):
        first_ones = [shorten_for_json(v, most, text) for v in whole[:most]]
        if len(whole) > most:
            return [*first_ones, f"... {len(whole)} in all"]
        return first_ones
    if isinstance(whole, bytes):
        return f"{len(whole)} bytes"
    if isinstance(whole, str) and len(whole) > text:
        return f"{whole[:text]}... ({len(whole)} characters)"
    return plain(whole)
