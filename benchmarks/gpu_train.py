"""Training on one card: the share of its matrix product, and peak bytes against the plan's.

    python -m benchmarks.gpu_train [--quick] [--json FILE] [--rates FILE] [--base FOLDER]

Owns: the sizes, and operations of a Step. Does not own: the card's rates (gpu_rates.py), opening
the kernel (gpu_kernels.py).

A Step is one update of the train kernel with the clipped policy loss. Counted are 6 operations a
token and parameter (2 forward, 4 backward; of the head only where a token is predicted) and causal
attention once, as `operations` of the plan has them: what is computed again does not count.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import tyro

from benchmarks.gpu_kernels import (
    CardPeak,
    estimated_peak,
    model_sizes,
    open_alone,
    plan_graph,
    time_each,
)
from benchmarks.gpu_models import CardModel, card_graph, card_model, make_base, make_prompts
from benchmarks.gpu_rates import CardRates, find_card_rates
from benchmarks.report import SavedResults, SideResult
from dataflow.adapters import Adapter
from dataflow.kernel import Assignment
from engine.plan.cost.model_passes import Sizes, operations
from engine.plan.cost.profile import ProfileCell
from engine.plan.cost.training import pack_rows
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.predict.profile.generated_rows import draw_inputs

NODE = "train_policy"
PEAK_GOAL = 1.25
"""Measured over estimated peak bytes, at most."""
_PASSES = 3.0
"""Forward passes that one with its backward pass counts as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSize:
    """Rows of a Step. micro: fed tokens of a micro-batch, of which there are `passes`. recompute:
    as Layout has it. goal: share of the matrix product. bounded: whether the peak has a goal.
    """

    name: str
    prompts: int
    samples: int
    prompt: int
    answer: int
    micro: int
    recompute: Literal["none", "layers"]
    goal: float
    bounded: bool = False

    @property
    def cell(self) -> ProfileCell:
        """The rows, as they are drawn."""
        return ProfileCell(
            rows=self.prompts * self.samples,
            prompt=self.prompt,
            answer=self.answer,
            samples=self.samples,
        )


SIZES = (
    TrainedSize(
        name="16,384 packed tokens",
        prompts=8,
        samples=8,
        prompt=512,
        answer=960,
        micro=16_384,
        recompute="none",
        goal=0.45,
    ),
    TrainedSize(
        name="32,768 tokens a row",
        prompts=1,
        samples=2,
        prompt=512,
        answer=32_256,
        micro=32_768,
        recompute="layers",
        goal=0.35,
        bounded=True,
    ),
)
"""Four micro-batches of two prompts, each 512 + 8 x 960 tokens; two micro-batches of one row."""


def shortened_size(size: TrainedSize) -> TrainedSize:
    """The same with so few tokens that a CPU does it at once."""
    return replace(size, prompt=size.prompt // 64, answer=size.answer // 64, micro=size.micro // 64)


def count_operations(size: TrainedSize, sizes: Sizes) -> float:
    """Operations of a Step that count."""
    row_count = size.prompts * size.samples
    fed = pack_rows(
        np.full(row_count, size.prompt),
        np.full(row_count, size.answer),
        budget=size.micro,
        shared=size.samples,
    )
    return _PASSES * operations(sizes, fed.tokens, fed.keys, fed.predicted)


def plan_training(
    folder: Path, base: str, model: CardModel, size: TrainedSize, adapter: Adapter = None
) -> Plan:
    """Plan these rows, with training in a Worker of its own."""
    data = make_prompts(folder, rows=size.prompts, least=size.prompt, most=size.prompt)
    graph = card_graph(
        base,
        data,
        model,
        batch=size.prompts,
        n=size.samples,
        max_tokens=size.answer,
        adapter=adapter,
    )
    options = RunOptions(
        workers="apart",
        threads=1,
        recompute={NODE: size.recompute},
        offload={NODE: "none"},
    )
    return plan_graph(graph, options)


def measure_training(
    folder: Path, base: str, model: CardModel, size: TrainedSize, rates: CardRates, repeats: int
) -> list[SideResult]:
    """Train a few Steps; the first two do not count, since they compile."""
    planned = plan_training(folder, base, model, size)
    planned_node = planned.node(NODE)
    memory = CardPeak()
    alone = open_alone(planned, NODE, replace(planned_node.layout, tokens=size.micro), {})
    kernel = alone.kernel
    inputs = draw_inputs(size.cell, alone.node, kernel.vocabulary)
    keys = inputs["rows"].keys
    assignment = Assignment(sequence=1, step=1, keys=keys, inputs=inputs)
    warm_up = time_each(lambda: kernel.step(assignment), 2)
    memory.begin()
    seconds = median(time_each(lambda: kernel.step(assignment), repeats))
    measured_peak = memory.read()
    fed_tokens = kernel.step(assignment)["train/fed_tokens"]
    kernel.close()
    reached = count_operations(size, model_sizes(base, model.dtype)) / seconds
    name, peak_goal = f"train {size.name}", PEAK_GOAL if size.bounded else None
    return [
        SideResult(
            name=f"{name}: share of the matrix product",
            value=reached / rates.product,
            unit="share",
            goal=size.goal,
        ),
        SideResult(name=f"{name}: reached", value=reached / 1e12, unit="TFLOP/s"),
        SideResult(name=f"{name}: a Step", value=1e3 * seconds, unit="ms"),
        SideResult(name=f"{name}: fed", value=fed_tokens, unit="tokens"),
        SideResult(name=f"{name}: opened in", value=alone.seconds, unit="s"),
        SideResult(name=f"{name}: first Step", value=warm_up[0], unit="s"),
        SideResult(name=f"{name}: peak", value=measured_peak / 2**30, unit="GiB"),
        SideResult(
            name=f"{name}: peak over the estimate",
            value=measured_peak / estimated_peak(planned_node),
            unit="ratio",
            goal=peak_goal,
            least=False,
        ),
    ]


def main(
    *,
    quick: bool = False,
    json: Path | None = None,
    rates: Path | None = None,
    base: Path | None = None,
) -> None:
    """Measure training.

    Args:
        quick: a tiny Model and few tokens; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        rates: what gpu_rates wrote; without it they are measured now.
        base: a folder that keeps the Model's directory.
    """
    results, model = SavedResults(json), card_model(quick=quick)
    card_rates = find_card_rates(rates, quick=quick)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        directory = make_base(base or folder, model)
        for size in SIZES:
            chosen = shortened_size(size) if quick else size
            repeats = 1 if quick else 3
            results.add(*measure_training(folder, directory, model, chosen, card_rates, repeats))
    results.show("training on this card")


if __name__ == "__main__":
    tyro.cli(main)
