"""What a run leaves in its folder: metrics, weights, samples; whether two runs were the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.api import Result
from engine.observe.samples import read_samples

Rows = list[dict[str, Any]]


def metrics(run: Path) -> Rows:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(rows: Rows) -> Rows:
    """Without what depends on the clock, or on where Workers are."""
    placed = ("time/", "throughput/", "worker/", "edge/", "coordinator/")
    return [{k: v for k, v in row.items() if not k.startswith(placed)} for row in rows]


def weights(result_or_folder: Any) -> dict[str, bytes]:
    """The bytes of every weight file of the last checkpoint, by path within it."""
    folder = Path(getattr(result_or_folder, "checkpoint", result_or_folder))
    files = sorted(folder.rglob("*.safetensors"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def require_same_runs(one: Result, other: Result) -> None:
    """Metrics but for clock and places, weights and samples of two runs, to the bit."""
    assert timeless(metrics(other.folder)) == timeless(metrics(one.folder))
    assert weights(other) == weights(one)
    assert read_samples(other.folder / "samples").equals(read_samples(one.folder / "samples"))
