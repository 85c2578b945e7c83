"""What axe-core finds at fault in a page.

Owns: running it. Does not own: axe-core itself (vendor/), which pages are looked at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.browser.watched import Watched

_AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8")


def serious_faults(shown: Watched) -> list[Any]:
    """(impact, rule, element, what is wrong) of each serious fault of the page as it is now."""
    shown.page.evaluate(_AXE)
    faults = shown.page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
    return [
        (fault["impact"], fault["id"], node["html"][:200], node["failureSummary"])
        for fault in faults
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]
