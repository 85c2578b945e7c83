"""How many tokens the rows of a source have, counted in a sample of its rows before a run.

Owns: which rows are counted, and how much is read at most. Does not own: reading rows (data.py),
tokens (text.py), the tokenizer's files (tokenizer_files.py), what a plan makes of the counts.

A count never fails: what cannot be counted is NotCounted, which says why. The same data has the
same counts, whatever the seed of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from dataflow.errors import DataError
from dataflow.model_files import folder_of
from dataflow.prompt_types import is_token_ids
from dataflow.randomness import stream_seed
from dataflow.safe_text import shown_bytes
from dataflow.token_counts import NotCounted, TokenCounts
from operators import tasks
from operators.data_files import source_files
from operators.data_hub import is_hub
from operators.data_lengths import Stamp, count_prompt_bytes, stamp_sources
from operators.kernels.data import (
    SourceRows,
    open_demonstrations,
    open_rows,
    tokenize_demonstrations,
)
from operators.kernels.preferences import open_preferences, tokenize_preferences
from operators.kernels.text import Pairs, Tokenizer
from operators.kernels.tokenizer_files import FILES, read_tokenizer

pc: Any = pyarrow.compute  # whose functions its stubs do not have

SAMPLE = 256
"""Rows that are counted at most."""
LEAST = 16
"""Rows that are counted even where they are very long."""
LONGEST = 4
"""Rows with most bytes, counted beside the sample: estimates of memory stand on the longest."""
SAMPLE_BYTES = 1 << 19
"""Of text that is tokenized at most, beyond LEAST rows: a tenth of a second."""
MOST_BYTES = 64 << 20
"""Of files that are read; of larger ones nothing is."""


def count_prompts(dataset: str, split: str | None, base: str) -> TokenCounts | NotCounted:
    """Count tokens of prompts as the Model of this base reads them: with the chat template and
    special tokens.
    """
    return _count_if_possible(dataset, split, base, _count_prompts)


def count_demonstrations(dataset: str, split: str | None, base: str) -> TokenCounts | NotCounted:
    """Count tokens of demonstrations' prompts and completions, as the kernel makes them."""
    return _count_if_possible(dataset, split, base, partial(_count_pairs, _DEMONSTRATIONS))


def count_preferences(dataset: str, split: str | None, base: str) -> TokenCounts | NotCounted:
    """Count tokens of pairs' prompts and answers, as the kernel makes them."""
    return _count_if_possible(dataset, split, base, partial(_count_pairs, _PREFERENCES))


def _count_if_possible(
    dataset: str, split: str | None, base: str, count: Callable[..., TokenCounts]
) -> TokenCounts | NotCounted:
    """Count, or say why nothing is counted."""
    if tasks.is_task(dataset):
        return NotCounted(why="a task's rows are made in the run")
    if is_hub(dataset):
        return NotCounted(why="a data set of the hub is read in the run")
    try:
        files = [Path(file) for file in source_files(dataset, split)]
        size = sum(file.stat().st_size for file in files)
        if size > MOST_BYTES:
            sizes = f"{shown_bytes(size)}, more than {shown_bytes(MOST_BYTES)}"
            return NotCounted(why=f"{dataset} has {sizes}, and is read in the run")
        folder = folder_of(base)
        if folder is not None:
            files += [folder / name for name in FILES if (folder / name).is_file()]
        return count(dataset, split, base, folder, stamp_sources(files))
    except (DataError, OSError, UnicodeError, pa.ArrowException) as error:
        problem, _, _ = str(error).partition(". Fix: ")
        return NotCounted(why=problem.partition("\n")[0])


