"""reasoning-gym's tasks: their rows as a data source, their scorers as reward functions.

Owns: the `reasoning_gym:` form of a `data` argument, and the rewards for it. Does not own: any
task (they are the library's), how rows are drawn (operators/kernels/data.py).
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import parse_qsl

import pyarrow as pa

from dataflow.errors import DataError, nearest
from operators.task_library import import_library

PREFIX = "reasoning_gym:"
_COLUMNS = {name: pa.utf8() for name in ("prompt", "answer", "entry", "task")}
_HELD_OUT_TENTH = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task of the library with its settings. suffix: text added after each question."""

    name: str
    settings: tuple[tuple[str, Any], ...]
    suffix: str = ""


def is_task(data: str) -> bool:
    """Whether a `data` argument names a task rather than a file."""
    return data.startswith(PREFIX)


def task_columns(data: str) -> dict[str, pa.DataType]:
    """prompt: the question; answer; entry: the whole entry as JSON; task: its name and settings,
    for the scorer.

    Raises DataError for an unknown task or setting, and if the library is not installed.
    """
    _checked(data.removeprefix(PREFIX))
    return dict(_COLUMNS)


def task_table(data: str, split: str | None = None) -> pa.Table:
    """The rows of `reasoning_gym:<task>?size=1000&seed=7&<setting>=<value>&suffix=%0A`.

    `seed` defaults to 0. Splits are by content, since rows of different seeds overlap (item i uses
    seed + i): `test` is a tenth of the questions, by a hash of their case-folded text, `train` the
    others. Raises DataError for an unknown task, setting or split, for the few tasks whose scorer
    reads what JSON cannot hold, and if the library is not installed.
    """
    spec = data.removeprefix(PREFIX)
    require_split(data, split)
    task = _parse(spec)
    made = _dataset(spec)
    entries = [made[index] for index in range(len(made))]
    chosen = [e for e in entries if split is None or _held_out(e["question"]) == (split == "test")]
    _require_json(spec, entries[:1])
    rows = [(e["question"] + task.suffix, e["answer"], json.dumps(e), spec) for e in chosen]
    return pa.table(
        {
            name: pa.array([row[i] for row in rows], kind)
            for i, (name, kind) in enumerate(_COLUMNS.items())
        }
    )


def require_split(data: str, split: str | None) -> None:
    """Raise DataError for a split that no task has."""
    if split not in (None, "train", "test"):
        raise DataError(
            f"{data}: expected split 'train' or 'test' of a task, found {split!r}. Fix:"
            " split='train'."
        )


def same_items(data: str, other: str) -> bool:
    """Whether two task sources generate some of the same items: item i uses seed + i, if all other
    settings are equal.

    False if one of them cannot be generated. Questions that are equal by chance are not found.
    """
    if (one := _made(data)) is None or (two := _made(other)) is None or one[0] != two[0]:
        return False
    return one[1].start < two[1].stop and two[1].start < one[1].stop


def size_of(data: str) -> int | None:
    """Rows that a task generates; None if it cannot be generated."""
    made = _made(data)
    return None if made is None else len(made[1])


def _made(data: str) -> tuple[tuple[Any, ...], range] | None:
    """What a task generates its items from, with defaults filled in, and their seeds."""
    try:
        task = _checked(data.removeprefix(PREFIX))
    except DataError:
        return None
    known = import_library("reasoning_gym.factory").DATASETS
    settings = {
        f.name: repr(f.default)
        for f in fields(known[task.name][1])
        if f.name not in ("seed", "size")
    }
    given = dict(task.settings)
    settings |= {name: repr(value) for name, value in given.items() if name not in ("seed", "size")}
    sizes = {f.name: f.default for f in fields(known[task.name][1])}
    seed, size = given.get("seed", 0), given.get("size", sizes.get("size"))
    if not isinstance(seed, int) or not isinstance(size, int):
        return None
    return (task.name, *sorted(settings.items())), range(seed, seed + size)


def exact_match(
    completions: Sequence[Any], entry: Sequence[str], task: Sequence[str]
) -> list[float]:
    """1.0 if the task's scorer gives full marks, else 0.0.

    Compared in double precision: partial credit can sum to 0.9999999999999999, which as float32 is
    1.0, and a policy finds and exploits that.
    """
    return [1.0 if score == 1.0 else 0.0 for score in task_score(completions, entry, task)]


def task_score(
    completions: Sequence[Any], entry: Sequence[str], task: Sequence[str]
) -> list[float]:
    """The task's own score with its partial credit, 0.0 to 1.0; as a reward it may teach
    something other than full marks do.
    """
    rows = zip(completions, entry, task, strict=True)
    return [float(_dataset(t).score_answer(text_of(c), json.loads(e))) for c, e, t in rows]


def text_of(completion: Any) -> str:
    """A completion's text: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _require_json(spec: str, entries: Sequence[dict[str, Any]]) -> None:
    """Some tasks' scorers compare tuples, which JSON turns into lists: right answers would score as
    wrong.
    """
    score = _dataset(spec).score_answer
    for entry in entries:
        if score(entry["answer"], entry) != score(entry["answer"], json.loads(json.dumps(entry))):
            raise DataError(
                f"{PREFIX}{spec}: the task's entries change when they travel as JSON. Fix: another"
                " task."
            )


def _held_out(question: str) -> bool:
    digest = hashlib.blake2b(question.casefold().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 10 == _HELD_OUT_TENTH


def _parse(spec: str) -> Task:
    name, _, query = spec.partition("?")
    settings = dict(parse_qsl(query, keep_blank_values=True))
    suffix = settings.pop("suffix", "")
    return Task(
        name=name,
        settings=tuple((key, _value(text)) for key, text in settings.items()),
        suffix=suffix,
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@functools.lru_cache(maxsize=16)
def _dataset(spec: str) -> Any:
    """The library's object for a task, which generates entries and scores answers; cached."""
    task = _checked(spec)
    create = import_library("reasoning_gym.factory").create_dataset
    try:
        return create(task.name, **{"seed": 0} | dict(task.settings))
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"{PREFIX}{spec}: the task refuses these settings: {error}.") from error


def _checked(spec: str) -> Task:
    """The task of a spec, which the library must know with all of its settings."""
    task = _parse(spec)
    try:
        known = import_library("reasoning_gym.factory").DATASETS
    except ModuleNotFoundError as error:
        raise DataError(
            f"{PREFIX}{spec}: needs reasoning-gym. Fix: pip install 'dataflow-rl[tasks]'."
        ) from error
    _check(task, known)
    return task


def _check(task: Task, known: Any) -> None:
    if task.name not in known:
        near = nearest(task.name, known)
        fix = f"{PREFIX}{near}" if near else "the name of one of its tasks"
        raise DataError(
            f"{PREFIX}{task.name}: expected a task of reasoning-gym, found {task.name!r}. Fix:"
            f" {fix}."
        )
    settings = [field.name for field in fields(known[task.name][1])]
    for name, _ in task.settings:
        if name not in settings:
            near = nearest(name, settings)
            raise DataError(
                f"{PREFIX}{task.name}: unknown setting {name!r}; there are: {', '.join(settings)},"
                " suffix." + (f" Fix: {near}=." if near else "")
            )
