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
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dataflow.errors import DataError
from operators import tasks
from operators.data_csv import count_csv_rows
from operators.data_files import find_files
from operators.data_hub import count_hub_rows, have_same_hub_rows, is_hub

_COUNTED = 64 * 2**20
"""Most bytes of JSONL or CSV that are read to count rows."""

Identity = tuple[str, int, int]
"""Real path, device and inode of a file; device and inode are 0 if there is no file."""


def overlap(source: str, split: str | None, other: str, other_split: str | None) -> bool:
    """Whether two sources read rows of one file or of a copy of it, or generate the same items of a
    task.

    A split of a folder is some of its files; of a single file or a task, some of its rows.
    """
    if tasks.is_task(source) != tasks.is_task(other) or is_hub(source) != is_hub(other):
        return False
    if tasks.is_task(source):
        return not _are_apart(split, other_split) and tasks.have_same_items(source, other)
    if is_hub(source):
        return _overlap_on_hub(source, split, other, other_split)
    has_folder = Path(source).expanduser().is_dir() or Path(other).expanduser().is_dir()
    if not has_folder and _are_apart(split, other_split):
        return False
    some = _identify_files(source, split)
    others = _identify_files(other, other_split)
    return _share_file(some, others) or _have_copies(some, others)


def row_count(source: str, split: str | None) -> int | None:
    """Count the rows of a source, from Parquet footers, small JSONL and CSV files, the splits of a
    data set of the hub, or a task's size.

    None if it is unknown without reading more, or if the source cannot be read.
    """
    if tasks.is_task(source):
        return tasks.count_items(source) if split is None else None
    # Which rows of a single file are of a split only reading them tells.
    is_part_of_file = split is not None and not Path(source).expanduser().is_dir()
    if is_part_of_file and not is_hub(source):
        return None
    try:
        if is_hub(source):
            return count_hub_rows(source, split)
        return _count_rows(find_files(source, split))
    except (DataError, OSError, pa.ArrowInvalid):
        # Reported where its columns are read.
        return None


def _count_rows(files: Sequence[Path]) -> int | None:
    if files[0].suffix == ".parquet":
        return sum(pq.read_metadata(path).num_rows for path in files)
    if sum(path.stat().st_size for path in files) > _COUNTED:
        return None
    if files[0].suffix == ".csv":
        return count_csv_rows(files)
    count = 0
    for path in files:
        lines = path.read_bytes().splitlines()
        count += sum(bool(line.strip()) for line in lines)
    return count


def _overlap_on_hub(source: str, split: str | None, other: str, other_split: str | None) -> bool:
    try:
        return have_same_hub_rows(source, split, other, other_split)
    except DataError:
        # Reported where its columns are read.
        return False


def _are_apart(split: str | None, other: str | None) -> bool:
    return split is not None and other is not None and split != other


def _share_file(some: set[Identity], others: set[Identity]) -> bool:
    """Whether a file is in both, also under another name: a link of either kind."""
    paths = {path for path, _, _ in some}
    inodes = {(device, inode) for _, device, inode in some if inode}
    return any(path in paths or (device, inode) in inodes for path, device, inode in others)


def _have_copies(some: set[Identity], others: set[Identity]) -> bool:
    """Whether a file has the bytes of another: sizes first, so that few files are read."""
    by_size: dict[int, list[str]] = {}
    for path, _, inode in others:
        if inode:
            by_size.setdefault(os.stat(path).st_size, []).append(path)
    try:
        for path, _, inode in some:
            if inode and _has_copy(path, by_size):
                return True
    except OSError:
        # Reported where its columns are read.
        pass
    return False


def _has_copy(path: str, by_size: Mapping[int, Sequence[str]]) -> bool:
    """Whether a file that is not empty has the bytes of another."""
    size = os.stat(path).st_size
    if size == 0:
        return False
    return any(filecmp.cmp(path, other, shallow=False) for other in by_size.get(size, ()))


def _identify_files(source: str, split: str | None) -> set[Identity]:
    """Identify the files that a source reads; only its path if it cannot be read."""
    try:
        files = find_files(source, split)
    except (DataError, OSError):
        files = [Path(source).expanduser()]
    return {_identify(path) for path in files}


def _identify(path: Path) -> Identity:
    real = os.path.realpath(path)
    try:
        status = os.stat(real)
    except OSError:
        return (real, 0, 0)
    return (real, status.st_dev, status.st_ino)
