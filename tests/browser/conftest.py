"""The browser, the runs that no run made, and their server: one of each for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser.served import Served, served
from tests.browser.synthetic import FAILED, FINISHED, Made, make
from tests.browser.watched import Watched, chromium, watched
from tests.kit.tiny_runs import tiny, tiny_folder  # noqa: F401  (fixtures)

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs, one that failed, and one that ended without a word."""
    root = tmp_path_factory.mktemp("synthetic")
    make(root, Made(name="steady", ended=FINISHED))
    make(root, Made(name="fast", lr=2e-3, seed=1, ended=FINISHED))
    make(root, Made(name="broken", steps=23, seed=2, ended=FAILED))
    make(root, Made(name="lost", steps=9, seed=3))
    return root / "runs"


@pytest.fixture(scope="session")
def server(runs: Path) -> Iterator[Served]:
    with served(runs) as found:
        yield found


@pytest.fixture
def wide(browser: Browser, server: Served) -> Iterator[Watched]:
    with watched(browser, server) as found:
        yield found
