"""Plans of graphs for known machines, and plans written by hand, node by node."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from safetensors.numpy import save_file

from dataflow.batch import Keys
from dataflow.check import check
from dataflow.graph import Graph
from engine.plan.cluster import Cluster
from engine.plan.cost.profile import Profile
from engine.plan.memory_margins import RunMemory
from engine.plan.options import RunOptions, make_placing
from engine.plan.passes.shape import set_lags
from engine.plan.placement import Placing
from engine.plan.plan import ModelUse, Plan, PlannedNode
from engine.plan.planned_input import Fetch, PlannedInput
from engine.plan.planner import make_plan
from engine.protocol.refs import Ref
from engine.protocol.staleness import NO_VERSION
from tests.kit.graphs import grpo_graph, small_ppo

CLUSTER = Cluster(cores=2, memory=24 * 2**30)
DATA = {"prompt": pa.utf8(), "answer": pa.utf8(), "level": pa.int64()}
DEMONSTRATIONS = {"prompt": pa.utf8(), "completion": pa.utf8()}
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 384,
    "vocab_size": 98,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


def headers(data: str, split: str | None) -> dict[str, pa.DataType]:
    """The columns that every data file of a planned graph has."""
    return DEMONSTRATIONS if "demos" in data else DATA


def save_tiny_header(folder: Path) -> None:
    """A model directory named `tiny`: a config, 452,480 weights, a tokenizer of one token."""
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    body = np.zeros(452_480 - 98 * 128, np.float32)
    weights = {"model.body": body, "lm_head.weight": np.zeros((98, 128), np.float32)}
    save_file(weights, folder / "tiny" / "model.safetensors")
    (folder / "tiny" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<eos>": 0}}}))
    (folder / "tiny" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


def planned(graph: Graph, cluster: Cluster = CLUSTER, *, memory: RunMemory | None = None) -> Plan:
    """A plan with all in one Worker, two threads each."""
    return make_plan(check(graph, headers), seed=0, threads=2, cluster=cluster, memory=memory)


def grpo_plan(**params: Any) -> Plan:
    return planned(grpo_graph(**params))


def ppo_plan() -> Plan:
    return planned(small_ppo())


def placed(
    graph: Graph,
    *,
    cores: int = 4,
    memory: int = 24 * 2**30,
    threads: int | None = None,
    profile: Profile | None = None,
    **asked: Any,
) -> Plan:
    """A plan by a Placing; asked: its fields."""
    known, cluster = check(graph, headers), Cluster(cores=cores, memory=memory)
    how: dict[str, Any] = {"placing": Placing(**asked), "cluster": cluster, "profile": profile}
    return make_plan(known, seed=0, threads=threads, **how)


def planned_on(cluster: Cluster, graph: Graph, **options: Any) -> Plan:
    """A plan as by the command line, but by rule unless a search is asked for; options: fields of
    RunOptions.
    """
    asked = make_placing(RunOptions(**{"search": "off"} | options))
    return make_plan(check(graph, headers), seed=0, placing=asked, cluster=cluster)


def workers_of(plan: Plan, *names: str) -> tuple[str, ...]:
    """The Workers of these nodes, which must be the same for all."""
    (workers,) = {plan.node(name).workers for name in names}
    return workers


def module_of(plan: Plan, node: str) -> str:
    """The module that holds the weights of a node's Model."""
    return next(use.module for use in plan.node(node).models if use.param != "tokenizer")


def planned_input(gate: str, *producers: str, name: str = "", **fields: Any) -> PlannedInput:
    """Rows of `gate`, whose column `x` is with these nodes."""
    fetches = tuple(Fetch(producer=producer, columns=("x",)) for producer in producers)
    return PlannedInput(name=name or gate, gate=gate, fetches=fetches, **fields)


def planned_node(name: str, *gates: str | PlannedInput, **fields: Any) -> PlannedNode:
    """A node of the stream that reads the column `x` of these nodes, one row for each of theirs."""
    inputs = tuple(planned_input(g, g) if isinstance(g, str) else g for g in gates)
    usual = {
        "operator": name,
        "work": "host",
        "scope": "row",
        "region": "stream",
        "relation": "same",
        "source": "prompts",
    }
    return PlannedNode(name=name, inputs=inputs, **usual | fields)


def learning_nodes(
    source: str, decoder: str, learners: tuple[str, ...]
) -> tuple[PlannedNode, PlannedNode, PlannedNode]:
    """Prompts, a rollout of them and its training, in these Workers."""
    read, write = (
        ModelUse(param="model", model="policy", access=a, trained=True) for a in ("read", "write")
    )
    return (
        planned_node("prompts", work="source", relation="source", workers=(source,)),
        planned_node("rollout", "prompts", work="decode", models=(read,), workers=(decoder,)),
        planned_node(
            *("learn", "rollout"),
            work="train",
            region="step",
            relation="sink",
            models=(write,),
            workers=learners,
        ),
    )


def plan_of(*nodes: PlannedNode, **fields: Any) -> Plan:
    """A Plan of these nodes, with their lags, its seed 0."""
    fields = {"graph": "g", "digest": "", "seed": 0, "sources": ()} | fields
    return Plan(nodes=set_lags(nodes, fields["sources"]), **fields)


def ref(
    keys: Keys | Iterable[int],
    block: int = 1,
    version: int = NO_VERSION,
    worker: str = "w",
    content: int = 0,
) -> Ref:
    """Rows of one token each."""
    keys = keys if isinstance(keys, Keys) else Keys.of(keys)
    rows = len(keys)
    return Ref(
        worker=worker,
        block=block,
        keys=keys,
        lengths=np.ones(rows, np.int64),
        version=np.full(rows, version, np.int32),
        digest=np.full(rows, content, np.uint64),
    )
