"""What the cost model predicts after a profile, against what is measured: seconds and peak bytes.

    python -m benchmarks.predicted [--quick] [--json FILE] [--threads N]

Owns: the Models and sizes, and the comparison. Does not own: measuring and fitting
(engine/predict/profile), the formulas (engine/plan/cost), how results are shown (report.py).

Nodes: of each Model and kind of pass, one size is held out between those of the profile's grid. It
is measured in the same rounds as the grid, in one process, so that profile and runs interleave; the
coefficients are fitted without it. Steps of one Worker, of overlap and of replicas: runs and
profiles take turns, five of each (predicted_runs.py). Twelve cases that differ in what makes a
prediction hard (predicted_cases.py): the same, three of each. On a machine with GPUs the Models are
larger, the Steps are of one Worker, and there are no cases.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from string import ascii_letters
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import tyro

from benchmarks.predicted_cases import CASES, case_files, case_results
from benchmarks.predicted_runs import SteppedGraph, in_turns
from benchmarks.report import SavedResults, SideResult
from benchmarks.settings import TEXT_TOKENS, character_tokenizer
from dataflow.graph import Graph
from dataflow.model import Model
from engine.api import plan
from engine.plan.cost.devices import Device
from engine.plan.cost.fit_errors import measured_over_fitted
from engine.plan.cost.machine import gpus
from engine.plan.cost.profile import ProfileCell
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.predict.profile.child import run_in_child
from engine.predict.profile.fitting import fit_coefficients, fit_peaks
from engine.predict.profile.grid import choose_works
from engine.predict.profile.kernel_timing import measure
from engine.predict.profile.machine_rates import measure_rates
from engine.predict.profile.predictions import (
    MeasuredCell,
    ProfiledWork,
    predict_peak,
    predict_seconds,
)
from operators.advantage import group_advantage
from operators.data import prompts
from operators.forward import logprobs
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.train import train

SECONDS_GOAL = 15.0
"""Percent by which predicted seconds of a node may differ."""
STEP_GOAL = 10.0
"""The same of a Step."""
STEP_GOAL_ON_GPU = 15.0
ROUNDS = 5
"""Profiles, each between two runs of every placement."""
PEAK_GOAL = 1.25
"""Predicted over measured peak bytes, which must be 1 at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A Qwen2 of random weights. head: numbers of each of its heads."""

    name: str
    layers: int
    hidden: int
    head: int = 32
    vocabulary: int = len(TEXT_TOKENS)
    dtype: Literal["float32", "bfloat16"] = "float32"


MODELS = (
    ModelSize(name="2 x 128", layers=2, hidden=128),
    ModelSize(name="4 x 256", layers=4, hidden=256),
    ModelSize(name="8 x 512", layers=8, hidden=512),
)
_BIG: dict[str, Any] = {"head": 64, "vocabulary": 16384, "dtype": "bfloat16"}
ON_GPU = (
    ModelSize(name="8 x 512", layers=8, hidden=512, **_BIG),
    ModelSize(name="12 x 1024", layers=12, hidden=1024, **_BIG),
    ModelSize(name="16 x 1536", layers=16, hidden=1536, **_BIG),
)
BATCH = 16
BATCH_ON_GPU = 64
"""Prompts of a Step, each with 8 answers."""


def make(folder: Path, size: ModelSize) -> tuple[str, str]:
    """The Model's directory and a file of prompts of 64 to 128 characters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    base, data = folder / size.name.replace(" ", ""), folder / "prompts.parquet"
    torch.manual_seed(0)
    more = (f"<{at}>" for at in range(size.vocabulary - len(TEXT_TOKENS)))
    tokens = (*TEXT_TOKENS[:-1], *more, TEXT_TOKENS[-1])
    config = Qwen2Config(
        vocab_size=len(tokens), hidden_size=size.hidden, intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers, num_attention_heads=size.hidden // size.head,
        num_key_value_heads=size.hidden // size.head, max_position_embeddings=2048,
        tie_word_embeddings=True, eos_token_id=len(tokens) - 1,
    )  # fmt: skip
    Qwen2ForCausalLM(config).to(getattr(torch, size.dtype)).save_pretrained(base)
    character_tokenizer(tokens).save_pretrained(base)
    draw = random.Random(0)  # with nothing in common, as `simulate` assumes
    texts = ["".join(draw.choices(ascii_letters, k=64 + 8 * (at % 9))) for at in range(256)]
    pq.write_table(pa.table({"prompt": texts, "answer": texts}), data)
    return str(base), str(data)


