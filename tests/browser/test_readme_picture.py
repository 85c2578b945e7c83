"""The picture at the head of the README, and the script that makes it from a real run."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from tests.kit.processes import ROOT, call_python


def test_the_script_makes_the_readmes_picture(tmp_path: Path) -> None:
    out = tmp_path / "page.png"
    done = call_python(
        str(ROOT / "scripts" / "page_picture.py"),
        *("--steps", "2", "--warm-steps", "2", "--out", str(out)),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    with Image.open(out) as made, Image.open(ROOT / "docs" / "page.png") as kept:
        assert made.size == kept.size
        colours = made.convert("RGB").getcolors(1 << 24)
    assert colours is not None
    assert len(colours) > 50, "the page is empty"
    head = (ROOT / "README.md").read_text().splitlines()[:4]
    assert any("docs/page.png" in line for line in head)
