"""Writes docs/troubleshooting.md: beginners' mistakes, their messages, and what these mean.

    .venv/bin/python scripts/troubleshooting.py [FILE]

The mistakes are those of tests/mistakes; the messages are the golden ones, which
tests/processes/test_mistakes.py gets from the commands. FILE: docs/troubleshooting.md by default.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.mistakes import Mistake  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "mistakes"
WIDTH = 118

TITLES = {
    "data": "Data",
    "model": "Models",
    "reward": "Rewards",
    "graph": "Graphs",
    "options": "The command line",
}

HEAD = """# When something goes wrong

Every message names the place, what was expected, what was found and the nearest fix. Below are
those that beginners meet, each with the command that led to it. `scripts/troubleshooting.py` writes
this page from commands that a test runs.

## Where to look first

| you see | look at |
|---|---|
| a message that is not clear | below, by its words; the command again with `--traceback` |
| a reward that stays the same | [how to debug a reward](how-to.md#debug-a-reward) |
| a run that stands still | after `--watchdog` seconds it stops and says who waits for whom |
| a run that was killed | `dataflow runs`; then `dataflow resume RUN_FOLDER` |
| too little memory | `dataflow explain TARGET`: what each node holds |
| a process that failed | `logs/<worker>.log` in the run folder |
| a breakpoint that is not reached | `--inproc` runs everything in one process |

"""


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join(line for kind in TITLES for line in section(kind)) + "\n"


def section(kind: str) -> Iterator[str]:
    """The mistakes of one kind."""
    yield f"## {TITLES[kind]}"
    yield ""
    for mistake in importlib.import_module(f"tests.mistakes.{kind}").MISTAKES:
        yield from entry(kind, mistake)


def entry(kind: str, mistake: Mistake) -> Iterator[str]:
    """A mistake: the command, its message, and what that means."""
    told = (GOLDEN / kind / f"{mistake.name}.txt").read_text(encoding="utf-8")
    yield f"### {mistake.what}"
    yield ""
    yield "```text"
    yield from wrapped(f"$ {mistake.command}")
    for line in told.strip().splitlines():
        yield from wrapped(line)
    yield "```"
    yield ""
    yield from textwrap.wrap(mistake.why, WIDTH, break_on_hyphens=False)
    yield ""


def wrapped(line: str) -> list[str]:
    """A line of a terminal; its further lines are indented."""
    lines = textwrap.wrap(
        line, WIDTH, subsequent_indent="    ", break_on_hyphens=False, drop_whitespace=True
    )
    return lines or [""]


def main(file: Path) -> None:
    """Write the page."""
    file.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "troubleshooting.md")
