"""Makes docs/page.png, the picture at the head of the README: a real run, as its page shows it.

    .venv/bin/python scripts/page_picture.py [--steps 120] [--out docs/page.png]

The run is the second half of the demo (examples/demo.py), one version behind: a policy that was
warmed up spells words backward, and generation and training have a Worker each. It takes about
three minutes. Chromium takes the picture (scripts/chromium installs it).
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import demo  # noqa: E402
import demo_task  # noqa: E402
import tyro  # noqa: E402
from PIL import Image  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402

from dataflow.model import linear  # noqa: E402
from dataflow.program import Program  # noqa: E402
from engine.api import run  # noqa: E402
from engine.plan.options import RunOptions  # noqa: E402
from engine.run.loop.signals import code  # noqa: E402
from graphs.grpo import grpo  # noqa: E402

WIDTH, HEIGHT = 1280, 1240


def trained(steps: int, warm_steps: int) -> Path:
    """The run folder, here, of GRPO on words, on a policy that was warmed up."""
    recipe = replace(demo.Recipe(), warm_steps=warm_steps)
    demo.prepare(Path(), recipe, seed=0)
    options = RunOptions(threads=1, checkpoint_every=100)
    warm = run(Program(demo.warm_phase(Path(), recipe)), replace(options, name="warm"))
    if warm.signal:
        raise SystemExit(code(warm.signal))
    graph = grpo(
        str(warm.trained["policy"]),
        "train.parquet",
        demo_task.exact_match,
        n=8,
        batch=32,
        max_tokens=10,
        lr=linear(5e-4, 5e-5, steps),
        minibatches=2,
        max_lag=1,
    )
    kept = replace(options, name="backward", steps=steps, samples="full", samples_every=10)
    result = run(graph, kept)
    if result.signal:
        raise SystemExit(code(result.signal))
    return result.folder


@contextmanager
def watched(runs: Path) -> Iterator[str]:
    """The URL of `dataflow watch` over these runs."""
    command = [
        str(Path(sys.executable).parent / "dataflow"),
        "watch",
        "--root",
        str(runs),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def picture(url: str, name: str) -> bytes:
    """The page of a run as PNG, at one and a half times its size."""
    chromium = shutil.which("chromium-headless-shell")
    if chromium is None:
        raise SystemExit(
            "page_picture: expected chromium-headless-shell, found none. Fix: scripts/chromium"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        size = {"width": WIDTH, "height": HEIGHT}
        page = browser.new_page(viewport=size, device_scale_factor=1.5, color_scheme="light")
        page.goto(url)
        page.goto(f"{url.partition('?')[0]}#/run/{name}")
        page.locator(".lane canvas").first.wait_for()
        for _ in range(2):
            page.get_by_label("Zoom out").click()
        page.wait_for_load_state("networkidle")
        made = page.screenshot(animations="disabled")
        browser.close()
    return made


def main(steps: int = 120, warm_steps: int = 1400, out: Path = ROOT / "docs" / "page.png") -> None:
    """Run, take the picture, write it with 256 colours.

    Args:
        steps: of GRPO.
        warm_steps: at most this many Steps of the warm start.
        out: the picture.
    """
    out = out.resolve()
    with tempfile.TemporaryDirectory() as place, chdir(place):
        folder = trained(steps, warm_steps)
        with watched(folder.parent) as url:
            made = Image.open(io.BytesIO(picture(url, folder.name)))
    # Coverage, so that what is small keeps its colour.
    how = {"method": Image.Quantize.MAXCOVERAGE, "dither": Image.Dither.NONE}
    made.convert("RGB").quantize(256, **how).save(out, optimize=True)
    print(f"wrote {out}")


if __name__ == "__main__":
    tyro.cli(main)
