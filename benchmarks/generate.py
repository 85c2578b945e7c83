"""Tokens a second of generation: the vLLM kernel, vLLM alone on the same engine, the torch kernel.

    python -m benchmarks.generate [--quick] [--json FILE] [--threads N]

Owns: the shapes, and what is compared. Does not own: how results are shown (report.py).

On a CPU linear layers have two paths: `plain` computes with the weights as they are, which is what
runs have; `packed` with oneDNN's packed copies, as vLLM ships. Each shape and path runs in a
process of its own, since a process has one engine. Within a round the sides alternate on the same
prompts, and the cache of keys is forgotten before each. vLLM alone is `LLM.generate` on the
kernel's own engine, with a seed for each row and log-probs; it draws by vLLM's sampler, so its
tokens are others: rows have a fixed length here, without an end.
"""

from __future__ import annotations

import importlib
import json as json_
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.report import SideResult, machine, show, write_json
from dataflow.adapters import Lora
from dataflow.batch import Batch, Keys
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.model import Model
from dataflow.processor_time import ProcessorTime
from dataflow.randomness import row_seeds
from dataflow.schema import Prompt

GOAL = 0.95
"""The kernel's tokens a second over those of vLLM alone, on the same linear path."""

LINEAR = "DATAFLOW_VLLM_LINEAR"
"""As operators/kernels/vllm/rank.py has it, which is imported within an engine alone."""
PATHS = ("plain", "packed")
LARGE_GOAL = 0.9
"""The torch kernel's tokens a second over those of vLLM alone, for the model of 0.5 B."""
SHARED = 1.25
"""Tokens that a group with one prompt may feed, over those that it would if it shared all of it."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A model and a chunk: `rows` answers of `tokens` each, n to a prompt; prompts of `prompt`."""

    layers: int
    hidden: int
    rows: int
    tokens: int
    prompt: int
    n: int = 1
    goal: bool = True
    half: bool = False
    """The shape of a Qwen2 of 0.5 B parameters, whatever layers and hidden say."""


SHAPES = {
    "demo": Generation(layers=2, hidden=128, rows=256, tokens=10, prompt=10),
    "256 wide": Generation(layers=4, hidden=256, rows=64, tokens=64, prompt=64),
    "a group": Generation(layers=2, hidden=128, rows=8, tokens=16, prompt=300, n=8, goal=False),
    "0.5 B": Generation(
        layers=24, hidden=896, rows=64, tokens=16, prompt=32, goal=False, half=True
    ),
}


class Alone:
    """A Session without an engine around it."""

    seed, rank, world, group = 0, 0, 1, None

    def row_seeds(self, keys: Keys) -> np.ndarray:
        """As in a run."""
        return row_seeds(self.seed, "rollout", keys)

    def metric(self, name: str, value: float, count: float = 1.0) -> None:
        """Nobody reads it."""

    def waiting(self, reason: str) -> AbstractContextManager[None]:
        """Nobody reads it."""
        return nullcontext()

    def flight(self, count: int) -> None:
        """Nobody reads it."""

    def note_least_tokens(self, count: int) -> None:
        """No Step is worked on in parts."""

    def count_computed(self, elsewhere: ProcessorTime) -> None:
        """Nobody reads it."""

    def tombstone(
        self, key: Any, error: str, *, failed: bool = True, row_only: bool = False
    ) -> None:
        """No row may fail here."""
        raise RuntimeError(error)

    def module(self, model: Any, make: Callable[[], Any]) -> Any:
        """A module of its own."""
        return make()

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """There is nobody to share with."""
        return make()

    def allocate(self, count: int, dtype: Any) -> np.ndarray:
        """Ordinary memory."""
        return np.empty(count, dtype)


