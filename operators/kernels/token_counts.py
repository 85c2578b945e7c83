"""How many tokens the rows of a source have, counted in a sample of its rows before a run.

Owns: which rows are counted, and how much is read at most. Does not own: reading rows (data.py),
tokens (text.py), the tokenizer's files (tokenizer_files.py), what a plan makes of the counts.

A count never fails: what cannot be counted is NotCounted, which says why. The same data has the
same counts, whatever the seed of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from dataflow.errors import DataError
from dataflow.model_files import folder_of
from dataflow.prompt_types import is_token_ids
from dataflow.randomness import stream_seed
from dataflow.shown import shown_bytes
from dataflow.token_counts import NotCounted, TokenCounts
from operators import tasks
from operators.data_files import source_files
from operators.data_hub import is_hub
from operators.data_lengths import Stamp, prompt_bytes, stamps
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


def count_prompts(data: str, split: str | None, base: str) -> TokenCounts | NotCounted:
    """Count tokens of prompts as the Model of this base reads them: with the chat template and
    special tokens.
    """
    return _counted(data, split, base, _count_prompts)


def count_demonstrations(data: str, split: str | None, base: str) -> TokenCounts | NotCounted:
    """Count tokens of demonstrations' prompts and completions, as the kernel makes them."""
    return _counted(data, split, base, _count_demonstrations)


def count_preferences(data: str, split: str | None, base: str) -> TokenCounts | NotCounted:
    """Count tokens of pairs' prompts and answers, as the kernel makes them."""
    return _counted(data, split, base, _count_preferences)


def _counted(
    data: str, split: str | None, base: str, count: Callable[..., TokenCounts]
) -> TokenCounts | NotCounted:
    """What a count gives, or why nothing is counted."""
    if tasks.is_task(data):
        return NotCounted(why="a task's rows are made in the run")
    if is_hub(data):
        return NotCounted(why="a data set of the hub is read in the run")
    try:
        files = [Path(file) for file in source_files(data, split)]
        read = sum(file.stat().st_size for file in files)
        if read > MOST_BYTES:
            sizes = f"{shown_bytes(read)}, more than {shown_bytes(MOST_BYTES)}"
            return NotCounted(why=f"{data} has {sizes}, and is read in the run")
        folder = folder_of(base)
        if folder is not None:
            files += [folder / name for name in FILES if (folder / name).is_file()]
        return count(data, split, base, folder, stamps(files))
    except (DataError, OSError, UnicodeError, pa.ArrowException) as error:
        return NotCounted(why=str(error).partition(". Fix: ")[0].partition("\n")[0])


@lru_cache(maxsize=32)
def _count_prompts(
    data: str, split: str | None, base: str, folder: Path | None, files: tuple[Stamp, ...]
) -> TokenCounts:
    """files: so that plans of the same files count once."""
    column: Any = open_rows(data, split).table.column("prompt").combine_chunks()
    if is_token_ids(column.type):
        lengths = pc.list_value_length(column).to_numpy()
        drawn, longest = lengths[_drawn(np.zeros(len(lengths)))], int(lengths.max())
    else:
        tokenizer = _tokenizer_in(folder, base)
        sizes = prompt_bytes(column).to_numpy(zero_copy_only=False)
        rows, most = _drawn(sizes), _with_most_bytes(sizes)
        counts = tokenizer.encode_column(column.take(pa.array([*rows, *most]))).lengths
        drawn, longest = counts[: len(rows)], int(counts.max())
    return TokenCounts(
        prompts=_ascending(drawn), longest=max(1, longest), place=_place(data, split)
    )


@lru_cache(maxsize=32)
def _count_demonstrations(
    data: str, split: str | None, base: str, folder: Path | None, files: tuple[Stamp, ...]
) -> TokenCounts:
    """files: so that plans of the same files count once."""
    source, tokenizer = open_demonstrations(data, split), _tokenizer_in(folder, base)

    def pairs(rows: pa.RecordBatch, place: Callable[[int], str]) -> Pairs:
        return tokenize_demonstrations(tokenizer, source.shape, rows, True, place)

    return _count_pairs(source, pairs, _place(data, split))


@lru_cache(maxsize=32)
def _count_preferences(
    data: str, split: str | None, base: str, folder: Path | None, files: tuple[Stamp, ...]
) -> TokenCounts:
    """files: so that plans of the same files count once."""
    source, tokenizer = open_preferences(data, split), _tokenizer_in(folder, base)

    def pairs(rows: pa.RecordBatch, place: Callable[[int], str]) -> Pairs:
        return tokenize_preferences(source, rows, tokenizer, place)

    return _count_pairs(source, pairs, _place(data, split))


def _count_pairs(source: SourceRows, pairs: Callable[..., Pairs], place: str) -> TokenCounts:
    """Of a sample of rows, and of those with most bytes, prompts and answers."""
    columns = [column.combine_chunks() for column in source.table.columns]
    sizes = np.zeros(len(source), dtype=np.int64)
    for column in columns:
        sizes += prompt_bytes(column).to_numpy(zero_copy_only=False)
    rows, most = _drawn(sizes), _with_most_bytes(sizes)
    taken = np.array([*rows, *most], dtype=np.int64)
    tokenized = pairs(source.take(taken), lambda row: source.place(int(taken[row])))
    each = len(tokenized.prompt) // len(taken)  # answers of a row: a pair has two
    prompts, answers = tokenized.prompt.lengths, tokenized.completion.lengths
    drawn = len(rows) * each
    return TokenCounts(
        prompts=_ascending(prompts[:drawn]),
        longest=max(1, int(prompts.max())),
        answers=_ascending(answers[:drawn]),
        longest_answer=max(1, int(answers.max())),
        longest_row=max(2, int((prompts + answers).max())),
        place=place,
    )


def _tokenizer_in(folder: Path | None, base: str) -> Tokenizer:
    """Raises DataError where there is none."""
    if folder is None:
        problem = f"expected a directory with a tokenizer here, found {base!r}"
        raise DataError(f"{problem}. Fix: a path, or a base that is in the hub's cache.")
    return read_tokenizer(folder)


def _ascending(lengths: np.ndarray) -> np.ndarray:
    """int64, none below 1: a row has a token."""
    return np.sort(np.maximum(lengths, 1)).astype(np.int64)


def _drawn(sizes: np.ndarray) -> np.ndarray:
    """int64: rows in the order of a fixed shuffle, as long as their bytes are few enough."""
    shuffle = np.random.Generator(np.random.Philox(key=int(stream_seed(0, "token counts"))))
    rows = shuffle.permutation(len(sizes))[:SAMPLE]
    fitting = int(np.searchsorted(np.cumsum(sizes[rows]), SAMPLE_BYTES, side="right"))
    return rows[: max(LEAST, fitting)]


def _with_most_bytes(sizes: np.ndarray) -> Sequence[int]:
    """Those whose text is not too long to be tokenized at all."""
    most = np.argsort(sizes, kind="stable")[-LONGEST:]
    return most[sizes[most] <= SAMPLE_BYTES].tolist()


def _place(data: str, split: str | None) -> str:
    name = Path(data).name or data
    return name if split is None else f"split {split} of {name}"