def digits(completions: list[str], **columns: object) -> list[float]:
    """The share of digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def graph(base: str, data: str, size: ModelSize, *, max_tokens: int, max_lag: int = 0) -> Graph:
    """GRPO with a reference, so that all kinds of pass are there."""
    policy = Model("policy", base, trainable=True, dtype=size.dtype)
    prompt = prompts(data, batch=BATCH_ON_GPU if gpus() else BATCH)
    rollout = generate(policy, prompt, n=8, max_tokens=max_tokens, max_lag=max_lag, name="rollout")
    score = reward(digits, rollout, name="score")
    reference = logprobs(Model("reference", base, dtype=size.dtype), rollout)
    advantage = group_advantage(rollout, score, name="advantage")
    loss = clipped_policy_loss(advantage, reference=reference, beta=0.04)
    return Graph("predicted", train(policy, rollout, loss=loss, lr=1e-6))


def planned(base: str, data: str, size: ModelSize, threads: int) -> Plan:
    """Of one Worker."""
    one = RunOptions(threads=threads, workers="one")
    return _plan(graph(base, data, size, max_tokens=128), one)


def _plan(of: Graph, options: RunOptions) -> Plan:
    found = plan(of, options)
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
    return replace(cell, estimated=predict_peak(work, cell))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeComparison:
    """Of a held-out size: seconds and peak bytes, as measured and as predicted. others: the share
    of its cores that they had.
    """

    measured: float
    predicted: float
    peak: int
    predicted_peak: int
    worst: float
    others: float

    @property
    def off(self) -> float:
        """Percent that the prediction of seconds is too much, or too little (negative)."""
        return 100.0 * (self.predicted / self.measured - 1.0)

    @property
    def peaks(self) -> float:
        """Predicted over measured peak bytes."""
        return self.predicted_peak / self.peak


def compared(of: Plan, work: ProfiledWork, device: Device, repeats: int) -> NodeComparison:
    """Measure a node's grid and its held-out size together; fit to the grid alone."""
    left = held_out(work)
    cells = sorted({*work.cells, left}, key=lambda cell: cell.estimated)
    task = partial(measure, of, replace(work, cells=tuple(cells)), repeats=repeats)
    result = run_in_child(task, threads=work.cores, needed={}, title=work.node)
    found: list[MeasuredCell] = list(result.outputs)
    at = cells.index(left)
    out, grid = found[at], [*found[:at], *found[at + 1 :]]
    how, said = fit_coefficients(work, device, grid)
    errors = [
        abs(s / c.cell.seconds - 1.0)
        for c, s in zip(grid, said, strict=True)
        if s is not None and c.cell.seconds
    ]
    assert out.cell.seconds is not None
    known = [c.with_fit(s) for c, s in zip(grid, said, strict=True)]
    off = measured_over_fitted(known, left.rows, mean(out.prompts), mean(out.answers))
    return NodeComparison(
        measured=out.cell.seconds,
        predicted=predict_seconds(work, device, how, out) * off,
        peak=out.cell.peak,
        predicted_peak=fit_peaks(grid).of(out.cell.estimated),
        worst=max(errors),
        others=out.cell.others,
    )


