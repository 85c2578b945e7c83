"""axe-core finds no serious fault, in light and in dark, on wide and narrow screens."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser

from tests.browser.axe import serious_faults
from tests.browser.watched import NARROW, WIDE, watched
from tests.kit.page_client import PageClient

PAGES = [
    (),
    ("run", "steady"),
    ("run", "broken", "node", "score"),
    ("run", "steady", "edge", "rollout->score"),
    ("run", "steady", "sample", "60,train_policy,239,1"),
    ("compare", "steady,fast"),
]


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (WIDE, "light"),
        (NARROW, "dark"),
        pytest.param(WIDE, "dark", marks=pytest.mark.repeats),
        pytest.param(NARROW, "light", marks=pytest.mark.repeats),
    ],
)
def test_axe_finds_no_serious_fault_and_nothing_is_wider_than_the_screen(
    browser: Browser, server: PageClient, scheme: str, width: int
) -> None:
    with watched(browser, server, width=width, scheme=scheme) as shown:
        for way in PAGES:
            shown.go(*way)
            shown.settle()
            assert shown.page.evaluate("document.documentElement.scrollWidth") <= width, way
            assert serious_faults(shown) == [], way
