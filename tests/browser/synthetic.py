"""Run folders that no run made: the same bytes of numbers on every machine, for tests of the page.

Owns: their plan (of a described machine), metrics, flows, samples. Does not own: the forms of these
files, which are the engine's.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataflow.program_snapshot import write_snapshot
from engine.keep.flow.records import (
    CutFlow,
    EdgeFlow,
    Flow,
    ReplicaFlow,
    Tombstones,
    WeightFlow,
    WorkerFlow,
)
from engine.keep.flow.segments import StepSegments
from engine.keep.run_folder import RunFolder
from engine.keep.samples import SampleWriter
from engine.plan import options as run_options
from engine.plan.cluster import Cluster
from engine.plan.explain import explain
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from graphs.grpo import grpo
from tests.kit.plans import planned_on, save_tiny_header
from tests.kit.run_graphs import vowels

BEGAN = 1_767_225_600.0
"""2026-01-01, 00:00 UTC."""
SECONDS = 2.5
"""Of a Step."""
PROMPTS, ANSWERS = 4, 4
SCRIPT = "<script>alert(1)</script>"
"""A completion that is text, whatever it looks like."""
_WORDS = ("so", "the", "sum", "of", "both", "is", "then", "clearly", "that", "number", "we", "want")
_CALL = {"function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a synthetic run is like. ended: the content of ended.json; None: without a word."""

    name: str
    steps: int = 60
    lr: float = 1e-3
    seed: int = 0
    ended: dict[str, str] | None = None


FINISHED = {"state": "finished", "reason": "all steps are done"}
_CAUSE = "LookupError: a prompt that begins with a"
FAILED = {"state": "failed", "reason": f"KernelError: score: {_CAUSE}"}


def make(root: Path, made: Made) -> Path:
    """Write a run folder below `root`, and what its graph needs beside it."""
    with _inside(root):
        if not Path("tiny").exists():
            save_tiny_header(Path())
        graph = grpo("tiny", "data.parquet", vowels, **_sizes(), lr=made.lr)
        options = RunOptions(steps=60, replicas={"rollout": 3}, threads=2)
        cluster = Cluster(cores=8, memory=24 * 2**30)
        planned = planned_on(cluster, graph, replicas={"rollout": 3}, threads=2)
        with RunFolder.create(made.name, root / "runs") as folder:
            folder.write_text("graph.json", write_snapshot(graph))
            folder.write_text("plan.json", planned.to_json())
            folder.write_text("plan.txt", explain(planned))
            folder.write_text("options.json", run_options.encode_options(options))
            _fill(folder, planned, made)
            path = folder.path
    _set_times(path, made)
    return path


def _sizes() -> dict[str, Any]:
    return {"n": ANSWERS, "batch": PROMPTS, "max_tokens": 64, "max_lag": 1}


@contextlib.contextmanager
def _inside(root: Path) -> Iterator[None]:
    """Paths of the graph are relative, so that no machine's folder is in the drawing."""
    before = Path.cwd()
    os.chdir(root)
    try:
        yield
    finally:
        os.chdir(before)


