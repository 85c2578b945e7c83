"""An edge's rows: its schema, and the newest of what it carried.

Owns: where they are found (recorded/, events/newest/, samples/) and their form in JSON. Does not
own: those files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from dataflow.safe_text import one_line
from engine.keep.reader.flow_index import EVENTS
from engine.keep.reader.open_folder import NotServed, OpenFolder, inside
from engine.keep.reader.plan_records import PlanEdge, PlanFile
from engine.keep.reader.sample_index import SAMPLES, SampleIndex, SampleQuery, opened_table
from engine.keep.reader.sample_rows import shorten_for_json
from engine.watch.run_description import RECORDED, edge_id

ROWS = 16
_RECORDED = re.compile(r"[0-9]{1,18}-[0-9]{1,18}-[0-9]{1,18}-.+\.parquet$")
"""LIFE-FIRST-LAST-WORKER.parquet"""
_KEYS = ("position", "sample", "attempt")
_LARGEST = 32 << 20
"""Bytes of a file of newest rows."""
_LISTED = 32
"""Entries of a list that are shown."""
_IN_SAMPLES = {"prompt": "prompt", "completion": "completion", "version": "versions"}
"""A node's columns that samples have by another name, or by the same."""


def edge_rows(
    run: OpenFolder, plan: PlanFile, index: SampleIndex, edge_name: str
) -> dict[str, Any]:
    """Describe an edge, with its newest rows. Raises NotServed for an edge that the plan does not
    have.
    """
    edge = _find_edge(plan, edge_name)
    source, step, table = _read_newest(run, edge, index)
    rows: list[dict[str, Any]] = []
    if table is not None:
        rows = _list_rows(table, edge)
    return {
        "id": edge_name,
        "producer": edge.producer,
        "consumer": edge.consumer,
        "route": edge.route,
        "columns": _describe_columns(edge, table),
        "bytes_per_row": _bytes_per_row(table),
        "rows": rows,
        "from": source,
        "step": step,
    }


def _find_edge(plan: PlanFile, edge_name: str) -> PlanEdge:
    for edge in plan.edges:
        if edge_id(edge.producer, edge.consumer) == edge_name:
            return edge
    name = one_line(edge_name)[:80]
    raise NotServed(f"the plan has no edge {name}: nothing of it is read, or it is no edge")


def _read_newest(
    run: OpenFolder, edge: PlanEdge, index: SampleIndex
) -> tuple[str, int | None, pa.Table | None]:
    """(where they are from, their Step if known, the newest rows that the producer made)."""
    try:
        newest = _read_recorded(run, edge.producer) or _read_events(run, edge.producer)
    except (pa.ArrowException, OSError) as error:
        raise NotServed(f"rows of {edge.producer}: {error!s:.200}") from error
    return newest or _read_samples(run, edge, index)


def _read_recorded(run: OpenFolder, node: str) -> tuple[str, int | None, pa.Table] | None:
    """Rows of the newest recorded file of a node."""
    with inside(run, RECORDED, quote(node, safe="")) as folder:
        if folder is None:
            return None
        names = [name for name in folder.names() if _RECORDED.match(name)]
        if not names:
            return None
        with opened_table(folder, max(names, key=_age)) as file:
            batch = next(file.iter_batches(batch_size=ROWS, use_threads=False), None)
    if batch is None:
        return None
    return ("recorded", None, pa.Table.from_batches([batch]))


def _age(name: str) -> tuple[int, ...]:
    """A file's life of the run, and its first and last chunk."""
    numbers = name.split("-")[:3]
    return tuple(map(int, numbers))


def _read_events(run: OpenFolder, node: str) -> tuple[str, int | None, pa.Table] | None:
    """The newest rows that a node left in events/newest/."""
    with inside(run, EVENTS, "newest") as folder:
        if folder is not None:
            content = folder.read(f"{node}.arrow", _LARGEST)
        else:
            content = None
    if content is None:
        return None
    with pa.ipc.open_file(content) as file:
        return "newest", None, file.read_all().slice(0, ROWS)


def _read_samples(
    run: OpenFolder, edge: PlanEdge, index: SampleIndex
) -> tuple[str, int | None, pa.Table | None]:
    """The newest samples, with the edge's columns that they have."""
    chosen = index.choose(run, SampleQuery(limit=1))
    if not chosen.rows:
        return "samples", None, None
    name = chosen.rows[0][0]
    with inside(run, SAMPLES) as folder:
        assert folder is not None
        with opened_table(folder, name) as file:
            stored_columns = file.schema_arrow.names
            stored_names = _name_in_samples(edge, stored_columns)
            candidates = dict.fromkeys(("step", "position", "sample", *stored_names.values()))
            names = [name for name in candidates if name in stored_columns]
            batch = next(file.iter_batches(batch_size=ROWS, columns=names, use_threads=False))
    table = pa.Table.from_batches([batch])
    columns: dict[str, pa.ChunkedArray] = {}
    for column, stored_name in stored_names.items():
        if stored_name in names:
            columns[column] = table.column(stored_name)
    step = None
    if "step" in names:
        step = table.column("step")[0].as_py()
    return "samples", step, pa.table(columns)


def _name_in_samples(edge: PlanEdge, stored_columns: list[str]) -> dict[str, str]:
    """The keys and the edge's columns -> what samples call them."""
    names = {"position": "position", "sample": "sample"}
    for column in _columns(edge, stored_columns):
        names[column] = _IN_SAMPLES.get(column, column)
    return names


def _columns(edge: PlanEdge, stored_columns: list[str]) -> Iterator[str]:
    """The edge's columns; of `reward/*` each that there is."""
    for column in edge.columns:
        if column.endswith("*"):
            yield from (name for name in stored_columns if name.startswith(column[:-1]))
        else:
            yield column


def _describe_columns(edge: PlanEdge, table: pa.Table | None) -> list[dict[str, str]]:
    types: dict[str, str] = {}
    if table is not None:
        types = {field.name: str(field.type) for field in table.schema}
    names = dict.fromkeys(_columns(edge, list(types)))
    return [{"name": name, "type": types.get(name, "")} for name in names]


def _list_rows(table: pa.Table, edge: PlanEdge) -> list[dict[str, Any]]:
    """Keys and the edge's columns, row by row."""
    candidates = dict.fromkeys((*_KEYS, *_columns(edge, table.column_names)))
    selected = table.select([name for name in candidates if name in table.column_names])
    rows: list[Mapping[str, Any]] = selected.to_pylist()
    return [_short_row(row) for row in rows]


def _short_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: shorten_for_json(cell, _LISTED) for name, cell in row.items()}


def _bytes_per_row(table: pa.Table | None) -> float | None:
    if table is not None and len(table):
        return table.nbytes / len(table)
    return None
