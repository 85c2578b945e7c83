"""What the cost model predicts after a profile, against what is measured: seconds and peak bytes.

    python -m benchmarks.predicted [--quick] [--json FILE] [--threads N]

Owns: the Models and sizes, and the comparison. Does not own: measuring and fitting
(engine/profile), the formulas (engine/cost), how results are shown (report.py).

Nodes: of each Model and kind of pass, one size is held out between those of the profile's grid. It
is measured in the same rounds as the grid, in one process, so that profile and runs interleave; the
coefficients are fitted without it. Steps of one Worker, of overlap and of replicas: a run of each
before the profile and one after it; what `simulate` says of them stands beside what they took.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from json import loads
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro

from benchmarks.report import SideResult, machine, show, write_json
from benchmarks.settings import TEXT_TOKENS, character_tokenizer
from engine.api import plan, run
from engine.cost.devices import Device
from engine.cost.distribution import LengthDistribution, of_lengths
from engine.cost.profile import ProfileCell
from engine.options import RunOptions
from engine.plan.plan import Plan
from engine.profile.child import in_child
from engine.profile.fitting import fitted, peak_correction
from engine.profile.grid import works
from engine.profile.measuring import measure
from engine.profile.predicting import MeasuredCell, ProfiledWork, peak_bytes, seconds
from engine.profile.profiling import BUSY, ProfileRequest, profiled
from engine.profile.rates import measured_rates
from engine.simulate.predict import predict
from graphs.grpo import grpo

SECONDS_GOAL = 15.0
"""Percent by which predicted seconds of a node may differ."""
STEP_GOAL = 10.0
"""The same of a Step."""
WARM = 2
"""Steps that do not count."""
PEAK_GOAL = 1.25
"""Predicted over measured peak bytes, which must be 1 at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A Qwen2 of random weights."""

    name: str
    layers: int
    hidden: int


MODELS = (
    ModelSize(name="2 x 128", layers=2, hidden=128),
    ModelSize(name="4 x 256", layers=4, hidden=256),
    ModelSize(name="8 x 512", layers=8, hidden=512),
)


def make(folder: Path, size: ModelSize) -> tuple[str, str]:
    """The Model's directory and a file of prompts of 64 to 128 characters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    base, data = folder / size.name.replace(" ", ""), folder / "prompts.parquet"
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(TEXT_TOKENS), hidden_size=size.hidden, intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers, num_attention_heads=size.hidden // 32,
        num_key_value_heads=size.hidden // 32, max_position_embeddings=1024,
        tie_word_embeddings=True, eos_token_id=len(TEXT_TOKENS) - 1,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(base)
    character_tokenizer(TEXT_TOKENS).save_pretrained(base)
    texts = ["abcdefgh" * (8 + place % 9) + str(place) for place in range(256)]
    pq.write_table(pa.table({"prompt": texts, "answer": texts}), data)
    return str(base), str(data)


def digits(completions: list[str], **columns: object) -> list[float]:
    """The share of digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def planned(base: str, data: str, threads: int) -> Plan:
    """Of GRPO with a reference, so that all kinds of pass are there."""
    graph = grpo(base, data, digits, n=8, batch=16, max_tokens=128, beta=0.04)
    found = plan(graph, RunOptions(threads=threads, workers="one"))
    assert isinstance(found, Plan)
    return found


def held_out(work: ProfiledWork) -> ProfileCell:
    """A size between those of the grid: 5 of 16 prompts, three quarters of the lengths."""
    most = max(work.cells, key=lambda cell: cell.tokens)
    cell = replace(
        most,
        rows=max(1, (most.rows // most.samples) * 5 // 16) * most.samples,
        prompt=max(1, most.prompt * 3 // 4),
        answer=max(1, most.answer * 3 // 4),
    )
    return replace(cell, estimated=peak_bytes(work, cell))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeComparison:
    """Of a held-out size: seconds and peak bytes, as measured and as predicted."""

    measured: float
    predicted: float
    peak: int
    predicted_peak: int
    worst: float

    @property
    def off(self) -> float:
        """Percent that the prediction of seconds is too much, or too little (negative)."""
        return 100.0 * (self.predicted / self.measured - 1.0)

    @property
    def peaks(self) -> float:
        """Predicted over measured peak bytes."""
        return self.predicted_peak / self.peak


def compared(
    of: Plan, work: ProfiledWork, device: Device, repeats: int, *, busy: bool
) -> NodeComparison:
    """Measure a node's grid and its held-out size together; fit to the grid alone."""
    left = held_out(work)
    cells = sorted({*work.cells, left}, key=lambda cell: cell.estimated)
    task = partial(measure, of, replace(work, cells=tuple(cells)), repeats=repeats, busy=busy)
    result = in_child(task, threads=work.cores, needed={}, title=work.node)
    found: list[MeasuredCell] = list(result.told)
    at = cells.index(left)
    out, grid = found[at], [*found[:at], *found[at + 1 :]]
    how, said = fitted(work, device, grid)
    errors = [
        abs(s / c.cell.seconds - 1.0)
        for c, s in zip(grid, said, strict=True)
        if s is not None and c.cell.seconds
    ]
    assert out.cell.seconds is not None
    return NodeComparison(
        measured=out.cell.seconds,
        predicted=seconds(work, device, how, out),
        peak=out.cell.peak,
        predicted_peak=peak_correction(grid).of(out.cell.estimated),
        worst=max(errors),
    )


