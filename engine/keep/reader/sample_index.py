"""The samples of a run, indexed: which rows there are, in any order, without their texts.

Owns: the index (key, reward, length, finish, mismatch of each row), choosing rows by it, and the
search in texts. Does not own: the files (engine/keep/samples.py), a whole row (sample_rows.py).

Files are indexed the newest first, for at most a moment at a time, so that the newest rows are
there at once and a run with very many files is indexed over several requests. A file that a resume
made anew is indexed anew. Columns are read one by one, never a whole table.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataflow.safe_text import one_line
from engine.keep.reader.arrow_numbers import values_of, whole_of
from engine.keep.reader.open_folder import FileMark, NotServed, OpenFolder, inside

SAMPLES = "samples"
_FILE = re.compile(r"step_([0-9]{1,18})\.parquet")
_COLUMNS = ("node", "position", "sample", "reward", "length", "finish")
_LONGEST_FILE = 1 << 30
"""Bytes of a sample file that is still read."""
_MOST_ROWS = 4_000_000
"""Rows of the index; older ones are left out."""
BUDGET = 1.0
"""Seconds that a request spends on files that are not indexed or searched yet."""

Order = str
Place = tuple[str, int]
"""(file, row)."""
ORDERS = ("newest", "best", "worst", "longest", "mismatch")


class DamagedFile(NotServed):
    """A file of rows that cannot be read. file: its name."""

    def __init__(self, file: str, error: Exception) -> None:
        super().__init__(f"{file} is damaged and left out: {one_line(str(error))[:200]}")
        self.file = file


@dataclass(slots=True)
class SampleFile:
    """What is kept of one Step's file. Codes stand for names of the index."""

    mark: FileMark
    step: int
    columns: dict[str, np.ndarray]
    prompts: np.ndarray | None = None
    """A hash of each row's prompt, once somebody asked for equal ones."""
    problem: str = ""
    """Why it cannot be read; it has no rows then."""

    @property
    def rows(self) -> int:
        return len(self.columns["position"])


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleQuery:
    """Which samples. first, last: Steps; q: in prompt or completion, whatever its case."""

    first: int = 0
    last: int = 2**62
    node: str = ""
    finish: str = ""
    q: str = ""
    order: Order = "newest"
    offset: int = 0
    limit: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Rows by (file, row). total: of all that fit; read, files: of how many files that is known.
    problems: of files that cannot be read.
    """

    rows: list[Place]
    total: int
    read: int
    files: int
    problems: list[str]


class SampleIndex:
    """One run's samples. Its methods may be called by several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.lock = threading.RLock()
        self._clock = clock
        self._files: dict[str, SampleFile] = {}
        self._names: list[str] = []
        self._codes: dict[str, int] = {}
        self._all: list[str] = []
        self._searched: tuple[str, dict[str, tuple[FileMark, np.ndarray]]] = ("", {})

    def refresh(self, run: OpenFolder) -> None:
        """Take note of changed files, for about BUDGET seconds, the newest first."""
        end = self._clock() + BUDGET
        with self.lock, inside(run, SAMPLES) as folder:
            marks = {n: m for n in _files(folder) if folder and (m := folder.mark(n)) is not None}
            for name in [
                n for n, sample_file in self._files.items() if marks.get(n) != sample_file.mark
            ]:
                del self._files[name]
            self._all = sorted(marks, key=_step_of, reverse=True)
            rows = sum(sample_file.rows for sample_file in self._files.values())
            for name in self._all:
                if name in self._files:
                    continue
                if rows > _MOST_ROWS or self._clock() > end or folder is None:
                    break
                self._files[name] = sample_file = self._index_file(folder, name, marks[name])
                rows += sample_file.rows

    def choose(self, run: OpenFolder, query: SampleQuery) -> Chosen:
        """The rows that fit, a page of them in the order that is asked for."""
        with self.lock:
            self.refresh(run)
            files = [n for n in self._all if query.first <= _step_of(n) <= query.last]
            known = [name for name in files if name in self._files]
            masks = {name: self._fits(self._files[name], query) for name in known}
            if query.q:
                masks = self._search_files(run, query.q, masks)
            file, row = _places(list(masks.values()))
            if query.order != "newest":
                file, row = self._sort_places(list(masks), file, row, query.order)
            page = slice(query.offset, query.offset + query.limit)
            names = list(masks)
            rows = [(names[f], r) for f, r in zip(file[page], row[page], strict=True)]
            rows = [(name, int(r)) for name, r in rows]
            return Chosen(
                rows=rows,
                total=len(file),
                read=len(masks),
                files=len(files),
                problems=self._problems(known),
            )

    def leave_out(self, damaged: DamagedFile) -> bool:
        """Take a file's rows out of the index until the file changes; whether it had some."""
        with self.lock:
            sample_file = self._files.get(damaged.file)
            if sample_file is None or sample_file.problem:
                return False
            self._files[damaged.file] = _without_rows(
                sample_file.mark, sample_file.step, str(damaged)
            )
            return True

    def _problems(self, names: Iterable[str]) -> list[str]:
        sample_files = (self._files[name] for name in names if name in self._files)
        return [each.problem for each in sample_files if each.problem]

    def _sort_places(
        self, names: list[str], file: np.ndarray, row: np.ndarray, order: Order
    ) -> tuple[np.ndarray, np.ndarray]:
        """The places in an order, without those that have no place in it."""
        ends = np.searchsorted(file, np.arange(len(names) + 1))
        parts = [
            self._key(self._files[name], order)[row[ends[at] : ends[at + 1]]]
            for at, name in enumerate(names)
        ]
        keys = np.concatenate([np.empty(0), *parts])
        by = np.argsort(keys, kind="stable")[: int(np.isfinite(keys).sum())]
        return file[by], row[by]

    def of_prompt(self, run: OpenFolder, step: int, node: str, position: int) -> list[Place]:
        """The rows of one prompt in a Step: its group."""
        with self.lock:
            name = self.file_of(run, step)
            sample_file = self._files[name]
            fits = (sample_file.columns["position"] == position) & self._of_name(
                sample_file, "node", node
            )
            order = np.argsort(sample_file.columns["sample"][fits], kind="stable")
            return [(name, int(row)) for row in np.flatnonzero(fits)[order]]

    def same_prompt(self, run: OpenFolder, place: Place, limit: int) -> Chosen:
        """The rows with the prompt of that one, the newest first."""
        end = self._clock() + BUDGET
        places: list[Place] = []
        searched = 0
        with self.lock:
            prompt_hash = self._prompts(run, place[0])[place[1]]
            for each in self._all:
                if each not in self._files or self._files[each].problem:
                    continue
                if self._files[each].prompts is None and self._clock() > end:
                    continue
                searched += 1
                hits = np.flatnonzero(self._prompts(run, each) == prompt_hash)
                places += [(each, int(hit)) for hit in hits]
            files = len(self._all)
            return Chosen(
                rows=places[:limit],
                total=len(places),
                read=searched,
                files=files,
                problems=self._problems(self._all),
            )

    def file_of(self, run: OpenFolder, step: int) -> str:
        """The file of a Step, indexed. Raises NotServed where there is none that can be read."""
        with self.lock:
            self.refresh(run)
            name = next((n for n in self._all if _step_of(n) == step), None)
            if name is None:
                raise NotServed(f"no samples of Step {step}")
            if name not in self._files:
                with inside(run, SAMPLES) as folder:
                    if folder:
                        mark = folder.mark(name)
                    else:
                        mark = None
                    if folder is None or mark is None:
                        raise NotServed(f"no samples of Step {step}")
                    self._files[name] = self._index_file(folder, name, mark)
            if self._files[name].problem:
                raise NotServed(self._files[name].problem)
            return name

    def row_of(self, run: OpenFolder, step: int, node: str, position: int, sample: int) -> Place:
        """The place of a key. Raises NotServed where there is none."""
        for name, row in self.of_prompt(run, step, node, position):
            if self._files[name].columns["sample"][row] == sample:
                return name, row
        raise NotServed(f"no sample {sample} of prompt {position} in Step {step}")

    def _index_file(self, folder: OpenFolder, name: str, mark: FileMark) -> SampleFile:
        """A file's columns; without rows if it is damaged."""
        try:
            with opened_table(folder, name) as file:
                stored_columns = set(file.schema_arrow.names)
                wanted_columns = [c for c in (*_COLUMNS, *MISMATCH) if c in stored_columns]
                table = file.read(columns=wanted_columns, use_threads=False)
                return SampleFile(
                    mark=mark, step=_step_of(name), columns=self._index_columns(table)
                )
        except NotServed as error:
            return _without_rows(mark, _step_of(name), str(error))

    def _index_columns(self, table: pa.Table) -> dict[str, np.ndarray]:
        rows = len(table)
        return {
            "node": self._code_texts(table, "node"),
            "finish": self._code_texts(table, "finish"),
            "position": column_numbers(table, "position", np.int64, rows),
            "sample": column_numbers(table, "sample", np.int32, rows),
            "reward": column_numbers(table, "reward", np.float32, rows),
            "length": column_numbers(table, "length", np.int32, rows),
            "mismatch": greatest_mismatch(table),
        }

    def _code_texts(self, table: pa.Table, name: str) -> np.ndarray:
        """A column of few different texts as numbers."""
        return np.array([self._code(text) for text in _values(table, name, len(table))], np.int32)

    def _code(self, text: Any) -> int:
        if text is not None:
            key = str(text)
        else:
            key = ""
        if key not in self._codes:
            self._codes[key] = len(self._names)
            self._names.append(key)
        return self._codes[key]

    def _of_name(self, sample_file: SampleFile, column: str, name: str) -> np.ndarray:
        return sample_file.columns[column] == self._codes.get(name, -1)

    def _fits(self, sample_file: SampleFile, query: SampleQuery) -> np.ndarray:
        mask = np.ones(sample_file.rows, dtype=bool)
        for column, name in (("node", query.node), ("finish", query.finish)):
            if name:
                mask &= self._of_name(sample_file, column, name)
        return mask

    def _key(self, sample_file: SampleFile, order: Order) -> np.ndarray:
        """What ascends in an order; nan for rows that have no place in it."""
        if order == "worst":
            return sample_file.columns["reward"].astype(np.float64)
        name = {"best": "reward", "longest": "length", "mismatch": "mismatch"}[order]
        return -sample_file.columns[name].astype(np.float64)

    def _search_files(
        self, run: OpenFolder, q: str, masks: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The masks of as many files as could be searched, of the rows that have these letters."""
        end = self._clock() + BUDGET
        if self._searched[0] != q:
            self._searched = (q, {})
        known = self._searched[1]
        found_masks: dict[str, np.ndarray] = {}
        with inside(run, SAMPLES) as folder:
            for name, mask in masks.items():
                mark, hits = known.get(name, (None, mask))
                if self._files[name].problem:
                    found_masks[name] = mask
                    continue
                if mark != self._files[name].mark:
                    if self._clock() > end or folder is None:
                        break
                    hits = _search(folder, name, q)
                    known[name] = (self._files[name].mark, hits)
                found_masks[name] = mask & hits if len(hits) == len(mask) else np.zeros_like(mask)
        return found_masks

    def _prompts(self, run: OpenFolder, name: str) -> np.ndarray:
        sample_file = self._files[name]
        if sample_file.prompts is None:
            with inside(run, SAMPLES) as folder:
                assert folder is not None
                with opened_table(folder, name) as file:
                    table = file.read(columns=["prompt"], use_threads=False)
                    texts = _values(table, "prompt", sample_file.rows)
            sample_file.prompts = np.array([hash(str(text)) for text in texts], np.int64)
        return sample_file.prompts


MISMATCH = ("sampler_logprobs", "trainer_logprobs", "completion_mask")
"""Columns of which the greatest difference of a row is made, where all are recorded."""


def greatest_mismatch(table: pa.Table) -> np.ndarray:
    """float32: the greatest difference of log-probs of a row's trained tokens; nan if unknown."""
    rows = len(table)
    if not set(MISMATCH) <= set(table.column_names):
        return np.full(rows, np.nan, np.float32)
    sampler, trainer, mask = (whole_of(table.column(name)) for name in MISMATCH)
    lengths = _lengths(sampler)
    if not _equal_lengths(sampler, trainer, mask):
        return np.full(rows, np.nan, np.float32)
    one, two, trained = (_flat(column) for column in (sampler, trainer, mask))
    difference = np.where(trained != 0, np.abs(two - one), np.nan)
    greatest = np.full(rows, np.nan, np.float32)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    full = lengths > 0
    if full.any():
        greatest[full] = np.fmax.reduceat(difference, starts[full])
    return greatest


def _equal_lengths(*columns: pa.Array) -> bool:
    first, *others = map(_lengths, columns)
    return all(np.array_equal(first, other) for other in others)


def _lengths(column: pa.Array) -> np.ndarray:
    """The lengths of a column of lists; 0 for null."""
    lengths = pc.call_function("list_value_length", [column])
    return values_of(lengths, np.int64, 0)


def _flat(column: pa.Array) -> np.ndarray:
    return values_of(pc.call_function("list_flatten", [column]), np.float64, np.nan)


def column_numbers(table: pa.Table, name: str, kind: type[np.generic], rows: int) -> np.ndarray:
    """A column's numbers; nan, or -1, where there is none."""
    missing = np.nan if np.issubdtype(kind, np.floating) else -1
    if name in table.column_names:
        column = table.column(name)
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            return values_of(whole_of(column), kind, missing)
    return np.full(rows, missing, kind)


@contextmanager
def opened_table(folder: OpenFolder, name: str) -> Iterator[pq.ParquetFile]:
    """A file of rows. Raises NotServed where it is none of the run's own, or very large, and
    DamagedFile where it, or what the block reads of it, is damaged.
    """
    source = folder.open(name)
    if source is None:
        raise NotServed(f"no samples {name}")
    with source:
        mark = folder.mark(name)
        if mark is None or mark.size > _LONGEST_FILE:
            raise NotServed(f"samples {name}: larger than {_LONGEST_FILE} bytes", 413)
        try:
            yield pq.ParquetFile(source, memory_map=False, pre_buffer=False)
        except NotServed:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: text that is none
            raise DamagedFile(name, error) from error


def _search(folder: OpenFolder, name: str, q: str) -> np.ndarray:
    """Which rows of a file have these letters in prompt or completion."""
    with opened_table(folder, name) as file:
        text_columns = [c for c in ("prompt", "completion") if c in file.schema_arrow.names]
        table = file.read(columns=text_columns, use_threads=False)
        hits = np.zeros(len(table), dtype=bool)
        for column in text_columns:
            hits |= _has(table.column(column), q)
    return hits


def _has(column: pa.ChunkedArray, q: str) -> np.ndarray:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        how = pc.MatchSubstringOptions(q, ignore_case=True)
        hits = pc.call_function("match_substring", [column], how)
        return values_of(whole_of(hits), np.int64, 0) != 0
    return np.array([q.casefold() in str(text).casefold() for text in column.to_pylist()], bool)


def _without_rows(mark: FileMark, step: int, problem: str) -> SampleFile:
    """What is kept of a file that cannot be read."""
    columns = {name: np.empty(0, np.int64) for name in (*_COLUMNS, "mismatch")}
    return SampleFile(mark=mark, step=step, columns=columns, problem=problem)


def _values(table: pa.Table, name: str, rows: int) -> list[Any]:
    """A column's values; nulls where there is no such column."""
    if name in table.column_names:
        return table.column(name).to_pylist()
    return [None] * rows


def _files(folder: OpenFolder | None) -> Iterable[str]:
    if folder is None:
        return []
    return [n for n in folder.names() if _FILE.fullmatch(n)]


def _step_of(name: str) -> int:
    match = _FILE.fullmatch(name)
    assert match is not None
    return int(match[1])


def _places(masks: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(file, row) of all that the masks of several files let through."""
    rows = [np.flatnonzero(mask).astype(np.int32) for mask in masks]
    file = np.repeat(np.arange(len(rows), dtype=np.int32), [len(r) for r in rows])
    return file, np.concatenate([np.empty(0, np.int32), *rows])
