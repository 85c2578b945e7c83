"""What an adapter costs in generation, and what a subset saves in the backward pass.

    python -m benchmarks.adapters [--quick] [--json FILE] [--threads N]

Owns: both ratios, and their goals. Does not own: the models and chunks (generate.py), the rows of
training (train_step.py), bytes of activations (tests/unit/test_activation_bytes.py), how results
are shown (report.py).

Sides take turns within a round, in one process, and a ratio is the median over rounds. Generation
is a whole chunk, prompts too, of 64 rows. A backward pass is that of a Step of the train kernel,
from the loss to the gradients.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from benchmarks.generate import Generation, chunk_of, opened, prepare, tokens_of
from benchmarks.report import SideResult, machine, show, write_json
from benchmarks.train_step import OneProcess, rows_of
from dataflow.adapters import lora, subset
from dataflow.batch import Batch
from dataflow.kernel import Assignment, KernelNode, Layout
from dataflow.loss import Loss, LossTerm
from dataflow.model import Model
from dataflow.schema import Advantage
from operators import losses
from operators.kernels.torch.generate import TorchGenerate
from operators.kernels.torch.train import TorchTrain

DECODE_GOAL = 1.25
"""Seconds of generation with an adapter over those of its base, at most."""
BACKWARD_GOAL = 0.35
"""Seconds of the backward pass of `subset(last=4)` on 24 layers over those of the whole."""
ADAPTER = lora(rank=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedShape:
    """A chunk of 64 rows and how often it is generated."""

    shape: Generation
    rounds: int


SHAPES = {
    "2 x 128": GeneratedShape(
        shape=Generation(layers=2, hidden=128, rows=64, tokens=10, prompt=10), rounds=20
    ),
    "4 x 256": GeneratedShape(
        shape=Generation(layers=4, hidden=256, rows=64, tokens=64, prompt=64), rounds=3
    ),
    "6 layers of 0.5 B": GeneratedShape(
        shape=Generation(layers=6, hidden=896, rows=64, tokens=16, prompt=32, half=True), rounds=2
    ),
}
DEEP = Generation(layers=24, hidden=256, rows=0, tokens=0, prompt=0)
PARTS: dict[str, dict[str, Any]] = {
    "whole": {"trainable": True},
    "subset": {"trainable": subset(last=4)},
    "adapter": {"trainable": True, "adapter": ADAPTER},
}
STEPS = 3


class BackwardClock:
    """Seconds inside Tensor.backward."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside it, every call is added."""
        usual = torch.Tensor.backward

        def timed(*arguments: Any, **named: Any) -> None:
            began = time.perf_counter()
            usual(*arguments, **named)
            self.seconds += time.perf_counter() - began

        setattr(torch.Tensor, "backward", timed)  # noqa: B010
        try:
            yield
        finally:
            setattr(torch.Tensor, "backward", usual)  # noqa: B010


def time_in_turns(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side by round; a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        order = list(sides)
        if number % 2:
            order.reverse()
        for name in order:
            seconds[name].append(sides[name]())
    return {name: each[1:] for name, each in seconds.items()}


def median_ratio(seconds: dict[str, list[float]], of: str, to: str) -> float:
    """The median over rounds."""
    pairs = zip(seconds[of], seconds[to], strict=True)
    return statistics.median(one / other for one, other in pairs)


def measure_generation(
    generated: GeneratedShape, threads: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of a chunk, by the base alone and with an adapter."""
    shape, chunk = generated.shape, chunk_of(generated.shape)
    with tempfile.TemporaryDirectory() as folder:
        base = prepare(Path(folder), shape)
        kernels = {
            "base": opened(TorchGenerate(), base, shape, threads),
            "adapter": opened(TorchGenerate(), base, shape, threads, ADAPTER),
        }

    def time_of(kernel: Any) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            tokens_of(kernel, chunk)
            return time.perf_counter() - began

        return run

    sides = {name: time_of(kernel) for name, kernel in kernels.items()}
    return time_in_turns(sides, rounds)


def open_trainer(base: str, threads: int, part: dict[str, Any]) -> TorchTrain:
    """The train kernel of a Model of which this part is trained."""
    clipped = LossTerm(function=losses.CLIPPED_POLICY, label="loss", params=(("clip", 0.2),))
    models = {"model": Model("policy", base, **part)}
    kernel = TorchTrain()
    kernel.open(
        KernelNode(
            name="train",
            operator="train",
            models=models,
            params={"loss": Loss((clipped,)), "lr": 1e-5},
        ),
        Layout(tokens=16384, threads=threads),
        OneProcess(),
    )
    return kernel


def make_assignment() -> Assignment:
    """A Step of the demo's rows, with random advantages."""
    rows = rows_of("learning")
    ids = rows.ragged("completion_ids")
    gain = np.random.default_rng(1).standard_normal(len(ids.values)).astype(np.float32)
    advantage = Batch.make(rows.keys, {"advantage": ids.like(gain)}, Advantage)
    inputs = {"rows": rows, "loss.advantage": advantage}
    return Assignment(sequence=1, step=1, keys=rows.keys, inputs=inputs)


def measure_backward(threads: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of the backward pass of a Step, by what is trained."""
    assignment = make_assignment()

    def time_of(kernel: TorchTrain) -> Callable[[], float]:
        def run() -> float:
            clock = BackwardClock()
            with clock.running():
                kernel.step(assignment)
            return clock.seconds

        return run

    sides: dict[str, Callable[[], float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = prepare(Path(folder), DEEP)
        for name, part in PARTS.items():
            sides[name] = time_of(open_trainer(base, threads, part))
    return time_in_turns(sides, rounds)


def list_generation(name: str, seconds: dict[str, list[float]]) -> Iterator[SideResult]:
    """Of one shape."""
    ratio = median_ratio(seconds, "adapter", "base")
    where = f"generation, {name}"
    for side, each in seconds.items():
        yield SideResult(name=f"{where}: {side}", value=1e3 * statistics.median(each), unit="ms")
    yield SideResult(
        name=f"{where}: adapter / base", value=ratio, unit="ratio", goal=DECODE_GOAL, least=False
    )


def list_backward(seconds: dict[str, list[float]]) -> Iterator[SideResult]:
    """Of all parts."""
    for part, each in seconds.items():
        milliseconds = 1e3 * statistics.median(each)
        yield SideResult(name=f"backward, 24 layers: {part}", value=milliseconds, unit="ms")
    yield SideResult(
        name="backward, 24 layers: subset(last=4) / whole",
        value=median_ratio(seconds, "subset", "whole"),
        unit="ratio",
        goal=BACKWARD_GOAL,
        least=False,
    )
    ratio = median_ratio(seconds, "adapter", "whole")
    yield SideResult(name="backward, 24 layers: adapter / whole", value=ratio, unit="ratio")


def main(*, quick: bool = False, json: Path | None = None, threads: int = 1) -> None:
    """Measure.

    Args:
        quick: fewer rounds, without the widest shape; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        threads: of each kernel.
    """
    torch.set_num_threads(threads)
    where, results = machine(), []
    for name, generated in SHAPES.items():
        if quick and generated.shape.half:
            continue
        rounds = 2 if quick else generated.rounds
        results += list_generation(name, measure_generation(generated, threads, rounds))
    results += list_backward(measure_backward(threads, 2 if quick else STEPS))
    show(f"adapters, {threads} thread(s)", results, where)
    if json is not None:
        write_json(json, results, where)


if __name__ == "__main__":
    tyro.cli(main)
