"""Shared by all tests of whole runs: the tiny model, short runs on it, and nothing left of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kit.nothing_left import nothing_is_left  # noqa: F401  (a fixture)
from tests.kit.tiny_runs import TinyRuns, save_tiny_inputs

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def no_process_outlives_its_test(nothing_is_left: None) -> None:  # noqa: F811
    """Every process of a run has ended and was waited for when the call returns."""


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
