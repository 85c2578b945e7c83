"""Generation by torch on one card: the share of what its memory allows.

    python -m benchmarks.gpu_generate [--quick] [--json FILE] [--rates FILE] [--base FOLDER]

Owns: the size, and the bytes that must be read. Does not own: the card's rates (gpu_rates.py),
opening the kernel (gpu_kernels.py).

A token of each row has to read all weights once, and the row's keys and values; at the rate of a
copy, that takes a time that no kernel is below. The prompts' own pass is left out: it is measured
alone, with answers of one token, and taken off.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tyro

from benchmarks.gpu_kernels import model_sizes, open_node, plan_graph, time_each
from benchmarks.gpu_models import CardModel, card_graph, card_model, make_base, make_prompts
from benchmarks.gpu_rates import CardRates, find_card_rates
from benchmarks.report import SavedResults, SideResult
from dataflow.adapters import Adapter
from dataflow.kernel import Chunk
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.profile import ProfileCell
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.predict.profile.generated_rows import draw_prompts
from engine.run.worker.kernel_loader import kernel_node

NODE = "rollout"
GOAL = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSize:
    """Rows, each with a prompt of its own, and tokens of a prompt and of an answer."""

    rows: int
    prompt: int
    answer: int


SIZE = GeneratedSize(rows=256, prompt=256, answer=256)
QUICK = GeneratedSize(rows=4, prompt=8, answer=8)


def count_read_bytes(sizes: Sizes, prompt: int, answers: Sequence[int]) -> float:
    """Bytes that must be read for all tokens of these answers but the first: the weights for each
    token of the longest one, and for each row's token the keys and values before it.
    """
    passes = max(answers) - 1
    cached_tokens = 0.0
    for length in answers:
        written = np.arange(1, length)
        cached_tokens += float((prompt + written).sum())
    return passes * sizes.read_bytes + cached_tokens * sizes.cached_bytes


def plan_generation(
    folder: Path, base: str, model: CardModel, size: GeneratedSize, adapter: Adapter = None
) -> Plan:
    """Plan these rows, with generation in a Worker of its own."""
    data = make_prompts(folder, rows=size.rows, least=size.prompt, most=size.prompt)
    # A group advantage needs two answers; `GenerationCalls` has one to a prompt.
    how: dict[str, Any] = {"batch": size.rows, "n": 2, "max_tokens": size.answer}
    graph = card_graph(base, data, model, adapter=adapter, **how)
    return plan_graph(graph, RunOptions(workers="apart", threads=1))


class GenerationCalls:
    """Generation of a size, opened once for each longest answer; all share the weights."""

    def __init__(self, planned: Plan, size: GeneratedSize) -> None:
        self._planned, self._size = planned, size
        self._modules: dict[str, Any] = {}
        self.answers: list[int] = []
        """Tokens of each row of the last call."""

    def time(self, answer: int, repeats: int) -> list[float]:
        """Seconds of each call with answers of so many tokens at most."""
        size, program = self._size, self._planned.program
        assert program is not None
        planned_node = self._planned.node(NODE)
        node = kernel_node(planned_node, program)
        lengths = {"n": 1, "max_tokens": answer, "max_prompt_tokens": size.prompt}
        node = replace(node, params={**node.params, **lengths}, returns=())
        layout = replace(planned_node.layout, slots=size.rows)
        kernel = open_node(planned_node, node, layout, self._modules).kernel
        cell = ProfileCell(rows=size.rows, prompt=size.prompt, answer=answer)
        rows = draw_prompts(cell, kernel.vocabulary)
        chunk = Chunk(id=0, step=1, keys=rows.keys, inputs={"prompt": rows})

        def generate_rows() -> None:
            self.answers = []
            for batch in kernel.run(chunk):
                self.answers += batch.ragged("completion_ids").lengths.tolist()

        durations = time_each(generate_rows, repeats)
        kernel.close()
        return durations


def measure_generation(
    folder: Path, base: str, model: CardModel, size: GeneratedSize, rates: CardRates
) -> list[SideResult]:
    """Generate one token, then all; the first call of each does not count."""
    calls = GenerationCalls(plan_generation(folder, base, model, size), size)
    prefill_seconds = median(calls.time(1, 3)[1:])
    first, *others = calls.time(size.answer, 3)
    answers, seconds = calls.answers, median(others)
    decode_seconds = max(1e-9, seconds - prefill_seconds)
    passes = max(answers) - 1
    least_bytes = count_read_bytes(model_sizes(base, model.dtype), size.prompt, answers)
    name = f"generate {size.rows} rows, prompts of {size.prompt}"
    return [
        SideResult(
            name=f"{name}: share of the memory roofline",
            value=least_bytes / rates.copy / decode_seconds,
            unit="share",
            goal=GOAL,
        ),
        SideResult(name=f"{name}: a token", value=1e3 * decode_seconds / passes, unit="ms"),
        SideResult(name=f"{name}: prompts", value=1e3 * prefill_seconds, unit="ms"),
        SideResult(name=f"{name}: in all", value=sum(answers) / seconds, unit="tokens/s"),
        SideResult(name=f"{name}: first call", value=first, unit="s"),
    ]


def main(
    *,
    quick: bool = False,
    json: Path | None = None,
    rates: Path | None = None,
    base: Path | None = None,
) -> None:
    """Measure generation.

    Args:
        quick: a tiny Model and few rows; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        rates: what gpu_rates wrote; without it they are measured now.
        base: a folder that keeps the Model's directory.
    """
    results, model = SavedResults(json), card_model(quick=quick)
    card_rates = find_card_rates(rates, quick=quick)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        directory = make_base(base or folder, model)
        size = QUICK if quick else SIZE
        results.add(*measure_generation(folder, directory, model, size, card_rates))
    results.show("generation on this card")


if __name__ == "__main__":
    tyro.cli(main)
