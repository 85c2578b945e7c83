"""Weights from trainer to generator on one card: from offered to loaded, beside a copy of them.

    python -m benchmarks.gpu_weights [--quick] [--json FILE] [--rates FILE] [--base FOLDER]

Owns: the size, and the ratio. Does not own: the run (gpu_runs.py), the card's rates (gpu_rates.py).

Both Workers stay on the card. A copy on the device reads and writes each byte once, at the rate
that was measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import tyro

from benchmarks.gpu_kernels import model_sizes
from benchmarks.gpu_models import card_graph, card_model, make_base, make_prompts
from benchmarks.gpu_rates import CardRates, find_card_rates
from benchmarks.gpu_runs import CardRun, run_on_card
from benchmarks.report import SavedResults, SideResult

GOAL = 10.0
"""Times a copy, at most."""
BATCH, SAMPLES, ANSWER, STEPS = 8, 8, 16, 4
PROMPT = 32


def weight_results(card_run: CardRun, weight_bytes: int, rates: CardRates) -> Iterator[SideResult]:
    """The seconds of a version, and what they are beside a copy."""
    seconds = median(card_run.offered_to_loaded())
    copy_seconds = 2.0 * weight_bytes / rates.copy
    yield SideResult(
        name="weights: offered to loaded, over a device copy",
        value=seconds / copy_seconds,
        unit="ratio",
        goal=GOAL,
        least=False,
    )
    yield SideResult(name="weights: offered to loaded", value=1e3 * seconds, unit="ms")
    yield SideResult(name="weights: a device copy", value=1e3 * copy_seconds, unit="ms")
    yield SideResult(name="weights: a version", value=weight_bytes / 2**30, unit="GiB")
    for word, mean_seconds in card_run.other_seconds().items():
        yield SideResult(name=f"weights: {word}", value=1e3 * mean_seconds, unit="ms")
    for metric, number in card_run.medians("weights/").items():
        yield SideResult(name=metric, value=1e3 * number, unit="ms")


def main(
    *,
    quick: bool = False,
    json: Path | None = None,
    rates: Path | None = None,
    base: Path | None = None,
) -> None:
    """Measure the way of weights.

    Args:
        quick: a tiny Model and one Step; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        rates: what gpu_rates wrote; without it they are measured now.
        base: a folder that keeps the Model's directory.
    """
    results, model = SavedResults(json), card_model(quick=quick)
    card_rates = find_card_rates(rates, quick=quick)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        directory = make_base(base or folder, model)
        data = make_prompts(folder, rows=BATCH, least=PROMPT, most=PROMPT)
        graph = card_graph(directory, data, model, batch=BATCH, n=SAMPLES, max_tokens=ANSWER)
        steps = 1 if quick else STEPS
        card_run = run_on_card(graph, folder / "runs", steps=steps, turns=False)
        weight_bytes = model_sizes(directory, model.dtype).weight_bytes
        results.add(*weight_results(card_run, weight_bytes, card_rates))
    results.show("weights on this card")


if __name__ == "__main__":
    tyro.cli(main)
