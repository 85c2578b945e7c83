"""What all tests of whole runs share: a model of a few thousand weights, data, and options of short
runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "unit")]

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, train.parquet, test.parquet, demos.parquet and verl.parquet."""
    from tests.kit.models import save_tiny

    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder / "model", layers=1)
    asked = [a + b for a in "abcdefgh" for b in "xyz"]
    pq.write_table(
        pa.table({"prompt": asked, "answer": [a[0] for a in asked]}), folder / "train.parquet"
    )
    pq.write_table(
        pa.table({"prompt": ["q", "rr", "sss"], "answer": ["q", "r", "s"]}), folder / "test.parquet"
    )
    pq.write_table(
        pa.table({"prompt": asked, "completion": [a[0] * 3 for a in asked]}),
        folder / "demos.parquet",
    )
    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": text}],
            "ability": "letters",
            "reward_model": {"style": "rule", "ground_truth": text[0]},
            "extra_info": {"split": "train", "index": index},
        }
        for index, text in enumerate(asked)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "verl.parquet")
    return folder


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., Any]:
    """RunOptions of a short quiet run in this test's own folder."""
    from engine.options import RunOptions

    def make(steps: int | None = 3, **changes: Any) -> RunOptions:
        given = {
            "steps": steps,
            "runs": tmp_path / "runs",
            "threads": 1,
            "progress": False,
            "watchdog": 150.0,
            "workers": "one",
        }
        return RunOptions(**given | changes)

    return make
