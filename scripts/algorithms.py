"""Writes docs/algorithms.md, and a drawing of each shipped graph into docs/drawings/.

    .venv/bin/python scripts/algorithms.py [FOLDER]

Names and advice come from the graphs' files, needs from their nodes, costs from their plans for
one model, whose directory has shapes and no weights. FOLDER: where to write, docs/ by default.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from dataflow.check import check  # noqa: E402
from dataflow.draw.picture import make_picture  # noqa: E402
from dataflow.draw.svg import draw_svg  # noqa: E402
from dataflow.graph import Graph  # noqa: E402
from dataflow.model import Model  # noqa: E402
from engine.cli.graphs import shipped_graphs, summary  # noqa: E402
from engine.plan.cluster import Cluster  # noqa: E402
from engine.plan.cost.memory import peak  # noqa: E402
from engine.plan.options import RunOptions, make_placing  # noqa: E402
from engine.plan.plan import Plan  # noqa: E402
from engine.plan.planner import make_plan  # noqa: E402
from engine.plan.warnings import step_seconds  # noqa: E402

MODEL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
"""The shapes of a model of half a billion weights."""

ROWS, ANSWERS, TOKENS = 512, 8, 1024
"""Completions a Step, answers to a prompt where there are groups, and tokens of an answer."""

COLUMNS = {
    "prompts": {"prompt": ["2+2="], "answer": ["4"]},
    "demonstrations": {"prompt": ["2+2="], "completion": ["4"]},
    "preferences": {"prompt": ["2+2="], "chosen": ["4"], "rejected": ["5"]},
}
"""What the data of a source has."""

DATA = {"sft": "demonstrations", "dpo": "preferences"}
NESTED = ("self_play_two_models",)
"""Graphs with answers to answers."""

JOINED = ("dual_generator",)
"""Graphs whose groups are those of two generations."""

MACHINE = Cluster(cores=64, memory=2**40)

HEAD = """# Algorithms

The graphs in [graphs/](../graphs), each one function in one file. `dataflow graphs` lists them,
`dataflow graphs NAME > mine.py` writes one out to be changed, and `dataflow diff` shows what a
change means. `scripts/algorithms.py` writes this page from the graphs and their plans. A test
compares each graph's updates with those of a plain Hugging Face loop
(`test_each_is_the_algorithm_of_a_plain_loop`).

Each with a reward function also takes `eval_data` and `eval_every`: held-out prompts, which the
policy answers greedily at the start, after every so many Steps and at the end (`eval/reward`).
Those in which a group of equal rewards has advantages of 0 take `drop_uniform`, which leaves such
groups out; the Step is then that much smaller ([dapo](../graphs/dapo.py) fills it up again), and
`reward/mean` is of the rows that stay.

Costs are predictions of `explain` for a model of half a billion weights (bfloat16) in every role:
{rows} completions a Step of at most {tokens:,} tokens, {answers} to a prompt where there are
groups, all nodes in one Worker. Memory is the most at any time; time is a Step's, as a multiple of
GRPO's, without users' functions.

| graph | use it | needs | memory | time | source |
|---|---|---|---|---|---|
"""

CURVES = """## Learning curves

Those that learn from a reward, on the task of the [demo](demo.md): right answers to words that were
never trained on, after equally many samples. `make curves` draws it; the numbers are in
[benchmarks/results](../benchmarks/results/curves.md).

![learning curves](../benchmarks/results/curves.svg)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costed:
    """A shipped graph, with its plan."""

    name: str
    graph: Graph
    plan: Plan

    @property
    def seconds(self) -> float:
        found = step_seconds(self.plan)
        assert found is not None
        return found[0]

    @property
    def memory(self) -> int:
        """The most bytes at any time."""
        return peak(n.estimate.bytes for n in self.plan.nodes)


def main() -> None:
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "docs"
    with tempfile.TemporaryDirectory() as made, chdir(made):  # so that drawings have short paths
        save_inputs()
        costed = [costed_graph(name) for name in shipped_graphs()]
    (folder / "drawings").mkdir(parents=True, exist_ok=True)
    for each in costed:
        (folder / "drawings" / f"{each.name}.svg").write_text(draw_svg(make_picture(each.graph)))
    (folder / "algorithms.md").write_text(page(costed))


def page(costed: list[Costed]) -> str:
    """The page as Markdown."""
    unit = next(each.seconds for each in costed if each.name == "grpo")
    table = "\n".join(line(each, unit) for each in costed)
    drawings = "\n\n".join(section(each) for each in costed)
    head = HEAD.format(rows=ROWS, tokens=TOKENS, answers=ANSWERS)
    return f"{head}{table}\n\n{CURVES}\n## Drawings\n\n{drawings}\n"