def node_results(
    folder: Path, models: Sequence[ModelSize], threads: int, *, quick: bool
) -> Iterator[SideResult]:
    """Each Model's nodes."""
    task = partial(_rates, threads)
    (device,) = run_in_child(task, threads=threads, needed={}, title="rates").outputs
    for size in models:
        of = planned(*make(folder, size), size, threads)
        longest = 1.0 if quick else 3.0
        wanted, _ = choose_works([of], device, quick=quick, longest=longest)
        for work in (work for work in wanted if work.cores == threads):
            found = compared(of, work, device, 3 if quick else 5)
            where = f"{work.kind}, {size.name}"
            print(f"{where}: {found}", file=sys.stderr, flush=True)
            yield _goal(f"{where}: seconds measured", 1e3 * found.measured, "ms")
            yield _goal(f"{where}: seconds predicted", 1e3 * found.predicted, "ms")
            yield _goal(f"{where}: error", abs(found.off), "%", SECONDS_GOAL)
            yield _goal(f"{where}: worst error of the fit", 100 * found.worst, "%")
            yield _goal(f"{where}: share of its cores that others had", 100 * found.others, "%")
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


def step_results(
    folder: Path, size: ModelSize, threads: int, *, quick: bool
) -> Iterator[SideResult]:
    """A Step of each placement, after profiles of the first."""
    base, data = make(folder, size)
    common: dict[str, Any] = {"threads": threads, "progress": False}
    graphs = [
        SteppedGraph(
            name=at.name,
            graph=graph(base, data, size, max_tokens=64, max_lag=at.max_lag),
            options=RunOptions(**common, **at.options),
        )
        for at in (PLACES[:1] if gpus() else PLACES)
    ]
    rounds = 1 if quick else ROUNDS
    of_all = in_turns(graphs, folder / f"runs {size.name}", rounds=rounds)
    goal = STEP_GOAL_ON_GPU if gpus() else STEP_GOAL
    for name, of_steps in of_all.items():
        yield from of_steps.results(f"Step of {name}, {size.name}", goal)


def _cases(
    folder: Path, cases: Sequence[str] | None, threads: int, *, quick: bool
) -> Iterator[SideResult]:
    known = [case.name for case in CASES]
    names = known[: 3 if quick else len(known)] if cases is None else cases
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"--cases: expected some of {', '.join(known)}, found {unknown[0]!r}")
    files = case_files(folder, make(folder, MODELS[0])[0], make(folder, MODELS[1])[0])
    yield from case_results(folder, files, names, threads, quick=quick)


def _rates(cores: int) -> Iterator[Any]:
    yield measure_rates(cores)


def _goal(
    name: str, value: float, unit: str, goal: float | None = None, *, least: bool = False
) -> SideResult:
    return SideResult(name=name, value=value, unit=unit, goal=goal, least=least)


def main(
    quick: bool = False,
    json: Path | None = None,
    threads: int = 1,
    nodes: tuple[int, ...] | None = None,
    steps: tuple[int, ...] | None = None,
    cases: tuple[str, ...] | None = None,
) -> None:
    """Print predicted beside measured.

    Args:
        quick: Fewer sizes, repeats and rounds, and one Model less.
        json: Where to write the numbers.
        threads: Of each kernel.
        nodes: Models whose nodes are measured, by place; by default all three.
        steps: Models whose Steps are; by default the two smaller ones.
        cases: Names of cases; by default all, or with quick the first three.
    """
    results = SavedResults(json)
    results.add()  # so that there is a file, whatever is measured
    models = ON_GPU if gpus() else MODELS
    sizes = models[: 2 if quick else 3] if nodes is None else [models[at] for at in nodes]
    stepped = models[: 1 if quick else 2] if steps is None else [models[at] for at in steps]
    with tempfile.TemporaryDirectory() as made:
        for result in node_results(Path(made), sizes, threads, quick=quick):
            results.add(result)
        for size in stepped:
            results.add(*step_results(Path(made), size, threads, quick=quick))
        if not gpus():
            for result in _cases(Path(made), cases, threads, quick=quick):
                results.add(result)
    results.show("predicted against measured")


if __name__ == "__main__":
    tyro.cli(main)
