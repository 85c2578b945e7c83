"""Run folders for the page, of any size: Flows, samples and metrics that are written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from engine.keep.flow.records import CutFlow, EdgeFlow, Flow, ReplicaFlow, WorkerFlow
from engine.keep.flow.segments import LiveSegments, StepSegments
from engine.keep.samples import SampleWriter
from tests.kit.kept_runs import kept_run

WORDS = ("alpha", "beta", "gamma", "delta")


def plan_of(nodes: Mapping[str, str], workers: Mapping[str, list[str]]) -> dict[str, Any]:
    """A plan.json: work by node, and the Workers of each."""
    names = list(nodes)
    return {
        "format": 1,
        "graph": "small",
        "seed": 0,
        "nodes": [
            {
                "name": name,
                "operator": name,
                "work": work,
                "workers": workers[name],
                "layout": {"data": 1, "tensor": 1, "context": 1, "threads": 1},
                "estimate": {"bytes": {"outbox": 1000}, "seconds": 0.5},
            }
            for name, work in nodes.items()
        ],
        "edges": [
            {"producer": a, "consumer": b, "columns": ["completion"], "bytes": 10, "route": "shm"}
            for a, b in pairwise(names)
        ],
        "models": [{"name": "policy", "writer": names[-1], "readers": [names[0]]}],
        "sources": [{"name": names[0], "batch": 4}],
        "hosts": {},
        "devices": {},
    }


SMALL = plan_of(
    {"rollout": "decode", "score": "host", "train_policy": "train"},
    {"rollout": ["gen"], "score": ["data"], "train_policy": ["train"]},
)


def flow(step: int, *, seconds: float = 1.0, nodes: int = 3, wall: float = 0.0) -> Flow:
    """A Step in which train_policy waits for score, which waits for nothing."""
    figures = {
        "rollout@gen": ReplicaFlow(
            busy=0.3 * seconds, for_room=0.7 * seconds, blames={"score": 0.7 * seconds}, rows=16
        ),
        "score@data": ReplicaFlow(busy=0.9 * seconds, idle=0.1 * seconds, rows=16),
        "train_policy@train": ReplicaFlow(
            busy=0.25 * seconds, for_rows=0.75 * seconds, blames={"score": 0.75 * seconds}, rows=16
        ),
    }
    more = (f"more{i}@w{i % 8}" for i in range(nodes - 3))
    figures |= {name: ReplicaFlow(busy=0.5, idle=0.5, rows=step, chunks=2) for name in more}
    return Flow(
        step=step,
        start=(step - 1) * seconds,
        end=step * seconds,
        wall=wall or 1e9 + step,
        nodes=figures,
        edges={"rollout->score": EdgeFlow(rows=16, bytes=1600, waiting_rows=3)},
        cuts={"rollout": CutFlow(ready=2, wanted=4)},
        workers={"gen": WorkerFlow(memory=1 << 20, peak=2 << 20)},
    )


def watched_run(
    path: Path,
    *,
    steps: int = 6,
    samples: int = 4,
    events: bool = True,
    ended: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] = SMALL,
) -> Path:
    """A run of few Steps with all that the page reads; samples: rows a Step."""
    rows = [{"step": s, "reward/mean": s / 10, "loss/x": 1.0 / s} for s in range(1, steps + 1)]
    kept_run(path, rows=rows, ended=ended)
    (path / "plan.json").write_text(json.dumps(plan, indent=1))
    (path / "plan.txt").write_text("small\n")
    (path / "options.json").write_text(json.dumps({"steps": steps, "seed": 0, "name": path.name}))
    (path / "logs").mkdir()
    (path / "logs" / "gen.log").write_text("one\nred \x1b[31m line\n")
    if events:
        write_flows(path / "events", (flow(step) for step in range(1, steps + 1)))
        live = LiveSegments(path / "events")
        live.write(flow(steps, wall=1e9 + steps))
        live.close()
    if samples:
        writer = SampleWriter(path / "samples")
        for step in range(1, steps + 1):
            writer.write(step, sample_rows(step, samples))
    return path


def write_flows(folder: Path, flows: Iterator[Flow]) -> None:
    """Into segments of Steps."""
    segments = StepSegments(folder)
    for each in flows:
        segments.write(each)
    segments.close()


def sample_rows(step: int, rows: int, *, length: int = 3) -> pa.Table:
    """Samples of two prompts a Step, of which one is the same in all Steps."""
    numbers = np.arange(rows)
    return pa.table(
        {
            "node": ["train_policy"] * rows,
            "position": pa.array(step * 2 + numbers % 2, pa.int64()),
            "sample": pa.array(numbers // 2, pa.int32()),
            "prompt": ["always" if n % 2 == 0 else f"prompt {step}" for n in range(rows)],
            "completion": [f"{WORDS[n % 4]} <script>{step}.{n}</script>" for n in range(rows)],
            "reward": pa.array((step + numbers) % 10 / 10, pa.float32()),
            "length": pa.array(numbers + length, pa.int32()),
            "finish": ["stop" if n % 3 else "length" for n in range(rows)],
            "completion_ids": pa.array([[1, 2, 3]] * rows, pa.large_list(pa.int32())),
        }
    )
