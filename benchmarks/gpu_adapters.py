"""Adapters on one card: what they cost in generation, and what they save in training.

    python -m benchmarks.gpu_adapters [--quick] [--json FILE] [--base FOLDER]

Owns: the sizes, both ratios. Does not own: opening the kernels (gpu_kernels.py), Models and graph
(gpu_models.py), the same on a CPU (adapters.py).

Sides take turns, in one process. Generation is that of 64 rows, the prompts' own pass too; a Step
is one update with the clipped policy loss.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import tyro

from benchmarks.gpu_generate import GeneratedSize, GenerationCalls, plan_generation
from benchmarks.gpu_kernels import CardPeak, estimated_peak, open_alone, time_each
from benchmarks.gpu_models import CardModel, card_model, make_base
from benchmarks.gpu_train import (
    NODE,
    PEAK_GOAL,
    SIZES,
    TrainedSize,
    plan_training,
    shortened_size,
)
from benchmarks.report import SavedResults, SideResult
from dataflow.adapters import Adapter, lora
from dataflow.kernel import Assignment
from engine.predict.profile.generated_rows import draw_inputs

GENERATED = GeneratedSize(rows=64, prompt=256, answer=128)
QUICK = GeneratedSize(rows=4, prompt=8, answer=8)
DECODE_GOAL = 1.25
"""Seconds of generation with an adapter over those of its base, at most."""
ADAPTERS: dict[str, Adapter] = {"whole": None, "adapter": lora(rank=16)}


def measure_generation(
    folder: Path, base: str, model: CardModel, size: GeneratedSize, repeats: int
) -> list[SideResult]:
    """Generate by the base alone and with an adapter; the first calls of each do not count."""
    milliseconds: dict[str, float] = {}
    name = f"generate {size.rows} rows"
    for side, adapter in ADAPTERS.items():
        calls = GenerationCalls(plan_generation(folder, base, model, size, adapter), size)
        milliseconds[side] = 1e3 * median(calls.time(size.answer, repeats + 1)[1:])
    return [
        SideResult(name=f"{name}: base", value=milliseconds["whole"], unit="ms"),
        SideResult(name=f"{name}: adapter", value=milliseconds["adapter"], unit="ms"),
        SideResult(
            name=f"{name}: adapter / base",
            value=milliseconds["adapter"] / milliseconds["whole"],
            unit="ratio",
            goal=DECODE_GOAL,
            least=False,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSide:
    """What Steps took, and their peak over the plan's."""

    milliseconds: float
    peak: float


def time_training(
    folder: Path, base: str, model: CardModel, size: TrainedSize, adapter: Adapter, repeats: int
) -> TrainedSide:
    """Train a few Steps; the first two do not count, since they compile."""
    planned = plan_training(folder, base, model, size, adapter)
    planned_node = planned.node(NODE)
    memory = CardPeak()
    layout = replace(planned_node.layout, tokens=size.micro)
    alone = open_alone(planned, NODE, layout, {})
    inputs = draw_inputs(size.cell, alone.node, alone.kernel.vocabulary)
    assignment = Assignment(sequence=1, step=1, keys=inputs["rows"].keys, inputs=inputs)
    time_each(lambda: alone.kernel.step(assignment), 2)
    memory.begin()
    seconds = median(time_each(lambda: alone.kernel.step(assignment), repeats))
    peak = memory.read() / estimated_peak(planned_node)
    alone.kernel.close()
    return TrainedSide(milliseconds=1e3 * seconds, peak=peak)


def measure_training(
    folder: Path, base: str, model: CardModel, size: TrainedSize, repeats: int
) -> list[SideResult]:
    """Train the whole Model, and an adapter beside it."""
    sides: dict[str, TrainedSide] = {}
    for side, adapter in ADAPTERS.items():
        sides[side] = time_training(folder, base, model, size, adapter, repeats)
    whole, adapted = sides["whole"], sides["adapter"]
    name = f"train {size.name}"
    return [
        SideResult(name=f"{name}: whole", value=whole.milliseconds, unit="ms"),
        SideResult(name=f"{name}: adapter", value=adapted.milliseconds, unit="ms"),
        SideResult(
            name=f"{name}: adapter / whole",
            value=adapted.milliseconds / whole.milliseconds,
            unit="ratio",
        ),
        SideResult(
            name=f"{name}: adapter, peak over the estimate",
            value=adapted.peak,
            unit="ratio",
            goal=PEAK_GOAL,
            least=False,
        ),
    ]


def main(*, quick: bool = False, json: Path | None = None, base: Path | None = None) -> None:
    """Measure adapters.

    Args:
        quick: a tiny Model and few tokens; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        base: a folder that keeps the Model's directory.
    """
    results, model = SavedResults(json), card_model(quick=quick)
    generated, trained, repeats = GENERATED, SIZES[0], 3
    if quick:
        generated, trained, repeats = QUICK, shortened_size(SIZES[0]), 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        directory = make_base(base or folder, model)
        results.add(*measure_generation(folder, directory, model, generated, repeats))
        results.add(*measure_training(folder, directory, model, trained, repeats))
    results.show("adapters on this card")


if __name__ == "__main__":
    tyro.cli(main)
