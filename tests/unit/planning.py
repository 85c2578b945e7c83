"""What tests of plans share: a model directory of known size, a data set's columns, planning for a
known machine.

Owns: the inputs. Does not own: any check.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from safetensors.numpy import save_file

from dataflow.check import check
from dataflow.graph import Graph
from dataflow.schema import Prompt, Rollout
from dataflow.user import Columns, operator
from engine.plan.cluster import Cluster
from engine.plan.placing import Placing
from engine.plan.plan import Plan
from engine.plan.planner import make_plan

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


def exact(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def brief(completions: Sequence[str]) -> list[float]:
    return [1.0 / (1 + len(c)) for c in completions]


@operator()
def ask(rollout: Columns[Rollout]) -> Columns[Prompt]:
    return Columns.make(
        Prompt, like=rollout, prompt=[f"Is this right? {c}" for c in rollout["completion"]]
    )


def make_tiny(folder: Path) -> None:
    """A model directory named `tiny`: a config, weights that hold 452,480 numbers, a tokenizer of
    one token.
    """
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    body = np.zeros(452_480 - 98 * 128, np.float32)
    weights = {"model.body": body, "lm_head.weight": np.zeros((98, 128), np.float32)}
    save_file(weights, folder / "tiny" / "model.safetensors")
    (folder / "tiny" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<eos>": 0}}}))
    (folder / "tiny" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


def headers(data: str, split: str | None) -> dict[str, pa.DataType]:
    return DEMONSTRATIONS if "demos" in data else DATA


def planned(graph: Graph, cluster: Cluster = CLUSTER) -> Plan:
    """All in one Worker, two threads each."""
    return make_plan(check(graph, headers), seed=0, threads=2, cluster=cluster)


def placed(
    graph: Graph,
    *,
    cores: int = 4,
    memory: int = 24 * 2**30,
    threads: int | None = None,
    **asked: Any,
) -> Plan:
    """By what was asked for; asked: fields of Placing."""
    cluster = Cluster(cores=cores, memory=memory)
    return make_plan(
        check(graph, headers), seed=0, threads=threads, placing=Placing(**asked), cluster=cluster
    )
