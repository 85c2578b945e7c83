"""Samples: what the model wrote, as Parquet files that any tool opens.

Owns: a sample table's columns, and a file for each recorded Step. Does not own: which rows a Step
has (the intake), nor which of their columns are recorded (`Schema.shown`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from dataflow.batch import Batch, Ragged
from dataflow.errors import DataError
from dataflow.storage import replacing, writing
from engine.keep.background_job import BackgroundJob

_FILE = re.compile(r"step_([0-9]+)\.parquet")
_TOKENS = pa.large_list(pa.int32())
_OPTIONAL = {
    "node": pa.utf8(),
    "reward": pa.float32(),
    "advantage": pa.float32(),
    "finish": pa.utf8(),
    "length": pa.int32(),
    "version": pa.int32(),
    "prompt_ids": _TOKENS,
    "completion_ids": _TOKENS,
    "completion_mask": pa.large_list(pa.uint8()),
    "versions": _TOKENS,
}
_SHOWN_AS = {"prompt_text": "prompt", "logprobs": "trainer_logprobs"}
"""Prompts that are token ids are recorded as the text that these say; log-probs, which only full
samples have, are those that the loss compares the sampler's with.
"""

_REQUIRED = ("prompt", "completion", "position", "sample")
_FIRST = ("step", "node", "position", "sample", "prompt", "completion", "reward")


def sample_table(step: int, rows: Mapping[str, Batch]) -> pa.Table:
    """The sample table of a Step: the rows of each train node, one node after another.

    rows: by train node, with the columns that their schemas show. The table adds step, node,
    position, sample, length (tokens of the completion) and versions (of each token); version is the
    row's oldest, advantage its mean over trained tokens (completion_mask 1; all without a mask).
    With the sampler's log-probs, which full samples have, advantages are those of each token; turns
    counts those of an episode. What a row or a node lacks is null. Raises DataError without prompt
    or completion.
    """
    tables = [_complete(step, _table(node, of_node)) for node, of_node in rows.items()]
    if len({table.schema.field("prompt").type for table in tables}) > 1:
        tables = [_with_text_prompts(table) for table in tables]
    return pa.concat_tables(tables, promote_options="default")


def _with_text_prompts(table: pa.Table) -> pa.Table:
    """Messages as JSON: a column has one type, and another node's prompts are text."""
    prompts = table.column("prompt").to_pylist()
    plain = (str, type(None))
    text = [p if isinstance(p, plain) else json.dumps(p, ensure_ascii=False) for p in prompts]
    return table.set_column(table.column_names.index("prompt"), "prompt", pa.array(text, pa.utf8()))


def _table(node: str, rows: Batch) -> pa.Table:
    columns: dict[str, pa.Array] = {
        "node": pa.array([node] * len(rows), pa.utf8()),
        "position": pa.array(rows.keys.position, pa.int64()),
        "sample": pa.array(rows.keys.sample, pa.int32()),
    }
    columns |= {_SHOWN_AS.get(name, name): rows.array(name) for name in rows.names}
    if "advantage" in rows.names:
        if "completion_mask" in rows.names:
            mask = rows.ragged("completion_mask").values
        else:
            mask = None
        mean = _mean(rows.ragged("advantage"), mask)
        if "sampler_logprobs" in rows.names:
            columns["advantages"] = columns["advantage"]
        columns["advantage"] = pa.array(mean, pa.float32(), from_pandas=True)
    if "version" in rows.names:
        columns |= {"version": _least(rows.ragged("version")), "versions": columns["version"]}
    if "turn_end" in rows.names:
        columns["turns"] = pa.array(rows.lengths("turn_end"), pa.int32())
    tokens = next((name for name in _LENGTHS if name in rows.names), None)
    if tokens is not None:
        columns["length"] = pa.array(rows.ragged(tokens).lengths, pa.int32())
    return pa.table(columns)


_LENGTHS = ("completion_ids", "completion_mask")
"""Columns with one entry for each token of the completion."""


def _mean(tokens: Ragged, mask: np.ndarray | None) -> np.ndarray:
    """float64 [rows]: the mean over each row's tokens with mask 1; nan where there are none."""
    if mask is None:
        weight = np.ones(len(tokens.values))
    else:
        weight = (mask != 0).astype(np.float64)
    row = tokens.segments()
    total = np.bincount(row, weights=tokens.values * weight, minlength=len(tokens))
    count = np.bincount(row, weights=weight, minlength=len(tokens))
    return np.divide(total, count, out=np.full(len(tokens), np.nan), where=count > 0)


def _least(tokens: Ragged) -> pa.Array:
    """int32 [rows]: the least value of each row; null where it has none."""
    least = np.zeros(len(tokens), dtype=np.int32)
    full = tokens.lengths > 0
    if full.any():  # starts of non-empty rows: empty ones between them add no values
        least[full] = np.minimum.reduceat(tokens.values, tokens.offsets[:-1][full])
    return pa.array(least, mask=~full)


