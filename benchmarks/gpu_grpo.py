"""Steps of GRPO on one card where generation and training take turns: seconds outside kernels.

    python -m benchmarks.gpu_grpo [--quick] [--json FILE] [--base FOLDER]

Owns: the size, and the share. Does not own: the run (gpu_runs.py).

A node's seconds are those of `time/<node>`: all that its Worker did for it, so also putting it to
sleep, waking it, and its weights, which are shown by themselves, too. What else a Step takes is
outside (`time/outside`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.gpu_models import card_graph, card_model, make_base, make_prompts
from benchmarks.gpu_runs import CardRun, run_on_card
from benchmarks.report import SavedResults, SideResult

GOAL = 5.0
"""Percent of a Step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoSize:
    """Prompts of a Step, answers to each, their tokens; Steps that count."""

    batch: int
    n: int
    answer: int
    least_prompt: int
    most_prompt: int
    steps: int


SIZE = GrpoSize(batch=64, n=8, answer=512, least_prompt=128, most_prompt=256, steps=2)
QUICK = GrpoSize(batch=2, n=2, answer=8, least_prompt=8, most_prompt=16, steps=1)


def step_results(card_run: CardRun, name: str) -> Iterator[SideResult]:
    """What a Step consists of."""
    step = card_run.step_seconds
    nodes = card_run.node_seconds()
    yield SideResult(
        name=f"{name}: seconds outside kernels",
        value=100.0 * card_run.outside_seconds() / step,
        unit="%",
        goal=GOAL,
        least=False,
    )
    yield SideResult(name=f"{name}: a Step", value=step, unit="s")
    for node, seconds in nodes.items():
        yield SideResult(name=f"{name}: {node}", value=seconds, unit="s")
    for word, seconds in card_run.other_seconds().items():
        yield SideResult(name=f"{name}: of these, {word}", value=seconds, unit="s")


def main(*, quick: bool = False, json: Path | None = None, base: Path | None = None) -> None:
    """Measure Steps.

    Args:
        quick: a tiny Model and short answers; not to be quoted.
        json: also write the results there, as a list of {name, value, unit, goal, holds}.
        base: a folder that keeps the Model's directory.
    """
    results, model = SavedResults(json), card_model(quick=quick)
    size = QUICK if quick else SIZE
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        directory = make_base(base or folder, model)
        data = make_prompts(folder, rows=size.batch, least=size.least_prompt, most=size.most_prompt)
        graph = card_graph(
            directory, data, model, batch=size.batch, n=size.n, max_tokens=size.answer
        )

        def save(card_run: CardRun) -> None:
            name = f"GRPO {size.batch} x {size.n} in turns"
            results.replace(*step_results(card_run, name))

        save(run_on_card(graph, folder / "runs", steps=size.steps, turns=True, each=save))
    results.show("a Step of GRPO on this card")


if __name__ == "__main__":
    tyro.cli(main)
