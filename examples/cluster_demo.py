"""A node of a Ray cluster dies, and the run goes on to the same numbers.

    python examples/cluster_demo.py            (or: make cluster-demo)

Simulates two nodes on this machine, trains across them with GRPO, kills the node that generates
and adds another one. The run goes on by itself. Then the same run in one process, undisturbed:
metrics and weights have to be equal to the bit. About a minute; needs `pip install
'dataflow-rl[ray]'`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import tiny
from ray.cluster_utils import Cluster
from user_reward import graph

from engine.api import Result, run

PLACED = (
    *("time/", "cpu/", "queue/", "throughput/", "worker/", "edge/", "coordinator/", "weights/"),
)
"""Metrics of the clock and of where Workers are; all others have to be equal."""
BEGAN = time.monotonic()


def say(text: str) -> None:
    """A line, with the seconds since the beginning."""
    print(f"{time.monotonic() - BEGAN:5.1f} s  {text}", flush=True)


def below(process: int) -> Iterator[int]:
    """All processes that a process has started, and theirs, the last ones first."""
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            yield from below(child)
            yield child


class Nodes:
    """Simulated nodes of one core each: `trainer`, on which this process is, and `generator`."""

    def __init__(self) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)
        head = {"num_cpus": 1, "node_name": "trainer", "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._generator: Any = self._cluster.add_node(num_cpus=1, node_name="generator")
        os.environ["RAY_ADDRESS"] = str(self._cluster.address)

    def replace_generator(self) -> None:
        """Kill the node that generates with all that is on it, and add another one."""
        raylet = self._generator.all_processes["raylet"][0].process.pid
        killed = [*below(raylet), raylet]
        for process in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._cluster.remove_node(self._generator, allow_graceful=False)
        say(f"the node `generator` is dead: its {len(killed)} processes were killed")
        self._cluster.add_node(num_cpus=1, node_name="substitute")
        say("the node `substitute` is there")

    def close(self) -> None:
        """Leave the cluster, and end all nodes."""
        ray.shutdown()
        self._cluster.shutdown()
        del os.environ["RAY_ADDRESS"]


def disturbed(steps: int) -> Result:
    """The run across the nodes, of which one dies half-way."""
    nodes = Nodes()
    say("two nodes are there: `trainer` trains, `generator` generates")

    def after(metrics: Mapping[str, float]) -> None:
        say(f"Step {metrics['step']:.0f} is trained, reward {metrics['reward/mean']:.3f}")
        if metrics["step"] == steps // 2:
            nodes.replace_generator()

    options = replace(
        tiny.options("cluster_demo", steps=steps),
        cluster="ray",
        pin={"rollout": "gen@generator", "train_policy": "train"},
        lease=10.0,
    )
    try:
        return run(graph(), options, on_step=[after])
    finally:
        nodes.close()


def numbers(result: Result) -> list[dict[str, float]]:
    """Every Step's metrics that have to be equal."""
    lines = (result.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    return [{k: v for k, v in row.items() if not k.startswith(PLACED)} for row in rows]


def digest(result: Result) -> str:
    """The SHA-256 of the weights at the end."""
    files = sorted(result.trained["policy"].glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def main(steps: int = 8) -> Result:
    """Both runs, and the comparison. Raises SystemExit if they differ."""
    over = disturbed(steps)
    say("the run has ended; now the same in one process, undisturbed")
    alone = run(graph(), tiny.options("cluster_demo_alone", steps=steps))
    say(f"weights across the nodes  {digest(over)}")
    say(f"weights in one process    {digest(alone)}")
    if numbers(over) != numbers(alone) or digest(over) != digest(alone):
        raise SystemExit(f"they differ: dataflow diff {over.folder} {alone.folder}")
    say(f"all metrics of {steps} Steps and the weights are the same to the bit")
    return over


if __name__ == "__main__":
    main()
