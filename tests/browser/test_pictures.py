"""The page looks as it did when somebody looked at it: goldens/, in light and dark, wide and
narrow.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, expect

from tests.browser.pictures import differing, require_same
from tests.browser.watched import NARROW, WIDE, watched
from tests.kit.page_client import PageClient

SHOWN = {
    "run": ("run", "steady"),
    "sample": ("run", "steady", "sample", "60,train_policy,239,1"),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("what", SHOWN)
def test_the_page_looks_as_its_golden_picture(
    browser: Browser, server: PageClient, tmp_path: Path, what: str, width: int, scheme: str
) -> None:
    with watched(browser, server, width=width, scheme=scheme) as found:
        page = found.go(*SHOWN[what])
        expect(page.locator(".lane canvas").first).to_be_visible()
        expect(page.locator(".samples .body .row").first).to_be_visible()
        found.settle()
        made = page.screenshot(full_page=what == "run", animations="disabled", caret="hide")
    require_same(made, f"{what}_{width}_{scheme}", tmp_path)


def test_a_picture_with_another_word_differs() -> None:
    """The comparison can fail: a label's worth of other pixels is more than the tolerance."""
    white = Image.new("RGB", (100, 100), "white")
    other = white.copy()
    other.paste("black", (0, 0, 100, 3))
    assert differing(white, other) == pytest.approx(0.03)
    assert differing(white, white) == 0.0
    assert differing(white, white.resize((99, 100))) == 1.0