def prepare(folder: Path, shape: Generation) -> str:
    """A random model with the demo's tokenizer."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    task = importlib.import_module("demo_task")
    base = folder / "model"
    task.make_model(base, layers=shape.layers if not shape.half else 1, hidden=128, seed=0)
    if shape.half or shape.hidden != 128:
        from transformers import AutoConfig, AutoModelForCausalLM

        heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864}
        wide = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1024}
        changes: dict[str, Any] = {"hidden_size": shape.hidden, "num_hidden_layers": shape.layers}
        changes |= heads | {"vocab_size": 151_936} if shape.half else wide
        changes["layer_types"] = ["full_attention"] * shape.layers
        config = AutoConfig.from_pretrained(base, **changes)
        AutoModelForCausalLM.from_config(config).save_pretrained(base)
    return str(base)


def chunk_of(shape: Generation) -> Chunk:
    """Prompts of equal length that differ from the first character on."""
    draw = np.random.default_rng(0)
    letters = [chr(97 + i) for i in range(26)]
    count = shape.rows // shape.n
    texts = ["".join(draw.choice(letters, shape.prompt)) for _ in range(count)]
    keys = Keys.of(range(count))
    return Chunk(
        id=0, step=1, keys=keys, inputs={"prompt": Batch.make(keys, {"prompt": texts}, Prompt)}
    )


def opened(
    kernel: Any, base: str, shape: Generation, threads: int, adapter: Lora | None = None
) -> Any:
    """A kernel of generate; no row ends before its last token."""
    layout = Layout(slots=256, threads=threads)
    params = {"n": shape.n, "max_tokens": shape.tokens, "max_prompt_tokens": shape.prompt}
    model = Model("policy", base, trainable=True, adapter=adapter)
    node = KernelNode(name="rollout", operator="generate", models={"policy": model}, params=params)
    kernel.open(node, layout, Alone())
    kernel._tokenizer = replace(kernel._tokenizer, eos_ids=frozenset({1 << 20}))
    return kernel


def alone(kernel: Any, shape: Generation) -> int:
    """`LLM.generate` on the kernel's engine; returns the tokens written."""
    from vllm import SamplingParams

    engine = kernel._engine
    prompts = [{"prompt_token_ids": ids} for ids in _ids(kernel, shape)]
    asked = [
        SamplingParams(
            temperature=1.0,
            seed=row,
            max_tokens=shape.tokens,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
        )
        for row in range(shape.rows)
    ]
    engine.forget()
    said = engine._llm.generate(prompts, asked, use_tqdm=False)
    return sum(len(each.outputs[0].token_ids) for each in said)


def _ids(kernel: Any, shape: Generation) -> list[list[int]]:
    column = chunk_of(shape).inputs["prompt"].array("prompt")
    ids = kernel._tokenizer.encode_column(column)
    return [ids[i].tolist() for i in range(len(ids)) for _ in range(shape.n)]


def tokens_of(kernel: Any, chunk: Chunk) -> int:
    """Run it; returns the tokens written."""
    return sum(len(batch.ragged("completion_ids").values) for batch in kernel.run(chunk))


