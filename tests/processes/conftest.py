"""Shared by all tests of whole runs: the tiny model, short runs on it, and nothing left of them."""

from __future__ import annotations

import os

import pytest

from tests.kit.nothing_left import nothing_is_left  # noqa: F401  (a fixture)
from tests.kit.processes import call_python
from tests.kit.supervisors import start  # noqa: F401  (a fixture)
from tests.kit.tiny_runs import tiny, tiny_folder  # noqa: F401  (fixtures)

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def the_fork_server_has_imported() -> None:
    """So that no test waits for that: some watch how long nothing moves."""
    call_python("-c", "")


@pytest.fixture(autouse=True)
def no_process_outlives_its_test(nothing_is_left: None) -> None:  # noqa: F811
    """Every process of a run has ended and was waited for when the call returns."""
