"""The browser, the runs that no run made, and their server: one of each for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.synthetic import FAILED, FINISHED, Made, make
from tests.browser.watched import Watched, chromium, watched
from tests.kit.page_client import PageClient, served
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
def server(runs: Path) -> Iterator[PageClient]:
    """One for all tests, however busy the machine is."""
    with served(runs, limit=1800.0) as found:
        yield found


@pytest.fixture
def wide(browser: Browser, server: PageClient) -> Iterator[Watched]:
    with watched(browser, server) as found:
        yield found


@pytest.fixture
def steady(wide: Watched) -> Page:
    """The page of the run `steady`, with all that it shows at first."""
    page = wide.go("run", "steady")
    expect(page.locator(".track").first).to_be_visible()
    wide.settle()
    return page