def _fill(folder: RunFolder, planned: Plan, made: Made) -> None:
    rows = [_metrics(step, made) for step in range(1, made.steps + 1)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = StepSegments(folder.path / "events")
    samples = SampleWriter(folder.samples)
    for step in range(1, made.steps + 1):
        events.write(_flow(step, planned, made))
        samples.write(step, _samples(step, made))
    if made.ended == FAILED:
        events.write(_tombstone(made))
    events.close()
    _tokenizer(folder.checkpoints / f"step_{made.steps}" / "train_policy")
    lines = [f"step {step} is done" for step in range(1, made.steps + 1)]
    for worker in planned.workers:
        folder.log(worker).write_text("\n".join(lines) + "\n")
    if made.ended is not None:
        folder.write_text("ended.json", json.dumps(made.ended))


def _set_times(path: Path, made: Made) -> None:
    end = BEGAN + made.steps * SECONDS
    for name, at in (("versions.json", BEGAN), ("metrics.jsonl", end), ("ended.json", end)):
        if (path / name).exists():
            os.utime(path / name, (at, at))


def _metrics(step: int, made: Made) -> dict[str, float]:
    """A run that learns: rewards rise, lengths fall, the mismatch stays small."""
    noise = random.Random(f"{made.seed} {step}")
    rise = 1 - math.exp(-step * made.lr * 40)
    found = {
        "step": step,
        "reward/mean": 0.2 + 0.6 * rise + noise.gauss(0, 0.03),
        "reward/std": 0.2,
        "reward/vowels/mean": 0.2 + 0.6 * rise + noise.gauss(0, 0.03),
        "reward/digits/mean": 0.6 - 0.3 * rise + noise.gauss(0, 0.04),
        "completion/length/mean": 48 - 20 * rise + noise.gauss(0, 2),
        "completion/length/max": 64.0,
        "policy/lag/mean": 0.4 + noise.random() * 0.2,
        "policy/lag/max": 1.0,
        "policy/mismatch/mean": 2e-4 * (1 + noise.random()),
        "loss/clipped_policy_loss": 0.02 * math.exp(-step / 30) + noise.gauss(0, 0.002),
        "throughput/tokens_per_second": 900 + noise.gauss(0, 40),
        "time/step": SECONDS + noise.gauss(0, 0.1),
        "time/train_policy": 0.6,
        "optim/lr": made.lr,
        "optim/grad_norm": 0.8 + noise.gauss(0, 0.1),
    }
    if step % 10 == 0:
        found["eval/reward"] = 0.25 + 0.55 * rise
    return found


def _flow(step: int, planned: Plan, made: Made) -> Flow:
    """The reward is slow, and so is the third replica of the rollout: what trains waits."""
    noise = random.Random(f"{made.seed} flow {step}")
    end = step * SECONDS
    return Flow(
        step=step,
        start=end - SECONDS,
        end=end,
        wall=BEGAN + end,
        nodes={
            f"{node.name}@{worker}": _replica(node.name, i, step, noise)
            for node in planned.nodes
            for i, worker in enumerate(node.workers)
        },
        edges={
            f"{edge.producer}->{edge.consumer}": EdgeFlow(
                rows=PROMPTS * ANSWERS,
                bytes=max(edge.bytes, 400),
                waiting_rows=14 if edge.consumer == "score" else 0,
                waiting_bytes=9_000 if edge.consumer == "score" else 0,
                age=3.4 if edge.consumer == "score" else 0.0,
            )
            for edge in planned.edges
        },
        weights={
            f"policy->rollout@{worker}": WeightFlow(
                offered=step, loaded=step - (i == 2), loads=1, seconds=0.12, bytes=1_809_920
            )
            for i, worker in enumerate(planned.node("rollout").workers)
        },
        cuts={"prompts": CutFlow(ready=step % 4, wanted=4, outstanding=7, room=8, lags=[10, 6])},
        workers={
            worker: WorkerFlow(memory=310 << 20, peak=420 << 20, outbox=2 << 20)
            for worker in planned.workers
        },
    )


_BUSY = {"prompts": 0.01, "rollout": 0.55, "score": 0.86, "advantage": 0.02, "train_policy": 0.27}
_BLAMED = {"train_policy": "score", "advantage": "score", "rollout": "train_policy"}


def _replica(node: str, i: int, step: int, noise: random.Random) -> ReplicaFlow:
    busy = _BUSY.get(node, 0.1) * (0.95 + 0.05 * noise.random())
    slow = node == "rollout" and i == 2
    left = SECONDS * (1 - busy)
    blamed = _BLAMED.get(node)
    rows = {"prompts": PROMPTS, "rollout": 2 if slow else 7}.get(node, PROMPTS * ANSWERS)
    return ReplicaFlow(
        busy=busy * SECONDS,
        for_rows=left * 0.8 if node not in ("prompts", "rollout") else 0.0,
        for_room=left * 0.7 if node == "rollout" else 0.0,
        for_weights=left * 0.1 if node == "rollout" else 0.0,
        for_turn=left * 0.1 if node == "advantage" else 0.0,
        idle=left * (0.1 if node == "advantage" else 0.2 if node != "prompts" else 1.0),
        blames={blamed: left * 0.7} if blamed else {},
        chunks=1,
        rows=rows,
        tokens=rows * 40 if node in ("rollout", "train_policy") else 0,
        version=step - slow if node in ("rollout", "train_policy") else -1,
    )


def _tombstone(made: Made) -> Tombstones:
    return Tombstones(
        step=made.steps,
        wall=BEGAN + made.steps * SECONDS,
        node="score",
        keys=[(made.steps * PROMPTS, 0, 0)],
        error=_CAUSE,
    )


def _samples(step: int, made: Made) -> pa.Table:
    """As `--samples full` records them."""
    rows = [
        _sample(step, position, sample, made)
        for position in range((step - 1) * PROMPTS, step * PROMPTS)
        for sample in range(ANSWERS)
    ]
    lists = {"advantages": pa.float32(), "sampler_logprobs": pa.float32()}
    lists |= {"trainer_logprobs": pa.float32(), "versions": pa.int32()}
    lists |= {"completion_ids": pa.int32(), "completion_mask": pa.uint8()}
    columns: dict[str, pa.Array] = {}
    for name in rows[0]:
        kind = pa.large_list(lists[name]) if name in lists else None
        columns[name] = pa.array([row[name] for row in rows], kind)
    return pa.table(columns)


def _sample(step: int, position: int, sample: int, made: Made) -> dict[str, Any]:
    """The same prompts come again every five Steps."""
    noise = random.Random(f"{made.seed} {position} {sample}")
    words = [noise.choice(_WORDS) for _ in range(noise.randint(3, 12))]
    completion = SCRIPT if (step, sample) == (made.steps, 1) else " ".join(words)
    count = len(completion)
    share = sum(letter in "aeiou" for letter in completion) / count
    advantage = (share - 0.35) * 4
    sampler = [-0.4 - noise.random() for _ in range(count)]
    return {
        "node": "train_policy",
        "position": position,
        "sample": sample,
        "prompt": _prompt(position % (5 * PROMPTS)),
        "completion": completion,
        "reward": round(share, 4),
        "reward/vowels": round(share, 4),
        "reward/digits": None if sample else 0.5,
        "advantage": advantage,
        "finish": "length" if count > 60 else "stop",
        "length": count,
        "version": step - 1,
        "completion_ids": [ord(letter) - 32 for letter in completion],
        "completion_mask": [int(i != 2) for i in range(count)],
        "versions": [step - 1 + (i > count // 2) for i in range(count)],
        "advantages": [advantage] * count,
        "sampler_logprobs": sampler,
        "trainer_logprobs": [p + noise.gauss(0, 0.02) for p in sampler],
    }


def _prompt(number: int) -> str:
    """Messages, as JSON: one of them calls a tool, which answers."""
    asked = f"What is {number % 9} + {number % 7}? Think about it first."
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You add numbers. Answer in words."},
        {"role": "user", "content": asked},
    ]
    if number % 4 == 3:
        messages.append({"role": "assistant", "content": "", "tool_calls": [_CALL]})
        messages.append({"role": "tool", "content": "7"})
    return json.dumps(messages)


def _tokenizer(folder: Path) -> None:
    """A tokenizer.json by which a token is a character."""
    folder.mkdir(parents=True)
    vocab = {("\u0120" if c == " " else c): ord(c) - 32 for c in map(chr, range(32, 127))}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
