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
_DRAW_SETTINGS = ("seed", "size")
"""Settings that say which items are generated, not how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task of the library with its settings. suffix: text added after each question."""

    name: str
    settings: tuple[tuple[str, Any], ...]
    suffix: str = ""


def is_task(source: str) -> bool:
    """Whether a `data` argument names a task rather than a file."""
    return source.startswith(PREFIX)


def task_columns(source: str) -> dict[str, pa.DataType]:
    """prompt: the question; answer; entry: the whole entry as JSON; task: its name and settings,
    for the scorer.

    Raises DataError for an unknown task or setting, and if the library is not installed.
    """
    _parse_known(source.removeprefix(PREFIX))
    return dict(_COLUMNS)


def task_table(data: str, split: str | None = None) -> pa.Table:
    """Generate the rows of `reasoning_gym:<task>?size=1000&seed=7&<setting>=<value>&suffix=%0A`.

    `seed` defaults to 0. Splits are by content, since rows of different seeds overlap (item i uses
    seed + i): `test` is a tenth of the questions, by a hash of their case-folded text, `train` the
    others. Raises DataError for an unknown task, setting or split, for the few tasks whose scorer
    reads what JSON cannot hold, and if the library is not installed.
    """
    spec = data.removeprefix(PREFIX)
    require_task_split(data, split)
    task = _parse(spec)
    dataset = _dataset(spec)
    entries = [dataset[index] for index in range(len(dataset))]
    _require_json(spec, entries[:1])
    if split is not None:
        entries = [e for e in entries if _is_held_out(e["question"]) == (split == "test")]
    columns = {
        "prompt": [entry["question"] + task.suffix for entry in entries],
        "answer": [entry["answer"] for entry in entries],
        "entry": [json.dumps(entry) for entry in entries],
        "task": [spec] * len(entries),
    }
    return pa.table({name: pa.array(columns[name], kind) for name, kind in _COLUMNS.items()})


def require_task_split(source: str, split: str | None) -> None:
    """Raise DataError for a split that no task has."""
    if split not in (None, "train", "test"):
        raise DataError(
            f"{source}: expected split 'train' or 'test' of a task, found {split!r}. Fix:"
            " split='train'."
        )


def have_same_items(source: str, other: str) -> bool:
    """Whether two task sources generate some of the same items: item i uses seed + i, if all other
    settings are equal.

    False if one of them cannot be generated. Questions that are equal by chance are not found.
    """
    one, two = _find_items(source), _find_items(other)
    if one is None or two is None:
        return False
    recipe, seeds = one
    other_recipe, other_seeds = two
    if recipe != other_recipe:
        return False
    return seeds.start < other_seeds.stop and other_seeds.start < seeds.stop


def count_items(source: str) -> int | None:
    """Count the rows that a task generates; None if it cannot be generated."""
    recipe_and_seeds = _find_items(source)
    if recipe_and_seeds is None:
        return None
    _, seeds = recipe_and_seeds
    return len(seeds)


def _find_items(source: str) -> tuple[tuple[Any, ...], range] | None:
    """What a task generates its items from, with defaults filled in, and their seeds."""
    try:
        task = _parse_known(source.removeprefix(PREFIX))
    except DataError:
        return None
    _, config = import_library("reasoning_gym.factory").DATASETS[task.name]
    settings = {field.name: field.default for field in fields(config)}
    # As in `_dataset`: the library's own default is no fixed number.
    settings["seed"] = 0
    settings |= dict(task.settings)
    seed, size = settings["seed"], settings.get("size")
    if not isinstance(seed, int) or not isinstance(size, int):
        return None
    # By repr: 1, 1.0 and True are other settings.
    texts = {name: repr(settings[name]) for name in settings if name not in _DRAW_SETTINGS}
    return (task.name, *sorted(texts.items())), range(seed, seed + size)


