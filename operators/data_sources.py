"""Facts about data sources before any row is read: whether two share rows, how many rows one has.

Owns: comparing files by their identity on disk and by their bytes, procedural tasks by the items
they generate, and data sets of the hub by their rows.
Does not own: reading rows (data_files.py), tasks (tasks.py), the consequences of an overlap
(dataflow/rules/held_out_data.py).

Rows that two different files have in common are not found.
"""

from __future__ import annotations

import filecmp
import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dataflow.errors import DataError
from operators import tasks
from operators.data_csv import rows_in
from operators.data_files import files_of
from operators.data_hub import hub_rows, is_hub, same_hub_rows

_COUNTED = 64 * 2**20
"""Most bytes of JSONL or CSV that are read to count rows."""

Identity = tuple[str, int, int]
"""Real path, device and inode of a file; device and inode are 0 if there is no file."""


def overlap(data: str, split: str | None, other: str, other_split: str | None) -> bool:
    """Whether two sources read rows of one file or of a copy of it, or generate the same items of a
    task.

    A split of a folder is some of its files; of a single file or a task, some of its rows.
    """
    if tasks.is_task(data) or tasks.is_task(other):
        both = tasks.is_task(data) and tasks.is_task(other)
        return both and not _apart(split, other_split) and tasks.same_items(data, other)
    if is_hub(data) or is_hub(other):
        return is_hub(data) and is_hub(other) and _same_hub_rows(data, split, other, other_split)
    by_rows = not (Path(data).expanduser().is_dir() or Path(other).expanduser().is_dir())
    if by_rows and _apart(split, other_split):
        return False
    some, others = _files(data, split), _files(other, other_split)
    return _shared(some, others) or _copied(some, others)


def row_count(data: str, split: str | None) -> int | None:
    """Rows of a source, from Parquet footers, small JSONL and CSV files, the splits of a data set
    of the hub, or a task's size.

    None if it is unknown without reading more, or if the source cannot be read.
    """
    if tasks.is_task(data):
        return tasks.size_of(data) if split is None else None
    by_rows = split is not None and not Path(data).expanduser().is_dir()
    if by_rows and not is_hub(data):
        return None
    try:
        return hub_rows(data, split) if is_hub(data) else _rows_in(files_of(data, split))
    except (DataError, OSError, pa.ArrowInvalid):  # reported where its columns are read
        return None


def _rows_in(files: Sequence[Path]) -> int | None:
    if files[0].suffix == ".parquet":
        return sum(pq.read_metadata(path).num_rows for path in files)
    if sum(path.stat().st_size for path in files) > _COUNTED:
        return None
    if files[0].suffix == ".csv":
        return rows_in(files)
    return sum(bool(line.strip()) for path in files for line in path.read_bytes().splitlines())


def _same_hub_rows(data: str, split: str | None, other: str, other_split: str | None) -> bool:
    try:
        return same_hub_rows(data, split, other, other_split)
    except DataError:  # reported where its columns are read
        return False


def _apart(split: str | None, other: str | None) -> bool:
    return split is not None and other is not None and split != other


def _shared(some: set[Identity], others: set[Identity]) -> bool:
    paths, inodes = ({i[0] for i in some}, {i[1:] for i in some if i[2]})
    return any(
        path in paths or (inode and (device, inode) in inodes) for path, device, inode in others
    )


def _copied(some: set[Identity], others: set[Identity]) -> bool:
    """Whether a file has the bytes of another: sizes first, so that few files are read."""
    by_size: dict[int, list[str]] = {}
    for path, _, inode in others:
        if inode:
            by_size.setdefault(os.stat(path).st_size, []).append(path)
    try:
        return any(
            filecmp.cmp(path, other, shallow=False)
            for path, _, inode in some
            if inode and (size := os.stat(path).st_size) > 0
            for other in by_size.get(size, ())
        )
    except OSError:  # reported where its columns are read
        return False


def _files(data: str, split: str | None) -> set[Identity]:
    """The files that a source reads; only its path if it cannot be read."""
    try:
        files = files_of(data, split)
    except (DataError, OSError):
        files = [Path(data).expanduser()]
    return {_identity(path) for path in files}


def _identity(path: Path) -> Identity:
    real = os.path.realpath(path)
    try:
        found = os.stat(real)
    except OSError:
        return (real, 0, 0)
    return (real, found.st_dev, found.st_ino)