class SampleWriter:
    """Writes `samples/step_000012.parquet` for Step 1 and every `every`-th Step.

    first: Steps of the run before those that it is told of. phase: which of a Program these are, a
    column of its own; 0 for a graph alone.
    """

    def __init__(self, directory: Path, *, every: int = 1, first: int = 0, phase: int = 0) -> None:
        if every < 1:
            raise ValueError(f"expected every >= 1, found {every}")
        self._directory = directory
        self._every = every
        self._first = first
        self._phase = phase
        with writing("the folder of the samples", directory):
            directory.mkdir(parents=True, exist_ok=True)
            for torn in directory.glob(".step_*.parquet.tmp"):
                torn.unlink()

    def due(self, step: int) -> bool:
        """Whether this Step is recorded; ask before building its table."""
        return step == 1 or step % self._every == 0

    def write(self, step: int, table: pa.Table) -> Path | None:
        """Write the Step's file, whole or not at all; None where the Step is not due. Absent
        optional columns become null. Raises DataError if others are missing, StorageError.
        """
        if not self.due(step):
            return None
        step += self._first
        path = self._directory / f"step_{step:06d}.parquet"
        whole = _complete(step, table)
        if self._phase:
            phases = pa.array(np.full(len(whole), self._phase), pa.int32())
            whole = whole.add_column(1, "phase", phases)
        import pyarrow.parquet as pq  # here: of all Workers one writes samples

        with replacing(f"the samples of step {step}", path, whole.nbytes) as file:
            pq.write_table(whole, file, compression="zstd")
        return path

    def flush(self) -> None:
        """Does nothing: `write` returns when the file is there."""

    def truncate_after(self, step: int) -> None:
        """Delete the files of later Steps of the run, which resumes and makes them again."""
        for number, path in _files(self._directory):
            if number > step:
                path.unlink()


class SamplesBehind:
    """Writes sample files in a thread of its own, one at a time, while the next Step runs. Tables
    are not copied, and must not change before their file is there. The next call raises errors.
    """

    def __init__(self, writer: SampleWriter) -> None:
        self.due = writer.due
        self._write = writer.write
        self._job = BackgroundJob("samples")

    def write(self, step: int, table: pa.Table) -> None:
        """Begin to write the Step's file, after the one before."""
        self._job.begin(self._write, step, table)

    def flush(self) -> None:
        """Wait for the file under way: a checkpoint says that its Step is recorded."""
        self._job.settle()

    def close(self) -> None:
        """Wait for the file under way, and end the thread."""
        try:
            self.flush()
        finally:
            self._job.end()


def _complete(step: int, table: pa.Table) -> pa.Table:
    """The table with all columns in one order: `step` and absent optional ones are added."""
    missing = [name for name in _REQUIRED if name not in table.column_names]
    if missing:
        columns_found = (
            f"expected columns {', '.join(_REQUIRED)}, found {', '.join(table.column_names)}"
        )
        fix = f"add {', '.join(missing)}; sample_table makes them all from a Batch"
        raise DataError(f"samples of Step {step}: {columns_found}. Fix: {fix}.")
    columns = {name: pa.nulls(len(table), kind) for name, kind in _OPTIONAL.items()}
    columns |= {name: table.column(name) for name in table.column_names}
    columns["step"] = pa.array(np.full(len(table), step), pa.int64())
    parts = sorted(name for name in columns if name.startswith("reward/"))
    order = dict.fromkeys([*_FIRST, *parts, *_OPTIONAL, *table.column_names])
    return pa.table({name: columns[name] for name in order})


def read_samples(directory: Path) -> pa.Table:
    """Read all recorded Steps as one table, in order; a column that a Step lacks is null there."""
    tables = [_read(path) for _, path in _files(directory)]
    if not tables:
        fix = "name a run's samples folder"
        raise DataError(f"{directory}: expected files step_*.parquet, found none. Fix: {fix}.")
    return pa.concat_tables(tables, promote_options="default")


def _read(path: Path) -> pa.Table:
    import pyarrow.parquet as pq  # here: as above

    try:
        return pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        problem = f"expected a Parquet file, found a damaged one ({error})"
        raise DataError(f"{path}: {problem}. Fix: delete it.") from error


def _files(directory: Path) -> list[tuple[int, Path]]:
    """(Step, file) in the order of the Steps."""
    if directory.is_dir():
        paths = directory.iterdir()
    else:
        paths = ()
    matches = [(_FILE.fullmatch(path.name), path) for path in paths]
    return sorted((int(match[1]), path) for match, path in matches if match)
