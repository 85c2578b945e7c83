"""What several hosts cost: control messages through Ray, a replica that joins, and the loss of a
host, of a node and of the run's own process.

    python -m benchmarks.hosts [--quick] [--json FILE]

Owns: the measurements, on a Ray cluster of two simulated nodes of this machine. Does not own: the
cluster (tests/kit/ray_clusters.py), how results are shown (report.py).

A round trip is a request without Workers: from the loop to the part of the run on the other host,
and back. Bytes of a Step are those of a small GRPO run whose generation is on the other host; over
links of our own the same run had OWN_LINKS (commit b43574e, `dataflow host` on a loopback address).
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from benchmarks.report import SideResult, machine, show, write_json
from engine.api import run
from engine.keep.run_folder import RunFolder
from engine.keep.trace.timeline import read_trace
from engine.plan.options import RunOptions
from engine.run.control import host_messages as hm
from engine.run.hosts.hosts import HostsWorkers
from engine.run.hosts.ray import cluster, join_cluster
from tests.kit import host_plans, killable_run
from tests.kit.processes import ended, wait_for
from tests.kit.ray_clusters import RayNodes, ray_cluster, require_nothing_runs
from tests.kit.run_graphs import small
from tests.kit.runs import metrics, require_same_numbers
from tests.kit.tiny_runs import save_tiny_inputs

OWN_LINKS = 13_894.0
LEASE = 10.0
JOINS = ("imports", "open", "load policy", "rollout")
PIN = {"rollout": "gen@b", "train_policy": "train"}


def main(*, quick: bool = False, json: Path | None = None) -> None:
    """Measure, show, and write the numbers."""
    where = machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny_inputs(folder)
        found = [*control(200 if quick else 2000), *steps(folder, 10 if quick else 40)]
        found += [*joins(folder), *losses(folder)]
    show("several hosts", found, where)
    if json is not None:
        write_json(json, found, where)


# --- control --------------------------------------------------------------------------------------


def control(count: int) -> Iterator[SideResult]:
    """Round trips one after another, and many at once."""
    with two_hosts() as workers:
        remote = workers._remotes["b"]

        def ask(number: int) -> None:
            remote.send(hm.RelayRequest(number=number, workers=(), requests=()))

        def hear(number: int) -> None:
            workers._until(lambda: number in remote.replies)

        trips = []
        for number in range(1, count):
            began = time.perf_counter()
            ask(-number)
            hear(-number)
            trips.append(time.perf_counter() - began)
        began = time.perf_counter()
        for number in range(count, 3 * count):
            ask(-number)
        hear(1 - 3 * count)
        rate = 2 * count / (time.perf_counter() - began)
    median = statistics.median(trips) * 1e3
    yield SideResult(name="round trip", value=median, unit="ms", goal=2.0, least=False)
    yield SideResult(name="messages", value=rate, unit="a second", goal=1000.0)


@contextmanager
def two_hosts() -> Iterator[HostsWorkers]:
    """Workers of two nodes, of kernels of nothing."""
    with ray_cluster(), tempfile.TemporaryDirectory() as name:
        join_cluster("ray")
        plan = replace(host_plans.plan(), cluster=cluster([]), hosts={"source": "a", "host": "b"})
        with RunFolder.create("control", name) as folder:
            folder.write_text("plan.json", plan.to_json())
            workers = HostsWorkers(plan, folder, RunOptions(cluster="ray"))
            try:
                list(workers.open())
                yield workers
            finally:
                workers.close()


def steps(folder: Path, count: int) -> Iterator[SideResult]:
    """Bytes of control messages a Step."""
    with ray_cluster():
        found = run(small(folder), options(folder, "bytes", count))
    rows = [row["coordinator/bytes"] for row in metrics(found)]
    ratio = statistics.median(rows) / OWN_LINKS
    yield SideResult(name="bytes a Step / own links", value=ratio, unit="", goal=1.2, least=False)


def options(folder: Path, name: str, count: int, **more: Any) -> RunOptions:
    """Of a run whose generation is on the other host."""
    usual: dict[str, Any] = {"threads": 1, "progress": False, "checkpoint_every": 2}
    where: dict[str, Any] = {"pin": PIN, "cluster": "ray", "lease": LEASE}
    given = usual | where | more
    return RunOptions(steps=count, name=name, runs=folder / "runs", overwrite=True, **given)


def joins(folder: Path) -> Iterator[SideResult]:
    """A second replica joins a run at max_lag 1: from the moment it is open to its first rows,
    without the loading of weights; and what came before, mostly imports.
    """
    rows: list[float] = []

    def long_enough(row: Mapping[str, float]) -> bool:
        rows.append(row["replicas/rollout"])
        return rows.count(2.0) == 40

    more: dict[str, Any] = {"pin": {}, "replicas": {"rollout": "1..2"}, "scaling": "most"}
    with ray_cluster():
        graph = small(folder, max_lag=1)
        found = run(graph, options(folder, "joins", 100_000, **more), until=long_enough)
    (trace,) = (found.folder / "trace").iterdir()
    spans = list(read_trace(trace))
    (joined,) = (e["pid"] for e in spans if e["ph"] == "M" and e["args"]["name"] == "rollout-1")
    own = [e for e in spans if e["ph"] == "X" and e["pid"] == joined]
    first = {name: next(e for e in own if e["name"] == name) for name in JOINS}
    opened = (first["open"]["ts"] + first["open"]["dur"]) / 1e6
    rows_at = (first["rollout"]["ts"] + first["rollout"]["dur"]) / 1e6
    value = rows_at - opened - first["load policy"]["dur"] / 1e6
    yield SideResult(name="open to first rows", value=value, unit="s", goal=2.0, least=False)
    before = opened - first["imports"]["ts"] / 1e6
    yield SideResult(name="its process opens", value=before, unit="s")


# --- losses ---------------------------------------------------------------------------------------


def losses(folder: Path) -> Iterator[SideResult]:
    """A host's process, its node and the run's process are killed."""
    alone = run(small(folder), options(folder, "alone", 6, pin={}, cluster=None, workers="one"))
    for what, pin, bounds in (
        ("host's process", PIN, (2.0, 2.0, 60.0)),
        ("node", PIN, (10.0, 10.0, 60.0)),
        ("node of training", {"score": "main@a", "train_policy": "train@b"}, (10.0, 10.0, 60.0)),
    ):
        with ray_cluster() as nodes:
            killed = KilledThere(nodes, what)
            logging.getLogger("engine").addHandler(killed)
            found = run(small(folder), options(folder, "killed", 6, pin=pin), on_step=[killed.step])
            logging.getLogger("engine").removeHandler(killed)
            require_same_numbers(found, alone)
            for (name, value), goal in zip(killed.seconds().items(), bounds, strict=True):
                named = f"{what} killed: {name}"
                yield SideResult(name=named, value=value, unit="s", goal=goal, least=False)
    yield driver(folder)


class KilledThere(logging.Handler):
    """Kills what is on host b after Step 3, and watches what becomes of it."""

    def __init__(self, nodes: RayNodes, what: str) -> None:
        super().__init__(logging.WARNING)
        self._nodes, self._what = nodes, what
        self._at: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """The run has something to say of the host."""
        if self._at and "host b" in record.getMessage():
            self._at.setdefault("noticed", time.monotonic())

    def step(self, row: Mapping[str, float]) -> None:
        """Of each Step."""
        if row["step"] == 3 and not self._at:
            self._kill()
        elif row["step"] > 3:
            self._at.setdefault("goes on", time.monotonic())

    def _kill(self) -> None:
        nodes = self._nodes
        worker = "train" if "training" in self._what else "gen"
        host, pid = nodes.host_of(worker), nodes.workers()[worker]
        self._at["killed"] = time.monotonic()
        if "node" in self._what:
            nodes.remove("b")
        else:
            os.kill(host, signal.SIGKILL)
        ended(pid, 60.0)
        self._at["gone"] = time.monotonic()
        if "node" in self._what:
            nodes.add("c")

    def seconds(self) -> dict[str, float]:
        """Since the kill."""
        began = self._at["killed"]
        return {name: self._at[name] - began for name in ("noticed", "gone", "goes on")}


def driver(folder: Path) -> SideResult:
    """The run's process is killed: how long until nothing of it is left."""
    with ray_cluster() as nodes:
        given = options(folder, "driver", 10_000)
        with killable_run.killable_run("small", folder, given) as process:
            wait_for(process, "step 2")
            process.kill()
            took = require_nothing_runs(nodes, 60.0)
    goal = LEASE + 10.0
    return SideResult(name="run killed: all gone", value=took, unit="s", goal=goal, least=False)


if __name__ == "__main__":
    tyro.cli(main)
