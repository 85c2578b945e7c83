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
    """All of an edge. Raises NotServed for an edge that the plan does not have."""
    edge = next((e for e in plan.edges if edge_id(e.producer, e.consumer) == edge_name), None)
    if edge is None:
        name = one_line(edge_name)[:80]
        raise NotServed(f"the plan has no edge {name}: nothing of it is read, or it is no edge")
    source, step, table = _table(run, edge, index)
    if table is None:
        rows = []
    else:
        rows = _rows(table, edge)
    return {
        "id": edge_name,
        "producer": edge.producer,
        "consumer": edge.consumer,
        "route": edge.route,
        "columns": _schema(edge, table),
        "bytes_per_row": _per_row(table),
        "rows": rows,
        "from": source,
        "step": step,
    }


def _table(
    run: OpenFolder, edge: PlanEdge, index: SampleIndex
) -> tuple[str, int | None, pa.Table | None]:
    """(where they are from, their Step if known, the newest rows that the producer made)."""
    try:
        newest = _recorded(run, edge.producer) or _newest(run, edge.producer)
    except (pa.ArrowException, OSError) as error:
        raise NotServed(f"rows of {edge.producer}: {error!s:.200}") from error
    return newest or _of_samples(run, edge, index)


def _recorded(run: OpenFolder, node: str) -> tuple[str, int | None, pa.Table] | None:
    """Rows of the newest recorded file of a node."""
    with inside(run, RECORDED, quote(node, safe="")) as folder:
        if folder is not None:
            names = [n for n in folder.names() if _RECORDED.match(n)]
        else:
            names = []
        if folder is None or not names:
            return None
        with opened_table(folder, max(names, key=_age)) as file:
            table = next(file.iter_batches(batch_size=ROWS, use_threads=False), None)
    if table is None:
        return None
    return ("recorded", None, pa.Table.from_batches([table]))


def _age(name: str) -> tuple[int, ...]:
    """A file's life of the run, and its first and last chunk."""
    return tuple(int(part) for part in name.split("-")[:3])


def _newest(run: OpenFolder, node: str) -> tuple[str, int | None, pa.Table] | None:
    with inside(run, EVENTS, "newest") as folder:
        if folder is not None:
            content = folder.read(f"{node}.arrow", _LARGEST)
        else:
            content = None
    if content is None:
        return None
    with pa.ipc.open_file(content) as file:
        return "newest", None, file.read_all().slice(0, ROWS)


def _of_samples(
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
            named = {c: _IN_SAMPLES.get(c, c) for c in _columns(edge, stored_columns)}
            wanted = [*("step", "position", "sample"), *dict.fromkeys(named.values())]
            wanted = [c for c in wanted if c in stored_columns]
            batch = next(file.iter_batches(batch_size=ROWS, columns=wanted, use_threads=False))
    table = pa.Table.from_batches([batch])
    columns = {n: table.column(n) for n in ("position", "sample") if n in wanted}
    columns |= {c: table.column(of) for c, of in named.items() if of in wanted}
    if "step" in wanted:
        step = table.column("step")[0].as_py()
    else:
        step = None
    return "samples", step, pa.table(columns)


def _columns(edge: PlanEdge, stored_columns: list[str]) -> Iterator[str]:
    """The edge's columns; of `reward/*` each that there is."""
    for column in edge.columns:
        if column.endswith("*"):
            yield from (name for name in stored_columns if name.startswith(column[:-1]))
        else:
            yield column


def _schema(edge: PlanEdge, table: pa.Table | None) -> list[dict[str, str]]:
    if table is not None:
        known = {f.name: str(f.type) for f in table.schema}
    else:
        known = {}
    names = dict.fromkeys(_columns(edge, list(known)))
    return [{"name": name, "type": known.get(name, "")} for name in names]


def _rows(table: pa.Table, edge: PlanEdge) -> list[dict[str, Any]]:
    """Keys and the edge's columns, row by row."""
    names = [n for n in (*_KEYS, *_columns(edge, table.column_names)) if n in table.column_names]
    selected = table.select(list(dict.fromkeys(names)))
    rows: list[Mapping[str, Any]] = selected.to_pylist()
    return [_short_row(row) for row in rows]


def _short_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: shorten_for_json(cell, _LISTED) for name, cell in row.items()}


def _per_row(table: pa.Table | None) -> float | None:
    if table is not None and len(table):
        return table.nbytes / len(table)
    return None
