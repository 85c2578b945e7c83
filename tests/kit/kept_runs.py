"""Run folders that are written by hand: what a killed, running or finished run leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.graph import Graph
from dataflow.snapshot import to_json
from engine.plan import options as run_options
from engine.plan.options import RunOptions


def kept_run(
    path: Path,
    graph: Graph | None = None,
    *,
    options: RunOptions | None = None,
    imports: Sequence[str] = (),
    rows: Sequence[Mapping[str, Any]] = (),
    torn: str = "",
    ended: Mapping[str, Any] | None = None,
    written: float | None = None,
) -> Path:
    """A run folder; `torn` is the beginning of a line that was never written to its end."""
    path.mkdir(parents=True)
    (path / "versions.json").write_text("{}")
    if graph is not None:
        (path / "graph.json").write_text(to_json(graph))
    if options is not None:
        (path / "options.json").write_text(run_options.encode_options(options, path=imports))
    if rows or torn:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (path / "metrics.jsonl").write_text(lines + torn)
    if ended is not None:
        (path / "ended.json").write_text(json.dumps(ended))
    if written is not None:
        for file in path.iterdir():
            os.utime(file, (written, written))
    return path