def exact_match(
    completions: Sequence[Any], entry: Sequence[str], task: Sequence[str]
) -> list[float]:
    """1.0 if the task's scorer gives full marks, else 0.0.

    Compared in double precision: partial credit can sum to 0.9999999999999999, which as float32 is
    1.0, and a policy finds and exploits that.
    """
    return [float(score == 1.0) for score in task_score(completions, entry, task)]


def task_score(
    completions: Sequence[Any], entry: Sequence[str], task: Sequence[str]
) -> list[float]:
    """The task's own score with its partial credit, 0.0 to 1.0; as a reward it may teach
    something other than full marks do.
    """
    scores: list[float] = []
    for completion, entry_text, spec in zip(completions, entry, task, strict=True):
        answer = completion_text(completion)
        score = _dataset(spec).score_answer(answer, json.loads(entry_text))
        scores.append(float(score))
    return scores


def completion_text(completion: Any) -> str:
    """A completion's text: itself, or the content of the last message that the model wrote; empty
    if it wrote none, or only called tools.
    """
    if isinstance(completion, str):
        return completion
    contents = [each["content"] for each in completion if each["role"] == "assistant"]
    if not contents:
        return ""
    return contents[-1] or ""


def _require_json(spec: str, entries: Sequence[dict[str, Any]]) -> None:
    """Raise DataError for entries that JSON changes. Some tasks' scorers compare tuples, which it
    turns into lists: right answers would score as wrong.
    """
    score = _dataset(spec).score_answer
    for entry in entries:
        answer = entry["answer"]
        received_entry = json.loads(json.dumps(entry))
        if score(answer, entry) != score(answer, received_entry):
            raise DataError(
                f"{PREFIX}{spec}: the task's entries change when they travel as JSON. Fix: another"
                " task."
            )


def _is_held_out(question: str) -> bool:
    digest = hashlib.blake2b(question.casefold().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 10 == _HELD_OUT_TENTH


def _parse(spec: str) -> Task:
    name, _, query = spec.partition("?")
    settings = dict(parse_qsl(query, keep_blank_values=True))
    suffix = settings.pop("suffix", "")
    parsed = ((setting, _parse_setting(text)) for setting, text in settings.items())
    return Task(name=name, settings=tuple(parsed), suffix=suffix)


def _parse_setting(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@functools.lru_cache(maxsize=16)
def _dataset(spec: str) -> Any:
    """The library's object for a task, which generates entries and scores answers; cached."""
    task = _parse_known(spec)
    create = import_library("reasoning_gym.factory").create_dataset
    try:
        return create(task.name, **{"seed": 0} | dict(task.settings))
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"{PREFIX}{spec}: the task refuses these settings: {error}.") from error


def _parse_known(spec: str) -> Task:
    """Parse a spec. Raises DataError unless the library knows the task and all of its settings."""
    task = _parse(spec)
    try:
        known_tasks = import_library("reasoning_gym.factory").DATASETS
    except ModuleNotFoundError as error:
        raise DataError(
            f"{PREFIX}{spec}: needs reasoning-gym. Fix: pip install 'dataflow-rl[tasks]'."
        ) from error
    _require_known(task, known_tasks)
    return task


def _require_known(task: Task, known_tasks: Any) -> None:
    if task.name not in known_tasks:
        near = nearest(task.name, known_tasks)
        fix = f"{PREFIX}{near}" if near else "the name of one of its tasks"
        raise DataError(
            f"{PREFIX}{task.name}: expected a task of reasoning-gym, found {task.name!r}. Fix:"
            f" {fix}."
        )
    _, config = known_tasks[task.name]
    settings = [field.name for field in fields(config)]
    for name, _ in task.settings:
        if name not in settings:
            near = nearest(name, settings)
            fix = f" Fix: {near}=." if near else ""
            raise DataError(
                f"{PREFIX}{task.name}: unknown setting {name!r}; there are: {', '.join(settings)},"
                f" suffix.{fix}"
            )
