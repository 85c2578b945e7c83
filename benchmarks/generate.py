"""Tokens a second of generation: the vLLM kernel, vLLM alone on the same engine, the torch kernel.

    python -m benchmarks.generate [--quick] [--json FILE] [--linear packed]

Owns: the shapes, and what is compared. Does not own: how results are shown (report.py).

Each shape runs in a process of its own, since a process has one engine. Within a round the three
alternate on the same prompts, and the cache of keys is forgotten before each. vLLM alone is
`LLM.generate` on the kernel's own engine, with a seed for each row and log-probs; it draws by
vLLM's sampler, so its tokens are others: rows have a fixed length here, without an end.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from benchmarks.report import SideResult, machine, show, write_json
from dataflow.batch import Batch, Keys
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.model import Model
from dataflow.randomness import row_seeds
from dataflow.schema import Prompt

GOAL = 0.95
"""The kernel's tokens a second over those of vLLM alone, on the same linear path."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A model and a chunk: `rows` answers of `tokens` each to prompts of `prompt` characters."""

    layers: int
    hidden: int
    rows: int
    tokens: int
    prompt: int
    goal: bool = True
    half: bool = False
    """The shape of a Qwen2 of 0.5 B parameters, whatever layers and hidden say."""


SHAPES = {
    "demo": Generation(layers=2, hidden=128, rows=256, tokens=10, prompt=10),
    "256 wide": Generation(layers=4, hidden=256, rows=64, tokens=64, prompt=64),
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

    def tombstone(self, key: Any, error: str, *, failed: bool = True) -> None:
        """No row may fail here."""
        raise RuntimeError(error)

    def module(self, model: Any, make: Callable[[], Any]) -> Any:
        """A module of its own."""
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
    texts = ["".join(draw.choice(letters, shape.prompt)) for _ in range(shape.rows)]
    keys = Keys.of(range(shape.rows))
    return Chunk(
        id=0, step=1, keys=keys, inputs={"prompt": Batch.make(keys, {"prompt": texts}, Prompt)}
    )


def opened(kernel: Any, base: str, shape: Generation, threads: int) -> Any:
    """A kernel of generate; no row ends before its last token."""
    layout = Layout(slots=256, threads=threads)
    params = {"n": 1, "max_tokens": shape.tokens, "max_prompt_tokens": shape.prompt}
    node = KernelNode(
        name="rollout", operator="generate", models={"policy": Model("policy", base)}, params=params
    )
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
    return [ids[i].tolist() for i in range(len(ids))]


def tokens_of(kernel: Any, chunk: Chunk) -> int:
    """Run it; returns the tokens written."""
    return sum(len(batch.ragged("completion_ids").values) for batch in kernel.run(chunk))


def measure(shape: Generation, rounds: int, threads: int) -> dict[str, list[float]]:
    """Tokens a second of each side in each round, and the milliseconds of loads and probes."""
    from engine.weights.probe import probe_rows
    from operators.kernels.torch.generate import TorchGenerate
    from operators.kernels.torch.models import load_model, pieces
    from operators.kernels.vllm.generate import VllmGenerate

    with tempfile.TemporaryDirectory() as made:
        base = prepare(Path(made), shape)
        ours = opened(VllmGenerate(), base, shape, threads)
        torch = opened(TorchGenerate(), base, shape, threads)
        chunk = chunk_of(shape)
        sides: dict[str, Callable[[], int]] = {
            "kernel": lambda: tokens_of(ours, chunk),
            "alone": lambda: alone(ours, shape),
            "torch": lambda: tokens_of(torch, chunk),
        }
        found: dict[str, list[float]] = {name: [] for name in (*sides, "load", "probe")}
        given = list(pieces(load_model(Model("policy", base))))
        rows = probe_rows(0, ours.vocabulary)
        for number in range(rounds + 1):  # the first is not counted
            order = list(sides) if number % 2 else list(sides)[::-1]
            for name in order:
                began = time.perf_counter()
                tokens = sides[name]()
                found[name].append(tokens / (time.perf_counter() - began))
            for name, call in (
                ("load", lambda version=number: ours.load(given, version)),
                ("probe", lambda: ours.probe(rows)),
            ):
                began = time.perf_counter()
                call()
                found[name].append(1e3 * (time.perf_counter() - began))
        ours.close()
    return {name: values[1:] for name, values in found.items()}


def results(name: str, shape: Generation, found: dict[str, list[float]]) -> list[SideResult]:
    """Medians, and the median ratio over rounds."""

    def ratio(of: str, to: str) -> float:
        return statistics.median(a / b for a, b in zip(found[of], found[to], strict=True))

    same = ratio("kernel", "alone")
    goal = {"goal": GOAL, "least": True} if shape.goal else {}
    limits = {"load": 10.0, "probe": 15.0} if name == "demo" else {}
    return [
        SideResult(name=f"{name}: kernel / vLLM alone", value=same, unit="ratio", **goal),
        SideResult(name=f"{name}: kernel / torch", value=ratio("kernel", "torch"), unit="ratio"),
        *(
            SideResult(
                name=f"{name}: {side}", value=statistics.median(found[side]), unit="tokens/s"
            )
            for side in ("kernel", "alone", "torch")
        ),
        *(
            SideResult(
                name=f"{name}: {call}",
                value=statistics.median(found[call]),
                unit="ms",
                **({"goal": limits[call], "least": False} if call in limits else {}),
            )
            for call in ("load", "probe")
        ),
    ]


def main(
    *,
    quick: bool = False,
    json: Path | None = None,
    threads: int = 1,
    linear: Literal["plain", "packed"] = "plain",
    shape: str = "",
) -> None:
    """Measure.

    Args:
        quick: fewer rounds, without the large shape; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        threads: of each kernel and of the engine.
        linear: how the engine's linear layers compute on CPU; plain is what runs have.
        shape: measure this one in this process and print its numbers.
    """
    rounds = 2 if quick else 5
    if shape:
        print("measured", json_.dumps(measure(SHAPES[shape], rounds, threads)))
        return
    found: list[SideResult] = []
    for name, each in SHAPES.items():
        if quick and each.half:
            continue
        flags = ["--shape", name, "--threads", str(threads), *(["--quick"] if quick else [])]
        told = subprocess.run(
            [sys.executable, "-m", "benchmarks.generate", *flags],
            env=os.environ | {"DATAFLOW_VLLM_LINEAR": linear, "OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        line = next(t for t in told.stdout.splitlines() if t.startswith("measured "))
        found += results(name, each, json_.loads(line.removeprefix("measured ")))
    where = machine()
    show(
        f"generation on one engine, {linear} linear layers: {asdict(SHAPES['demo'])}", found, where
    )
    if json is not None:
        write_json(json, found, where)


if __name__ == "__main__":
    tyro.cli(main)
