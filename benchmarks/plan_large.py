"""Plan and explain of a graph of 1,000 nodes on ten thousand devices, by rule.

    python -m benchmarks.plan_large [--quick] [--json FILE]

Owns: the graph, its replicas, and the goals. Does not own: the search for layouts (search.py),
small plans (check_and_plan.py), how results are shown (report.py).

Eight Models are trained, each on answers of its own and of frozen samplers, which frozen judges
read: 998 nodes with Models, each a Model of its own, on ten devices each. CPU seconds count, so
that others on the machine change little.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import tyro

from benchmarks.gpu_plans import EACH, save_model
from benchmarks.report import SideResult, machine, show, write_json
from dataflow.check import check
from dataflow.graph import Graph
from dataflow.loss import Loss
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.schema import Prompt
from engine.plan.cluster import Cluster, Host, with_first
from engine.plan.cost.devices import device
from engine.plan.explain import explain
from engine.plan.options import RunOptions, make_placing
from engine.plan.planner import make_plan
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import kl_loss, trajectory_balance_loss
from operators.reward import reward
from operators.train import train
from tests.kit.search_problems import KINDS, MODELS

MODEL_NODES, TRAINED, DEVICES = 998, 8, 10_000
ON_EACH = 10
"""Workers of a node."""
PLAN_SECONDS, EXPLAIN_SECONDS = 12.0, 120.0


def right(completions: list[str], **columns: object) -> list[float]:
    """A reward function, never called here."""
    return [0.0] * len(completions)


class LargeGraph:
    """A graph of so many nodes with Models, written part by part. folder: of Models' bases."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self._bases: list[str] = []
        for number, sizes in enumerate(MODELS):
            base = folder / f"model-{number}"
            save_model(base, sizes)
            self._bases.append(str(base))
        self._count, self._nodes = 0, nodes

    def make(self) -> Graph:
        """The graph; of the nodes each trained Model has as many."""
        source = prompts("prompts.parquet", batch=256)
        sinks: list[Node] = []
        for number in range(TRAINED):
            share = (self._nodes + number) // TRAINED
            sinks.append(self._add_trained(number, source, share))
        return Graph("large", *sinks)

    def _model(self, *, trainable: bool = False) -> Model:
        base = self._bases[self._count % len(self._bases)]
        self._count += 1
        return Model(f"model_{self._count}", base, trainable=trainable, dtype="bfloat16")

    def _add_trained(self, number: int, source: Port[Prompt], share: int) -> Node:
        """A Model that is trained on its answers, and on those of samplers. share: its nodes."""
        policy = self._model(trainable=True)
        rollout = generate(policy, source, n=4, max_tokens=512, name=f"rollout_{number}")
        reference = logprobs(self._model(), rollout)
        loss: Loss = kl_loss(reference)
        if not number:
            score = reward(right, rollout, name="score")
            loss = trajectory_balance_loss(score, reference=reference, beta=0.1)
        others = share - 3
        for sampler in range(others // 3):
            name = f"sampled_{number}_{sampler}"
            answers = generate(self._model(), source, n=4, max_tokens=256, name=name)
            for _ in range(2):
                loss = loss + kl_loss(logprobs(self._model(), answers), rows=answers)
        for _ in range(others % 3):
            loss = loss + 0.1 * kl_loss(logprobs(self._model(), rollout))
        return train(policy, rollout, loss=loss, lr=1e-6, name=f"train_{number}")


def cluster_of(kinds: Sequence[str], devices: int) -> Cluster:
    """Hosts of eight devices each, as many of each kind."""
    hosts: list[Host] = []
    for kind in kinds:
        gpus = (device(kind).memory,) * EACH
        for number in range(devices // EACH // len(kinds)):
            name = f"{kind.lower()}-{number}"
            host = Host(name=name, cores=128, memory=2**41, gpus=gpus, kind=kind)
            hosts.append(host)
    return with_first(hosts)


def read_columns(data: str, split: str | None) -> dict[str, pa.DataType]:
    return {"prompt": pa.utf8(), "answer": pa.utf8()}


def show_plan(folder: Path, nodes: int, kinds: Sequence[str]) -> Iterator[SideResult]:
    """Seconds of the plan, and of its text on one kind."""
    graph = LargeGraph(folder, nodes).make()
    checked = check(graph, read_columns)
    counts = {n.name: ON_EACH for n in graph.nodes if n.operator.traits.computes}
    trains = {n.name: ON_EACH for n in graph.nodes if n.operator.work == "train"}
    replicas = {name: count for name, count in counts.items() if name not in trains}
    options = RunOptions(
        search="off",
        stream="off",
        workers="apart",
        replicas=replicas,
        ranks=trains,
        shard=True,
    )
    cluster = cluster_of(kinds, DEVICES)
    begun = time.process_time()
    plan = make_plan(checked, seed=0, placing=make_placing(options), cluster=cluster)
    planned = time.process_time()
    name = f"{len(graph.nodes):,} nodes, {len(plan.workers):,} Workers, {len(kinds)} kinds"
    yield SideResult(
        name=f"{name}/plan", value=planned - begun, unit="s", goal=PLAN_SECONDS, least=False
    )
    if len(kinds) > 1:
        return  # its text is as long
    begun = time.process_time()
    text = explain(plan)
    yield SideResult(
        name=f"{name}/explain",
        value=time.process_time() - begun,
        unit="s",
        goal=EXPLAIN_SECONDS,
        least=False,
    )
    yield SideResult(name=f"{name}/lines", value=text.count("\n"), unit="lines")


def list_results(*, quick: bool) -> Iterator[SideResult]:
    nodes = 100 if quick else MODEL_NODES
    with tempfile.TemporaryDirectory() as folder:
        for kinds in (KINDS[:1], KINDS[:2], KINDS) if not quick else (KINDS[:1],):
            yield from show_plan(Path(folder), nodes, kinds)


def main(*, quick: bool = False, json: Path | None = None) -> None:
    """Measure.

    Args:
        quick: a tenth of the nodes, on one kind; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
    """
    results, where = list(list_results(quick=quick)), machine()
    show("plan_large", results, where)
    if json is not None:
        write_json(json, results, where)


if __name__ == "__main__":
    tyro.cli(main)