def fed(kernel: Any, shape: Generation) -> float:
    """Tokens that the engine is fed, over those that it would be if groups shared their prompts."""
    core, found = kernel._engine._core, 0
    outputs = core.get_output

    def counted() -> Any:
        nonlocal found
        said = outputs()
        stats = [each.prefill_stats for each in said.outputs if each.prefill_stats is not None]
        found += sum(each.num_computed_tokens for each in stats)
        return said

    core.get_output = counted
    wrote = tokens_of(kernel, chunk_of(shape))
    core.get_output = outputs
    return (found + wrote) / (shape.rows // shape.n * shape.prompt + wrote)


def distance(kernel: Any, chunk: Chunk, base: str) -> list[float]:
    """Mean and greatest distance of the recorded log-probs from the trainer's forward."""
    from operators.kernels.torch.forward import TorchLogprobs

    rows = Batch.concat(list(kernel.run(chunk))).sort()
    model = Model("policy", base)
    forward = TorchLogprobs()
    node = KernelNode(
        name="reference", operator="logprobs", models={"model": model}, params={"temperature": 1.0}
    )
    forward.open(node, Layout(threads=kernel._layout.threads), Alone())
    asked = Chunk(id=0, step=1, keys=rows.keys, inputs={"rows": rows})
    computed = Batch.concat(list(forward.run(asked))).sort()
    off = np.abs(rows.ragged("sampler_logprobs").values - computed.ragged("logprobs").values)
    return [float(off.mean()), float(off.max())]


def measure(shape: Generation, rounds: int, threads: int, path: str) -> dict[str, list[float]]:
    """Tokens a second of each side in each round, and what else is reported (`results`)."""
    from engine.weights.probe import probe_rows
    from operators.kernels.torch.generate import TorchGenerate
    from operators.kernels.torch.models import load_model, pieces
    from operators.kernels.vllm.generate import VllmGenerate

    with tempfile.TemporaryDirectory() as made:
        base = prepare(Path(made), shape)
        ours = opened(VllmGenerate(), base, shape, threads)
        chunk = chunk_of(shape)
        sides: dict[str, Callable[[], int]] = {
            "kernel": lambda: tokens_of(ours, chunk),
            "alone": lambda: alone(ours, shape),
        }
        if path == PATHS[0]:
            torch = opened(TorchGenerate(), base, shape, threads)
            sides["torch"] = lambda: tokens_of(torch, chunk)
        given = list(pieces(load_model(Model("policy", base))))
        rows = probe_rows(0, ours.vocabulary)
        calls: dict[str, Callable[[int], Any]] = {
            "load": lambda version: ours.load(given, version),
            "probe": lambda version: ours.probe(rows),
        }
        found: dict[str, list[float]] = {name: [] for name in (*sides, *calls)}
        for number in range(rounds + 1):  # the first is not counted
            for name in list(sides) if number % 2 else list(sides)[::-1]:
                began = time.perf_counter()
                tokens = sides[name]()
                found[name].append(tokens / (time.perf_counter() - began))
            for name, call in calls.items():
                began = time.perf_counter()
                call(number)
                found[name].append(1e3 * (time.perf_counter() - began))
        found = {name: values[1:] for name, values in found.items()}
        found["distance"] = distance(ours, chunk, base)
        found["bytes"] = [sum(each.data.nbytes for each in given)]
        if shape.n > 1:
            found["fed"] = [fed(ours, shape)]
        ours.close()
    return found


def ratio(found: dict[str, list[float]], of: str, to: str) -> float:
    """The median over rounds."""
    return statistics.median(a / b for a, b in zip(found[of], found[to], strict=True))


def results(
    name: str, shape: Generation, path: str, found: dict[str, list[float]]
) -> list[SideResult]:
    """Medians, of one shape on one path."""
    name = f"{name}, {path}"
    chosen = path == PATHS[0]
    median = {key: statistics.median(values) for key, values in found.items()}
    goal: dict[str, Any] = {"goal": GOAL} if shape.goal else {}
    limits = {"load": 10.0, "probe": 15.0} if shape == SHAPES["demo"] and chosen else {}
    told = [
        SideResult(
            name=f"{name}: kernel / vLLM alone",
            value=ratio(found, "kernel", "alone"),
            unit="ratio",
            **goal,
        )
    ]
    if "torch" in found:
        value = ratio(found, "kernel", "torch")
        told.append(SideResult(name=f"{name}: kernel / torch", value=value, unit="ratio"))
    for side in ("kernel", "alone", "torch"):
        if side in found:
            told.append(SideResult(name=f"{name}: {side}", value=median[side], unit="tokens/s"))
    for call in ("load", "probe"):
        limit: dict[str, Any] = {"goal": limits[call], "least": False} if call in limits else {}
        told.append(SideResult(name=f"{name}: {call}", value=median[call], unit="ms", **limit))
    if "fed" in found:
        told.append(
            SideResult(
                name=f"{name}: tokens fed / needed",
                value=median["fed"],
                unit="ratio",
                goal=SHARED,
                least=False,
            )
        )
    return [
        *told,
        SideResult(name=f"{name}: load", value=1e6 * median["load"] / median["bytes"], unit="s/GB"),
        SideResult(name=f"{name}: log-probs off, mean", value=found["distance"][0], unit="nats"),
        SideResult(name=f"{name}: log-probs off, max", value=found["distance"][1], unit="nats"),
    ]


def across_paths(
    name: str, shape: Generation, by_path: dict[str, dict[str, list[float]]]
) -> list[SideResult]:
    """What runs have over vLLM as it ships, by medians of two processes."""
    shipped = statistics.median(by_path["packed"]["alone"])
    large: dict[str, Any] = {"goal": LARGE_GOAL} if shape.half else {}
    own = by_path["plain"]
    return [
        SideResult(
            name=f"{name}: kernel / vLLM as shipped",
            value=statistics.median(own["kernel"]) / shipped,
            unit="ratio",
        ),
        SideResult(
            name=f"{name}: torch / vLLM as shipped",
            value=statistics.median(own["torch"]) / shipped,
            unit="ratio",
        ),
        SideResult(
            name=f"{name}: torch / vLLM alone, plain",
            value=ratio(own, "torch", "alone"),
            unit="ratio",
            **large,
        ),
    ]


def measured_apart(name: str, path: str, threads: int, *, quick: bool) -> dict[str, list[float]]:
    """`measure` in a process of its own."""
    flags = ["--shape", name, "--threads", str(threads)]
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.generate", *flags, *(["--quick"] if quick else [])],
        env=os.environ | {LINEAR: path, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    line = next(t for t in told.stdout.splitlines() if t.startswith("measured "))
    return json_.loads(line.removeprefix("measured "))


def main(
    *,
    quick: bool = False,
    json: Path | None = None,
    threads: int = 1,
    shape: str = "",
) -> None:
    """Measure.

    Args:
        quick: fewer rounds, without the large shape; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        threads: of each kernel and of the engine.
        shape: measure this one in this process and print its numbers.
    """
    if shape:
        rounds = 2 if quick else 3 if SHAPES[shape].half else 5
        path = os.environ.get(LINEAR, PATHS[0])
        print("measured", json_.dumps(measure(SHAPES[shape], rounds, threads, path)))
        return
    found: list[SideResult] = []
    for name, each in SHAPES.items():
        if quick and each.half:
            continue
        by_path = {way: measured_apart(name, way, threads, quick=quick) for way in PATHS}
        for way, numbers in by_path.items():
            found += results(name, each, way, numbers)
        found += across_paths(name, each, by_path)
    where = machine()
    show(f"generation, {threads} thread(s)", found, where)
    if json is not None:
        write_json(json, found, where)


if __name__ == "__main__":
    tyro.cli(main)