@lru_cache(maxsize=32)
def _count_prompts(
    dataset: str, split: str | None, base: str, folder: Path | None, files: tuple[Stamp, ...]
) -> TokenCounts:
    """files: so that plans of the same files count once."""
    column: Any = open_rows(dataset, split).table.column("prompt").combine_chunks()
    if is_token_ids(column.type):
        counts = pc.list_value_length(column).to_numpy()
        sample = counts[_draw_sample(np.zeros(len(counts)))]
    else:
        tokenizer = _read_tokenizer_in(folder, base)
        sizes = count_prompt_bytes(column).to_numpy(zero_copy_only=False)
        sampled_rows = _draw_sample(sizes)
        longest_rows = _find_longest(sizes)
        texts = column.take(pa.array([*sampled_rows, *longest_rows]))
        counts = tokenizer.encode_column(texts).lengths
        sample = counts[: len(sampled_rows)]
    return TokenCounts(
        prompts=_ascending(sample),
        longest=max(1, int(counts.max())),
        place=_place(dataset, split),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairSource:
    """A kind of source whose rows have answers: how it is opened, and how its rows are tokenized,
    which takes a Tokenizer, the source, some of its rows, and where each is, for errors.
    """

    open: Callable[[str, str | None], SourceRows]
    tokenize: Callable[[Tokenizer, SourceRows, pa.RecordBatch, Callable[[int], str]], Pairs]


def _tokenize_demonstrations(
    tokenizer: Tokenizer, source: SourceRows, rows: pa.RecordBatch, place: Callable[[int], str]
) -> Pairs:
    return tokenize_demonstrations(tokenizer, source.shape, rows, True, place)


_DEMONSTRATIONS = _PairSource(open=open_demonstrations, tokenize=_tokenize_demonstrations)
_PREFERENCES = _PairSource(open=open_preferences, tokenize=tokenize_preferences)


@lru_cache(maxsize=64)
def _count_pairs(
    kind: _PairSource,
    dataset: str,
    split: str | None,
    base: str,
    folder: Path | None,
    files: tuple[Stamp, ...],
) -> TokenCounts:
    """Count prompts and answers of a sample of rows, and of those with most bytes. files: so that
    plans of the same files count once.
    """
    source = kind.open(dataset, split)
    tokenizer = _read_tokenizer_in(folder, base)
    sizes = np.zeros(len(source), dtype=np.int64)
    for column in source.table.columns:
        sizes += count_prompt_bytes(column.combine_chunks()).to_numpy(zero_copy_only=False)
    sampled_rows = _draw_sample(sizes)
    longest_rows = _find_longest(sizes)
    rows = np.array([*sampled_rows, *longest_rows], dtype=np.int64)

    def place(row: int) -> str:
        return source.place(int(rows[row]))

    pairs = kind.tokenize(tokenizer, source, source.take(rows), place)
    prompts = pairs.prompt.lengths
    answers = pairs.completion.lengths
    rows_together = prompts + answers
    answers_per_row = len(pairs.prompt) // len(rows)  # two for preferences
    sampled = len(sampled_rows) * answers_per_row
    return TokenCounts(
        prompts=_ascending(prompts[:sampled]),
        longest=max(1, int(prompts.max())),
        answers=_ascending(answers[:sampled]),
        longest_answer=max(1, int(answers.max())),
        longest_row=max(2, int(rows_together.max())),
        place=_place(dataset, split),
    )


def _read_tokenizer_in(folder: Path | None, base: str) -> Tokenizer:
    """Read the tokenizer of a folder. Raises DataError where there is none."""
    if folder is None:
        problem = f"expected a directory with a tokenizer here, found {base!r}"
        raise DataError(f"{problem}. Fix: a path, or a base that is in the hub's cache.")
    return read_tokenizer(folder)


def _ascending(lengths: np.ndarray) -> np.ndarray:
    """int64, none below 1: a row has a token."""
    return np.sort(np.maximum(lengths, 1)).astype(np.int64)


def _draw_sample(sizes: np.ndarray) -> np.ndarray:
    """int64: rows in the order of a fixed shuffle, as long as their bytes are few enough."""
    key = int(stream_seed(0, "token counts"))
    shuffle = np.random.Generator(np.random.Philox(key=key))
    rows = shuffle.permutation(len(sizes))[:SAMPLE]
    total_sizes = np.cumsum(sizes[rows])
    fitting = int(np.searchsorted(total_sizes, SAMPLE_BYTES, side="right"))
    return rows[: max(LEAST, fitting)]


def _find_longest(sizes: np.ndarray) -> Sequence[int]:
    """The rows with most bytes, without those whose text is too long to be tokenized at all."""
    longest = np.argsort(sizes, kind="stable")[-LONGEST:]
    return longest[sizes[longest] <= SAMPLE_BYTES].tolist()


def _place(dataset: str, split: str | None) -> str:
    name = Path(dataset).name or dataset
    return name if split is None else f"split {split} of {name}"