def node_results(
    folder: Path, models: Sequence[ModelSize], threads: int, *, quick: bool
) -> Iterator[SideResult]:
    """Each Model's nodes."""
    busy = os.getloadavg()[0] > BUSY
    rates = in_child(partial(_rates, threads), threads=threads, needed={}, title="rates").told[0]
    for size in models:
        of = planned(*make(folder, size), threads)
        longest = 1.0 if quick else 3.0
        wanted, _ = works([of], rates.device, quick=quick, longest=longest)
        for work in (work for work in wanted if work.cores == threads):
            found = compared(of, work, rates.device, 3 if quick else 5, busy=busy)
            where = f"{work.kind}, {size.name}"
            print(f"{where}: {found}", file=sys.stderr, flush=True)
            yield _goal(f"{where}: seconds measured", 1e3 * found.measured, "ms")
            yield _goal(f"{where}: seconds predicted", 1e3 * found.predicted, "ms")
            yield _goal(f"{where}: error", abs(found.off), "%", SECONDS_GOAL)
            yield _goal(f"{where}: worst error of the fit", 100 * found.worst, "%")
            yield _goal(f"{where}: peak measured", found.peak / 2**20, "MiB")
            yield _goal(f"{where}: peak predicted / measured", found.peaks, "", PEAK_GOAL)
            yield _goal(f"{where}: the same, at least", found.peaks, "", 1.0, least=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedGraph:
    """A way of placing the graph. options: of the run."""

    name: str
    max_lag: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


PLACES = (
    PlacedGraph(name="one Worker", options={"workers": "one"}),
    PlacedGraph(name="overlap at lag 1", max_lag=1, options={"workers": "auto"}),
    PlacedGraph(name="two replicas", options={"workers": "apart", "replicas": {"rollout": 2}}),
)


@dataclass(frozen=True, slots=True)
class RunRows:
    """How long the rows of some runs were."""

    prompts: LengthDistribution
    answers: LengthDistribution


def step_results(
    folder: Path, size: ModelSize, threads: int, *, quick: bool
) -> Iterator[SideResult]:
    """A Step of each placement. All run before the profile and after it; each is simulated with
    rows as long as those that it had.
    """
    base, data = make(folder, size)
    steps = WARM + (4 if quick else 10)
    graphs = {
        at.name: grpo(
            base, data, digits, n=8, batch=16, max_tokens=64, beta=0.04, max_lag=at.max_lag
        )
        for at in PLACES
    }
    common: dict[str, Any] = {"threads": threads, "progress": False}
    options = {at.name: RunOptions(**common, **at.options) for at in PLACES}
    runs = folder / f"runs {size.name}"

    def ran(when: str) -> dict[str, Path]:
        how = {"steps": steps, "runs": runs}
        told = {n: replace(options[n], **how, name=f"{n} {when}".replace(" ", "-")) for n in graphs}
        return {name: run(graph, told[name]).folder for name, graph in graphs.items()}

    before = ran("before")
    first = PLACES[0].name
    plans = {name: plan(graph, options[name]) for name, graph in graphs.items()}
    request = ProfileRequest(quick=quick, repeats=3 if quick else 5, longest=1.0 if quick else 3.0)
    one = plans[first]
    assert isinstance(one, Plan)
    profile = profiled(graphs[first], [one], options[first], request, lambda told: None).profile
    after = ran("after")
    for name, planned_graph in plans.items():
        assert isinstance(planned_graph, Plan)
        taken = [t for folder in (before[name], after[name]) for t in _taken(folder)]
        found = predict(
            planned_graph,
            steps=steps,
            lengths=_rows([before[name], after[name]]),
            profile=profile,
            spans=False,
        )
        expected = mean(step.end - step.start for step in found.steps if step.step > WARM)
        off = 100.0 * (expected / mean(taken) - 1.0)
        where = f"Step of {name}, {size.name}"
        print(f"{where}: {mean(taken)} {expected}", file=sys.stderr, flush=True)
        yield _goal(f"{where}: seconds measured", 1e3 * mean(taken), "ms")
        yield _goal(f"{where}: predicted", 1e3 * expected, "ms")
        yield _goal(f"{where}: error", abs(off), "%", STEP_GOAL)


def _taken(folder: Path) -> list[float]:
    """Seconds of each Step after the warm-up."""
    lines = map(loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["time/step"] for row in lines if row["step"] > WARM and "time/step" in row]


def _rows(folders: Sequence[Path]) -> RunRows:
    """A character is a token of the tokenizer that `make` saves."""
    tables = [pq.read_table(p) for f in folders for p in (f / "samples").glob("step_*.parquet")]
    prompts = [len(text) for table in tables for text in table["prompt"].to_pylist()]
    answers = [length for table in tables for length in table["length"].to_pylist()]
    return RunRows(of_lengths(np.array(prompts)), of_lengths(np.array(answers)))


def _rates(cores: int) -> Iterator[Any]:
    yield measured_rates(cores)


def _goal(
    name: str, value: float, unit: str, goal: float | None = None, *, least: bool = False
) -> SideResult:
    return SideResult(name=name, value=value, unit=unit, goal=goal, least=least)


def main(quick: bool = False, json: Path | None = None, threads: int = 1) -> None:
    """Print predicted beside measured. quick: fewer sizes and repeats, the two smaller Models.

    Args:
        quick: Fewer sizes and repeats, and the two smaller Models.
        json: Where to write the numbers.
        threads: Of each kernel.
    """
    where = machine()
    with tempfile.TemporaryDirectory() as made:
        models = MODELS[:2] if quick else MODELS
        results = list(node_results(Path(made), models, threads, quick=quick))
        results += step_results(Path(made), MODELS[0], threads, quick=quick)
        if not quick:
            results += step_results(Path(made), MODELS[1], threads, quick=quick)
    show("predicted against measured", results, where)
    if json is not None:
        write_json(json, results, where)


if __name__ == "__main__":
    tyro.cli(main)
