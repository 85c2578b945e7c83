"""Runs on the tiny model: its folder, data and usual options, and short quiet runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.graph import Graph
from dataflow.program import Program
from engine.api import Result, run
from engine.plan.options import RunOptions
from engine.session.attempts import OnStep, Until

PROMPTS = [a + b for a in "abcdefgh" for b in "xyz"]


def save_tiny_inputs(folder: Path) -> None:
    """model/ and teacher/ of a few thousand weights; train, test, demos and pairs.parquet."""
    from tests.kit.models import save_tiny

    save_tiny(folder / "model", layers=1)
    save_tiny(folder / "teacher", layers=1, seed=1)
    answers = [prompt[0] for prompt in PROMPTS]
    tables = {
        "train": {"prompt": PROMPTS, "answer": answers},
        "test": {"prompt": ["q", "rr", "sss"], "answer": ["q", "r", "s"]},
        "demos": {"prompt": PROMPTS, "completion": [answer * 3 for answer in answers]},
        "pairs": {
            "prompt": PROMPTS,
            "chosen": [answer * 3 for answer in answers],
            "rejected": [prompt[1] * 2 for prompt in PROMPTS],
        },
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")


@dataclass(frozen=True, kw_only=True)
class TinyRuns:
    """Runs of one test. folder: of `save_tiny_inputs`; runs: where run folders go."""

    folder: Path
    runs: Path

    def options(self, steps: int | None = 3, **changes: Any) -> RunOptions:
        usual = {"runs": self.runs, "threads": 1, "progress": False, "workers": "one"}
        return RunOptions(**{"steps": steps, "watchdog": 150.0} | usual | changes)

    def run(
        self,
        graph: Graph | Program | Callable[[Path], Graph | Program],
        steps: int | None = 3,
        *,
        on_step: Sequence[OnStep] = (),
        until: Until | None = None,
        **options: Any,
    ) -> Result:
        """Run this, or what a function makes for the folder. options: those that differ."""
        graph = graph if isinstance(graph, Graph | Program) else graph(self.folder)
        return run(graph, self.options(steps, **options), on_step=on_step, until=until)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As of `save_tiny_inputs`."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_inputs(folder)
    return folder


@pytest.fixture
def tiny(tiny_folder: Path, tmp_path: Path) -> TinyRuns:
    """Short runs in this test's own folder."""
    return TinyRuns(folder=tiny_folder, runs=tmp_path / "runs")
