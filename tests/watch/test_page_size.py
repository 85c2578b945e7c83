"""A long run on the page: the server's memory hardly grows with it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from engine.keep.samples import SampleWriter
from tests.kit.page_client import PageClient, served
from tests.kit.watched import flow, sample_rows, watched_run, write_flows

STEPS, METRICS, NODES, SAMPLES = 30_000, 80, 20, 32_000
MOST = 60 << 20
"""Bytes by which the server's memory may grow (it grew by 45 MiB); the metrics alone have more."""


@pytest.mark.long
@pytest.mark.repeats
@pytest.mark.usefixtures("own_interpreters")  # a fork's memory has what it shares
@pytest.mark.timeout(480)
def test_millions_of_figures_take_less_memory_than_their_file(tmp_path: Path) -> None:
    run = watched_run(tmp_path / "big", steps=1, samples=0, events=False)
    names = [f"group{i % 10}/metric_{i}" for i in range(METRICS)]
    values = random.Random(0)
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, STEPS + 1):
            row = {"step": step} | {name: values.random() for name in names}
            file.write(json.dumps(row) + "\n")
    write_flows(run / "events", (flow(step, nodes=NODES) for step in range(1, STEPS + 1)))
    writer = SampleWriter(run / "samples", every=STEPS // 1000)
    for step in range(STEPS // 1000, STEPS + 1, STEPS // 1000):
        writer.write(step, sample_rows(step, SAMPLES // 1000))
    assert (run / "metrics.jsonl").stat().st_size > MOST
    watched_run(tmp_path / "small", steps=1)
    with served(tmp_path) as page:
        for question in ("series?names=loss/x", "flow?from=1", "samples?q=gamma"):
            page.json(f"/api/runs/small/{question}")  # what it imports is no growth
        before = peak(page.process.pid)
        ask_everything(page, names)
        assert peak(page.process.pid) - before < MOST


def ask_everything(page: PageClient, names: list[str]) -> None:
    assert len(page.json("/api/runs/big")["metrics"]) == METRICS
    for first in range(0, METRICS, 10):
        found = page.json(f"/api/runs/big/series?names={','.join(names[first : first + 10])}")
        assert len(found["steps"]) == 2000
    whole = page.json("/api/runs/big/flow?from=1")["flow"]
    assert whole["nodes"]["score@data"]["rows"] == 16 * STEPS
    assert len(page.json("/api/runs/big/lanes")["workers"]["gen"]["steps"]) == 500
    found = page.json("/api/runs/big/samples")
    while found["read"] < found["files"]:
        found = page.json("/api/runs/big/samples?order=best")
    assert found["total"] == SAMPLES
    while found["total"] != SAMPLES // 4:
        found = page.json("/api/runs/big/samples?q=gamma")


def peak(pid: int) -> int:
    """Bytes: the greatest resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024