def line(each: Costed, unit: float) -> str:
    doc = inspect.getdoc(importlib.import_module(f"graphs.{each.name}")) or ""
    use = doc.partition("Use it ")[2].strip().rstrip(".")
    needs = "; ".join(needed(each.plan.program or each.graph))
    memory, time = f"{each.memory / 2**30:.0f} GiB", f"{each.seconds / unit:.2f}"
    source = re.search(r"arXiv:(\d{4}\.\d{5})", doc)
    paper = f"[{source[1]}](https://arxiv.org/abs/{source[1]})" if source else "-"
    link = f"[{each.name}](../graphs/{each.name}.py)"
    return f"| {link} | {use} | {needs} | {memory} | {time} | {paper} |"


def needed(graph: Graph) -> Iterator[str]:
    """Data, Models, generations and functions, in words."""
    data = [n.operator.name for n in graph.nodes if n.operator.work == "source"]
    yield " and ".join(data)
    models = [s for s in graph.states if isinstance(s, Model)]
    trained = [m.name for m in models if m.trainable]
    yield f"trains {' and '.join(trained)}"
    if fixed := [m.name for m in models if not m.trainable]:
        yield f"a fixed {' and '.join(fixed)}"
    made = [n for n in graph.nodes if n.operator.traits.generates]
    if made:
        yield " + ".join(str(n.params["n"]) for n in made) + (
            " answers" if len(made) > 1 or made[0].params["n"] > 1 else " answer"
        )
    if any(n.operator.parts for n in graph.nodes):
        yield "a reward function"
    if any("environment" in n.params for n in graph.nodes):
        yield "an environment"


def section(each: Costed) -> str:
    told = summary(shipped_graphs()[each.name])
    return f"### {each.name}\n\n{told}\n\n![{each.name}](drawings/{each.name}.svg)"


def costed_graph(name: str) -> Costed:
    """The graph with its own defaults but for lengths and numbers of rows, and its plan."""
    function = getattr(importlib.import_module(f"graphs.{name}"), name)
    taken = inspect.signature(function).parameters
    grouped = "n" in taken and taken["n"].default > 1
    answers = (ANSWERS if grouped else 1) * (ANSWERS if name in NESTED else 1)
    known: dict[str, Any] = {
        **dict.fromkeys(("base", "teacher", "setter_base", "solver_base", "ranker_base"), "model"),
        "data": f"{DATA.get(name, 'prompts')}.parquet",
        "demos": "demonstrations.parquet",
        "reward_fn": your_reward,
        "step_fn": your_steps,
        "environment": YourEnvironment,
        "n": ANSWERS // (2 if name in JOINED else 1) if grouped else 1,
        "batch": ROWS // answers,
        "demo_batch": ROWS // ANSWERS,
        "max_tokens": TOKENS,
        "buffer": TOKENS // 4,
    }
    if "max_tokens" not in taken:
        known["batch"] = ROWS if name == "sft" else ROWS // 2
    graph = function(**{name: known[name] for name in taken if name in known})
    asked = make_placing(RunOptions(workers="one"))
    return Costed(
        name=name,
        graph=graph,
        plan=make_plan(check(graph), seed=0, placing=asked, cluster=MACHINE),
    )


def your_reward(completions: list[str], **columns: object) -> list[float]:
    """What a user gives."""
    return [0.0 for _ in completions]


def your_steps(steps: list[list[str]], **columns: object) -> list[list[float]]:
    """What a user gives."""
    return [[0.0 for _ in row] for row in steps]


class YourEnvironment:
    """What a user gives."""

    def reset(self) -> None:
        return None

    def step(self, message: dict[str, Any]) -> tuple[str, float, bool]:
        return "", 0.0, True


def save_inputs() -> None:
    """Data files, and a model directory of the right sizes whose weights are a hole in a file."""
    for name, columns in COLUMNS.items():
        repeated = {column: values * ROWS for column, values in columns.items()}
        pq.write_table(pa.table(repeated), f"{name}.parquet")
    model = Path("model")
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<eos>": 0}}}))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    save_shapes(model / "model.safetensors")


def save_shapes(path: Path) -> None:
    """A safetensors file with the header of the model's weights."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(Qwen2Config(**MODEL))
    header, at = {}, 0
    for name, weight in module.named_parameters():
        header[name] = {
            "dtype": "BF16",
            "shape": list(weight.shape),
            "data_offsets": [at, at := at + 2 * weight.numel()],
        }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + at)


if __name__ == "__main__":
    main()
