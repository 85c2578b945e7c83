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
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from dataflow.errors import DataError, nearest

PREFIX = "hf:"
RENAMED = ("prompt", "completion", "messages", "text", "chosen", "rejected")
"""Columns that a setting may name another column for: `prompt=question`."""

_LOADED = ("name", "revision", "data_dir", "data_files")
"""Settings that the library's load_dataset takes."""

_KNOWN = (*_LOADED, "split", "columns", *RENAMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubData:
    """A data set: its name on the hub or its folder, and its settings."""

    data: str
    path: str
    settings: Mapping[str, str]

    @property
    def source(self) -> tuple[str, ...]:
        """What the library loads: path, and the settings of it."""
        folder = Path(self.path).expanduser()
        path = os.path.realpath(folder) if folder.exists() else self.path
        return (path, *(self.settings.get(name, "") for name in _LOADED))


def is_hub(data: str) -> bool:
    """Whether a `data` argument names a data set for the library `datasets`."""
    return data.startswith(PREFIX)


def hub_columns(data: str, split: str | None = None) -> dict[str, pa.DataType]:
    """The columns of a data set; loads it first. Raises what hub_table raises."""
    asked = _asked(data)
    features = next(iter(_splits(asked).values())).features
    schema = features.arrow_schema
    _chosen(asked, split)
    return {f.name: f.type for f in _selected(asked, schema.empty_table()).schema}


def hub_table(data: str, split: str | None = None) -> pa.Table:
    """The rows of `hf:<name or folder>?name=main&split=train[:100]&prompt=question`.

    Raises DataError for an unknown setting, split or column, if the library cannot load it, and if
    the library is not installed.
    """
    asked = _asked(data)
    splits = _splits(asked)
    parts = [
        splits[name].with_format("arrow").select(range(rows.start, rows.stop))[:]
        for name, rows in _chosen(asked, split)
        if len(rows)
    ]
    empty = next(iter(splits.values())).features.arrow_schema.empty_table()
    return _selected(asked, pa.concat_tables(parts) if parts else empty)


def hub_digest(data: str, split: str | None = None) -> str:
    """The digest of the rows that are read, whatever their place. Raises what hub_table raises."""
    table = hub_table(data, split).replace_schema_metadata(None).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return hashlib.sha256(sink.getvalue()).hexdigest()


def hub_rows(data: str, split: str | None = None) -> int:
    """How many rows are read. Raises DataError if that cannot be known."""
    return sum(len(rows) for _, rows in _chosen(_asked(data), split))


def same_hub_rows(data: str, split: str | None, other: str, other_split: str | None) -> bool:
    """Whether two sources read rows of one data set that are the same. Raises DataError."""
    one, two = _asked(data), _asked(other)
    if one.source != two.source:
        return False
    return any(
        a == b and max(some.start, more.start) < min(some.stop, more.stop)
        for a, some in _chosen(one, split)
        for b, more in _chosen(two, other_split)
    )


def _asked(data: str) -> HubData:
    path, _, query = data.removeprefix(PREFIX).partition("?")
    settings = {}
    for pair in query.split("&") if query else ():
        name, _, value = pair.partition("=")
        if name not in _KNOWN or not value:
            near = nearest(name, _KNOWN)
            raise DataError(
                f"{data}: expected settings {', '.join(_KNOWN)} with a value, found {pair!r}. Fix:"
                f" {near or 'split'}=..."
            )
        settings[name] = unquote(value)
    if not path:
        raise DataError(
            f"{data}: expected the name of a data set or its folder after {PREFIX!r}, found none."
            " Fix: hf:openai/gsm8k?name=main&split=train."
        )
    return HubData(data=data, path=path, settings=settings)


def _splits(asked: HubData) -> dict[str, Any]:
    """Split -> the library's data set."""
    try:
        from datasets.exceptions import DatasetsError
    except ModuleNotFoundError as error:
        raise DataError(
            f"{asked.data}: needs the library datasets. Fix: pip install 'dataflow-rl[hub]'."
        ) from error
    try:
        return _load(asked.source)
    except (DatasetsError, OSError, ValueError) as error:
        told = " ".join(str(error).split())
        raise DataError(
            f"{asked.data}: the library datasets cannot load it: {type(error).__name__}:"
            f" {told:.400}. Fix: the name as on the hub, or a folder; {PREFIX}...?name= chooses a"
            " configuration."
        ) from error


@functools.lru_cache(maxsize=8)
def _load(source: tuple[str, ...]) -> dict[str, Any]:
    import datasets

    path, *given = source
    folder = Path(path)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        found: Any = datasets.load_from_disk(path)
    else:
        settings: dict[str, Any] = {
            name: value for name, value in zip(_LOADED, given, strict=True) if value
        }
        found = datasets.load_dataset(path, **settings)
    if isinstance(found, datasets.DatasetDict):
        return {str(name): rows for name, rows in found.items()}
    return {str(found.split or "train"): found}


def _chosen(asked: HubData, split: str | None) -> list[tuple[str, range]]:
    """The splits that are read, and which rows of each, as the library reads `train[:10%]`."""
    from datasets import ReadInstruction

    sizes = {name: len(rows) for name, rows in _splits(asked).items()}
    own = asked.settings.get("split")
    if own is not None and split is not None and own != split:
        raise DataError(
            f"{asked.data}: expected one split, found split={own} in it and split={split!r} beside"
            " it. Fix: leave one out."
        )
    wanted = own if own is not None else split
    if wanted is None:
        if len(sizes) > 1:
            first = next(iter(sizes))
            raise DataError(
                f"{asked.data}: has the splits {', '.join(sizes)}, and none was chosen. Fix:"
                f" {asked.data}{'&' if asked.settings else '?'}split={first}."
            )
        wanted = next(iter(sizes))
    try:
        parts = ReadInstruction.from_spec(wanted).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        told = " ".join(str(error).split())
        raise DataError(
            f"{asked.data}: expected a split of {', '.join(sizes)}, or rows of one, found"
            f" {wanted!r}: {told:.200}. Fix: split={next(iter(sizes))}, or"
            f" split={next(iter(sizes))}[:100]."
        ) from error
    return [(p.splitname, range(p.from_ or 0, max(p.from_ or 0, _end(p, sizes)))) for p in parts]


def _end(part: Any, sizes: Mapping[str, int]) -> int:
    return sizes[part.splitname] if part.to is None else min(part.to, sizes[part.splitname])


def _selected(asked: HubData, table: pa.Table) -> pa.Table:
    """The columns that were asked for, under the names that were asked for."""
    names = {asked.settings[n]: n for n in RENAMED if n in asked.settings}
    for name in names:
        _require(asked, name, table.column_names)
    for name, new in names.items():
        if new in table.column_names and new != name and new not in names:
            raise DataError(
                f"{asked.data}: {new}={name} is asked for, and there is a column {new!r}. Fix:"
                f" leave {new}= out, or name {new!r} for another."
            )
    table = table.rename_columns([names.get(name, name) for name in table.column_names])
    if "columns" in asked.settings:
        kept = [name.strip() for name in asked.settings["columns"].split(",")]
        for name in kept:
            _require(asked, name, table.column_names)
        table = table.select([n for n in table.column_names if n in kept or n in names.values()])
    return pa.table({n: _stored(table.column(n)) for n in table.column_names})


def _stored(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Extension types, which the library has for images and tables, do not travel on edges."""
    kind = values.type
    return values.cast(kind.storage_type) if isinstance(kind, pa.BaseExtensionType) else values


def _require(asked: HubData, name: str, there: list[str]) -> None:
    if name not in there:
        near = nearest(name, there)
        raise DataError(
            f"{asked.data}: no column {name!r}, it has: {', '.join(there)}. Fix:"
            f" {near or 'one of these'}."
        )
