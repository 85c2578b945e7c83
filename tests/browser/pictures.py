"""Pictures compared with those in `goldens/`.

Owns: the tolerance, and what is written where they differ. `GOLDEN=write pytest ...` writes them.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image

GOLDENS = Path(__file__).parent / "goldens"
FAR = 48
"""Of 255, in any channel: a pixel that is further off differs; edges of letters are less."""
SHARE = 0.01
"""Of a picture's pixels that may differ: a version of Chromium draws a line elsewhere."""


def differing(a: Image.Image, b: Image.Image) -> float:
    """The share of pixels that differ; 1.0 for pictures of other sizes."""
    if a.size != b.size:
        return 1.0
    one, two = (np.asarray(each.convert("RGB"), dtype=np.int16) for each in (a, b))
    return float((np.abs(one - two).max(axis=2) > FAR).mean())


def require_same(made: bytes, name: str, beside: Path) -> None:
    """The golden picture of that name is the same, within tolerance; else `beside` has the new."""
    golden = GOLDENS / f"{name}.png"
    if os.environ.get("GOLDEN") == "write":
        _smaller(made).save(golden, optimize=True)
        return
    assert golden.exists(), f"no {golden.name}. Fix: GOLDEN=write pytest tests/browser, and look."
    found = Image.open(io.BytesIO(made))
    share = differing(found, Image.open(golden))
    if share > SHARE:
        found.save(beside / golden.name)
    assert share <= SHARE, f"{share:.2%} of {golden.name} differs; see {beside / golden.name}"


def _smaller(made: bytes) -> Image.Image:
    """256 colours are enough for the tolerance, and a third of the bytes."""
    return Image.open(io.BytesIO(made)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
