"""What one reward function receives of the rows, as Arrow.

Owns: which columns a function gets, and which entries of an environment's state; the errors for
names that nothing has. Does not own: the keywords that are made of them (scoring_keywords.py), the
functions' signatures (operators/rewards.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from dataflow.batch import Batch
from dataflow.errors import KernelError, nearest
from dataflow.prompt_types import is_messages, is_token_ids
from dataflow.schema import Episode
from operators.kernels.scoring_keywords import CONVERSATIONAL, ENTRIES
from operators.rewards import EPISODE_COLUMNS, PASSED, Wants

_COLUMN_OF = {"prompts": "prompt", "completions": "completion"}
_ENGINES = frozenset(Episode.columns) | {"prompt"}
"""Columns that do not come from the dataset: a function gets one only if it names it."""
_HIDDEN = frozenset(PASSED) - _ENGINES
"""Names under which a function gets something else than a column of that name, which can only be
the dataset's (the check warns of it, dataflow/rules/hidden_columns.py).
"""
_HIDDEN_BY_EPISODES = frozenset(EPISODE_COLUMNS) - _ENGINES
_LOGS = frozenset({"log_metric", "log_extra"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One of the user's functions."""

    name: str
    asked: Wants
    weight: float


def columns_for(function: Function, rows: Batch) -> pa.RecordBatch:
    """Select what one function receives: completions, and the other columns that its signature
    takes.

    Raises KernelError if a required column is missing.
    """
    rows = _with_readable_prompts(rows)
    _require_columns(function, rows.names)
    names = [n for n in rows.names if n == "completion" or _is_taken(n, function.asked)]
    records = rows.records.select(names)
    if _has_conversations(rows):
        return records.replace_schema_metadata({CONVERSATIONAL: b"1"})
    return records.replace_schema_metadata(None)


def episode_columns_for(function: Function, rows: Batch, entry_names: set[str]) -> pa.RecordBatch:
    """Select what one function receives of episodes: those columns, what its further keywords are
    made of, and which entries of the environments' states it takes.

    entry_names: of the entries of all rows so far; those of these rows are added. Raises
    KernelError if a required name is no column, and no entry of any row so far.
    """
    rows = _with_readable_prompts(rows)
    entries = _choose_entries(function, rows, entry_names)
    columns = _episode_columns(function.asked, entries, conversational=_has_conversations(rows))
    names: list[str] = []
    for name in rows.names:
        is_of_dataset = name not in _ENGINES and name not in _HIDDEN_BY_EPISODES
        if name in columns or (is_of_dataset and _is_taken(name, function.asked)):
            names.append(name)
    metadata = {ENTRIES: json.dumps(entries).encode()}
    if _has_conversations(rows):
        metadata[CONVERSATIONAL] = b"1"
    return rows.records.select(names).replace_schema_metadata(metadata)


def _episode_columns(
    asked: Wants, entries: Sequence[str], *, conversational: bool
) -> frozenset[str]:
    """The columns of the engine that a function's keywords are made of."""
    columns = {"completion"}
    columns.update(name for name in asked.names if name in _ENGINES)
    columns.update(column for name, column in EPISODE_COLUMNS.items() if name in asked.names)
    if asked.takes("completion_ids"):
        columns.add("completion_ids")
    if asked.takes("prompts"):
        columns.add("prompt")
    if entries or asked.takes("environments"):
        columns.add("environment_state")
    if conversational and (asked.takes("prompts") or asked.takes("completions")):
        # The prompt's messages tell where the completion may begin in the conversation.
        columns.update(("prompt", "messages"))
    return frozenset(columns)


def _choose_entries(function: Function, rows: Batch, entry_names: set[str]) -> list[str]:
    """The parameters that are entries of the state. Raises KernelError for a required one that is
    none, and no column.
    """
    asked = function.asked
    no_columns: list[str] = []
    for name in asked.names:
        is_of_engine = name in PASSED or name in EPISODE_COLUMNS
        if not is_of_engine and name not in rows.names:
            no_columns.append(name)
    if no_columns:
        entry_names.update(_list_entry_names(rows))
    for name in no_columns:
        if name in asked.required and name not in entry_names:
            raise _missing_entry(function, name, rows.names, entry_names)
    return [name for name in no_columns if name in entry_names]


def _list_entry_names(rows: Batch) -> set[str]:
    names: set[str] = set()
    for text in rows.array("environment_state").to_pylist():
        names.update(json.loads(text))
    return names


def _missing_entry(
    function: Function, name: str, columns: Iterable[str], entry_names: Iterable[str]
) -> KernelError:
    data_columns = [column for column in columns if column not in _ENGINES]
    entries = sorted(entry_names)
    near = nearest(name, [*data_columns, *entries])
    fix = f"an environment whose state has {name!r}"
    if near:
        fix = repr(near)
    return KernelError(
        f"reward {function.name!r}: wants {name!r}, data has:"
        f" {', '.join(data_columns) or 'no other columns'}; the environment's state has:"
        f" {', '.join(entries) or 'nothing'}. Fix: {fix}, or a default for this parameter."
    )


def _has_conversations(rows: Batch) -> bool:
    prompt_type = _prompt_type(rows)
    return prompt_type is not None and is_messages(prompt_type)


def _prompt_type(rows: Batch) -> pa.DataType | None:
    if "prompt" not in rows.names:
        return None
    return rows.records.schema.field("prompt").type


def _with_readable_prompts(rows: Batch) -> Batch:
    """The rows with their prompts as text or messages, however they were given to the model."""
    if "prompt_text" not in rows.names:
        return rows
    prompt_type = _prompt_type(rows)
    if prompt_type is not None and not is_token_ids(prompt_type):
        # prompt_text is a column of the dataset that happens to have that name.
        return rows
    others = [name for name in rows.names if name not in ("prompt", "prompt_text")]
    return rows.select(others).with_columns({"prompt": rows.array("prompt_text")})


def _require_columns(function: Function, names: Sequence[str]) -> None:
    for keyword in function.asked.required - _LOGS:
        if _COLUMN_OF.get(keyword, keyword) not in names:
            data_columns = [name for name in names if name not in _ENGINES]
            shown_columns = ", ".join(data_columns) or "no other columns"
            fix = f"a column {keyword!r} in the data, or a default for this parameter"
            if keyword in EPISODE_COLUMNS:
                fix = f"rows of interact(...), which have {keyword!r}, or {fix}"
            raise KernelError(
                f"reward {function.name!r}: wants {keyword!r}, data has: {shown_columns}."
                f" Fix: {fix}."
            )


def _is_taken(column: str, asked: Wants) -> bool:
    if column in _HIDDEN:
        return False
    keyword = "prompts" if column == "prompt" else column
    if keyword in asked.names:
        return True
    return asked.everything and (keyword in PASSED or column not in _ENGINES)
