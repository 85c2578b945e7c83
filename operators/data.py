"""Sources: prompts to answer, demonstrations to imitate, and preferences.

Owns: the declarations. Does not own: file formats (data_files.py), reading and tokenizing
(kernels/data.py).
"""

from __future__ import annotations

from typing import Literal

from dataflow.limits import choice, flag, text, whole
from dataflow.node import Node, Port
from dataflow.operator import Fresh, Operator, declares
from dataflow.schema import Completion, Preference, Prompt

_DATA = "every position of the run is a row of this data"
_SHUFFLE = "it says which row is at which position of the run"
_FIXED = {"data": _DATA, "shuffle": _SHUFFLE}
"""Where a run is in its data is a position."""

PROMPTS = Operator(
    path="operators.data:PROMPTS",
    name="prompts",
    work="source",
    rows=Fresh(),
    outputs=(Prompt,),
    kernels={"host": "operators.kernels.data:Prompts"},
    limits={
        "data": text(like="train.parquet"),
        "batch": whole(1, like=64, optional=True),
        "shuffle": flag(),
        "split": text(like="train", optional=True),
    },
    fixed={**_FIXED, "split": _DATA},
    data_columns="operators.data_files:prompt_columns",
    data_overlap="operators.data_sources:overlap",
    data_rows="operators.data_sources:row_count",
    data_longest="operators.data_lengths:longest_prompt",
    data_tokens="operators.kernels.token_counts:count_prompts",
    data_files="operators.data_files:source_files",
)

DEMONSTRATIONS = Operator(
    path="operators.data:DEMONSTRATIONS",
    name="demonstrations",
    work="source",
    rows=Fresh(),
    outputs=(Completion,),
    kernels={"host": "operators.kernels.data:Demonstrations"},
    limits={
        "data": text(like="train.parquet"),
        "batch": whole(1, like=128),
        "assistant_only": flag(),
        "overlong": choice("error", "drop", "truncate"),
        "shuffle": flag(),
    },
    fixed=_FIXED,
    data_columns="operators.data_files:demonstration_columns",
    data_overlap="operators.data_sources:overlap",
    data_rows="operators.data_sources:row_count",
    data_tokens="operators.kernels.token_counts:count_demonstrations",
    data_files="operators.data_files:source_files",
)

PREFERENCES = Operator(
    path="operators.data:PREFERENCES",
    name="preferences",
    work="source",
    rows=Fresh(per=2),
    outputs=(Completion, Preference),
    kernels={"host": "operators.kernels.preferences:Preferences"},
    keeps="pairs",
    limits={
        "data": text(like="train.parquet"),
        "batch": whole(1, like=64),
        "overlong": choice("error", "drop", "truncate"),
        "shuffle": flag(),
    },
    fixed=_FIXED,
    data_columns="operators.data_files:preference_columns",
    data_optional=("prompt",),
    data_overlap="operators.data_sources:overlap",
    data_rows="operators.data_sources:row_count",
    data_tokens="operators.kernels.token_counts:count_preferences",
    data_files="operators.data_files:source_files",
)


@declares
def prompts(
    data: str,
    *,
    batch: int | None = None,
    shuffle: bool = True,
    split: str | None = None,
    name: str = "prompts",
) -> Port[Prompt]:
    """Prompts from a Parquet, JSONL or CSV file or folder (TRL or verl columns), from a
    `reasoning_gym:` task, or from a data set of the hub (`hf:openai/gsm8k?name=main`).

    batch: prompts per Step; None makes the source finite, for evaluation only. shuffle: a new
    order in each epoch of the data. split: keep rows whose column `split` (verl:
    `extra_info.split`) has this value; of the hub, a split as `datasets` reads it
    (`train[:100]`).
    """
    return Node(
        PROMPTS, name, params={"data": data, "batch": batch, "shuffle": shuffle, "split": split}
    ).port()


@declares
def demonstrations(
    data: str,
    *,
    batch: int,
    assistant_only: bool = True,
    overlong: Literal["error", "drop", "truncate"] = "error",
    shuffle: bool = True,
    name: str = "demonstrations",
) -> Port[Completion]:
    """Prompts with their answers (`prompt` and `completion`, or `messages`), tokenized for the
    Model trained on them.

    batch: rows per Step. assistant_only: mask 1 only on what the assistant wrote. overlong: what
    happens to a row with more tokens than the positions of a Model that reads it: `error` ends the
    run, `drop` drops the row and admits another, `truncate` keeps its first tokens, and drops it if
    they include none of its completion. The metric prompt/overlong counts such rows.
    """
    params = {
        "data": data,
        "batch": batch,
        "assistant_only": assistant_only,
        "overlong": overlong,
        "shuffle": shuffle,
    }
    return Node(DEMONSTRATIONS, name, params=params).port()


@declares
def preferences(
    data: str,
    *,
    batch: int,
    overlong: Literal["error", "drop", "truncate"] = "error",
    shuffle: bool = True,
    name: str = "preferences",
) -> tuple[Port[Completion], Port[Preference]]:
    """Pairs of answers to one prompt, tokenized for the Model trained on them: `rollout, pairs =
    preferences("pairs.parquet", batch=64)`, then `dpo_loss(pairs, ...)`.

    The data has `chosen` and `rejected`, and their `prompt` unless both begin with it (TRL's
    implicit prompt): all texts, or all lists of messages. Each row becomes a group of two:
    sample 0 is the chosen answer (sign +1), sample 1 the rejected one (-1).

    batch: pairs per Step. overlong: what happens to an answer with more tokens than the positions
    of a Model that reads it: `error` ends the run, `drop` drops its pair and admits another,
    `truncate` keeps its first tokens, and drops the pair if they include none of the answer. The
    metric prompt/overlong counts such rows.
    """
    params = {"data": data, "batch": batch, "overlong": overlong, "shuffle": shuffle}
    rows, pairs = Node(PREFERENCES, name, params=params).ports
    return rows, pairs
