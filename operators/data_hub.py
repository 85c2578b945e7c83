"""Data sets of the Hugging Face hub, read by the library `datasets`.

Owns: the `hf:` form of a `data` argument, its splits, its rows as one Arrow table. Does not own:
downloading and caching (the library's), what a column is for (data_shapes.py).
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from dataflow.errors import DataError, nearest

PREFIX = "hf:"
RENAMED = ("prompt", "completion", "messages", "text", "chosen", "rejected")
"""Columns that a setting may name another column for: `prompt=question`."""

_LOADED = ("name", "revision", "data_dir", "data_files")
"""Settings that the library's load_dataset takes, in the order of `HubData.load_arguments`."""

_KNOWN = (*_LOADED, "split", "columns", *RENAMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubData:
    """A data set: its name on the hub or its folder, and its settings."""

    source: str
    path: str
    settings: Mapping[str, str]

    @property
    def load_arguments(self) -> tuple[str, ...]:
        """What the library loads: path, and the settings of it; empty where one is not set."""
        folder = Path(self.path).expanduser()
        path = os.path.realpath(folder) if folder.exists() else self.path
        return (path, *(self.settings.get(name, "") for name in _LOADED))


def is_hub(source: str) -> bool:
    """Whether a `data` argument names a data set for the library `datasets`."""
    return source.startswith(PREFIX)


def read_hub_columns(source: str, split: str | None = None) -> dict[str, pa.DataType]:
    """Read the columns of a data set; loads it first. Raises what read_hub_table raises."""
    hub_data = _parse_source(source)
    splits = _load_splits(hub_data)
    # Raises for a split that is not there.
    _choose_rows(hub_data, split)
    table = _select_columns(hub_data, _make_empty_table(splits))
    return {field.name: field.type for field in table.schema}


def read_hub_table(source: str, split: str | None = None) -> pa.Table:
    """Read the rows of `hf:<name or folder>?name=main&split=train[:100]&prompt=question`.

    Raises DataError for an unknown setting, split or column, if the library cannot load it, and if
    the library is not installed.
    """
    hub_data = _parse_source(source)
    splits = _load_splits(hub_data)
    parts: list[pa.Table] = []
    for name, rows in _choose_rows(hub_data, split):
        if len(rows):
            arrow_split = splits[name].with_format("arrow")
            parts.append(arrow_split.select(range(rows.start, rows.stop))[:])
    if parts:
        table = pa.concat_tables(parts)
    else:
        table = _make_empty_table(splits)
    return _select_columns(hub_data, table)


def _make_empty_table(splits: Mapping[str, Any]) -> pa.Table:
    """No rows, with the columns that all splits have."""
    first_split = next(iter(splits.values()))
    return first_split.features.arrow_schema.empty_table()


def digest_hub_rows(source: str, split: str | None = None) -> str:
    """Digest the rows that are read, whatever their place. Raises what read_hub_table raises."""
    table = read_hub_table(source, split).replace_schema_metadata(None).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return hashlib.sha256(sink.getvalue()).hexdigest()


def count_hub_rows(source: str, split: str | None = None) -> int:
    """Count the rows that are read. Raises DataError if that cannot be known."""
    chosen = _choose_rows(_parse_source(source), split)
    return sum(len(rows) for _, rows in chosen)


def have_same_hub_rows(source: str, split: str | None, other: str, other_split: str | None) -> bool:
    """Whether two sources read rows of one data set that are the same. Raises DataError."""
    one, two = _parse_source(source), _parse_source(other)
    if one.load_arguments != two.load_arguments:
        return False
    chosen_pairs = product(_choose_rows(one, split), _choose_rows(two, other_split))
    for (name, rows), (other_name, other_rows) in chosen_pairs:
        start = max(rows.start, other_rows.start)
        stop = min(rows.stop, other_rows.stop)
        if name == other_name and start < stop:
            return True
    return False


def _parse_source(source: str) -> HubData:
    path, _, query = source.removeprefix(PREFIX).partition("?")
    settings: dict[str, str] = {}
    pairs = query.split("&") if query else []
    for pair in pairs:
        name, _, setting = pair.partition("=")
        if name not in _KNOWN or not setting:
            near = nearest(name, _KNOWN)
            raise DataError(
                f"{source}: expected settings {', '.join(_KNOWN)} with a value, found {pair!r}."
                f" Fix: {near or 'split'}=..."
            )
        settings[name] = unquote(setting)
    if not path:
        raise DataError(
            f"{source}: expected the name of a data set or its folder after {PREFIX!r}, found none."
            " Fix: hf:openai/gsm8k?name=main&split=train."
        )
    return HubData(source=source, path=path, settings=settings)


def _load_splits(hub_data: HubData) -> dict[str, Any]:
    """Split -> the library's data set."""
    try:
        from datasets.exceptions import DatasetsError
    except ModuleNotFoundError as error:
        raise DataError(
            f"{hub_data.source}: needs the library datasets. Fix: pip install 'dataflow-rl[hub]'."
        ) from error
    try:
        return _load(hub_data.load_arguments)
    except (DatasetsError, OSError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise DataError(
            f"{hub_data.source}: the library datasets cannot load it: {type(error).__name__}:"
            f" {problem:.400}. Fix: the name as on the hub, or a folder; {PREFIX}...?name= chooses"
            " a configuration."
        ) from error


@functools.lru_cache(maxsize=8)
def _load(arguments: tuple[str, ...]) -> dict[str, Any]:
    import datasets

    path, name, revision, data_dir, data_files = arguments
    folder = Path(path)
    loaded: Any
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        loaded = datasets.load_from_disk(path)
    else:
        loaded = datasets.load_dataset(
            path,
            name=name or None,
            revision=revision or None,
            data_dir=data_dir or None,
            data_files=data_files or None,
        )
    if isinstance(loaded, datasets.DatasetDict):
        return {str(split): rows for split, rows in loaded.items()}
    return {str(loaded.split or "train"): loaded}


def _choose_rows(hub_data: HubData, split: str | None) -> list[tuple[str, range]]:
    """The splits that are read, and which rows of each, as the library reads `train[:10%]`."""
    from datasets import ReadInstruction

    sizes = {name: len(rows) for name, rows in _load_splits(hub_data).items()}
    spec = _require_split(hub_data, split, sizes)
    try:
        parts = ReadInstruction.from_spec(spec).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        problem = " ".join(str(error).split())
        first = next(iter(sizes))
        raise DataError(
            f"{hub_data.source}: expected a split of {', '.join(sizes)}, or rows of one, found"
            f" {spec!r}: {problem:.200}. Fix: split={first}, or split={first}[:100]."
        ) from error
    return [(part.splitname, _rows_of_part(part, sizes[part.splitname])) for part in parts]


def _require_split(hub_data: HubData, split: str | None, sizes: Mapping[str, int]) -> str:
    """The split of the data's settings, or `split`; the only one if neither names one. Raises
    DataError if both do, and if one of several has to be chosen.
    """
    split_in_data = hub_data.settings.get("split")
    if split_in_data is not None:
        if split is not None and split != split_in_data:
            raise DataError(
                f"{hub_data.source}: expected one split, found split={split_in_data} in it and"
                f" split={split!r} beside it. Fix: leave one out."
            )
        return split_in_data
    if split is not None:
        return split
    first = next(iter(sizes))
    if len(sizes) > 1:
        separator = "&" if hub_data.settings else "?"
        raise DataError(
            f"{hub_data.source}: has the splits {', '.join(sizes)}, and none was chosen. Fix:"
            f" {hub_data.source}{separator}split={first}."
        )
    return first


def _rows_of_part(part: Any, size: int) -> range:
    """The rows of a split that a part of the library's instruction names; it may reach too far."""
    start = part.from_ or 0
    stop = size
    if part.to is not None:
        stop = min(part.to, size)
    return range(start, max(start, stop))


def _select_columns(hub_data: HubData, table: pa.Table) -> pa.Table:
    """Select the columns that were asked for, under the names that were asked for."""
    settings = hub_data.settings
    new_names = {settings[new]: new for new in RENAMED if new in settings}
    for name in new_names:
        _require_column(hub_data, name, table.column_names)
    for name, new in new_names.items():
        if new in table.column_names and new != name and new not in new_names:
            raise DataError(
                f"{hub_data.source}: {new}={name} is asked for, and there is a column {new!r}. Fix:"
                f" leave {new}= out, or name {new!r} for another."
            )
    table = table.rename_columns([new_names.get(name, name) for name in table.column_names])
    if "columns" in settings:
        requested = [name.strip() for name in settings["columns"].split(",")]
        for name in requested:
            _require_column(hub_data, name, table.column_names)
        selected = {*requested, *new_names.values()}
        table = table.select([name for name in table.column_names if name in selected])
    return pa.table({name: _to_storage(table.column(name)) for name in table.column_names})


def _to_storage(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Extension types, which the library has for images and tables, do not travel on edges."""
    if isinstance(column.type, pa.BaseExtensionType):
        return column.cast(column.type.storage_type)
    return column


def _require_column(hub_data: HubData, name: str, names: list[str]) -> None:
    if name not in names:
        near = nearest(name, names)
        raise DataError(
            f"{hub_data.source}: no column {name!r}, it has: {', '.join(names)}. Fix:"
            f" {near or 'one of these'}."
        )
