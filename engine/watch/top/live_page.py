"""The page on a terminal, drawn anew about once a second, until `q` or Ctrl-C.

Owns: keys, and restoring the terminal. Does not own: the text (page.py). Keys are read only from a
terminal: what a pipe brings is left there.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from engine.watch.top.page import page_lines
from engine.watch.top.run_view import SeenRun

_EVERY = 1.0
"""Seconds between two looks."""
_KEYS = "q quits, r folds replicas"


def watch(look: Callable[[], SeenRun], *, replicas: bool) -> None:
    """Show what `look` returns, again and again. Raises what it raises, with the terminal as it
    was.
    """
    console = Console()
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        pressed = ""
        while pressed != "q":
            replicas ^= pressed == "r"
            live.update(_draw(look(), console, replicas), refresh=True)
            pressed = key()


def _draw(seen: SeenRun, console: Console, replicas: bool) -> Group:
    """As many lines as there is room for; a terminal may change its size."""
    lines = list(page_lines(seen, width=max(40, console.width), replicas=replicas))
    room = max(1, console.height - 1)
    if len(lines) > room:
        more = len(lines) - room + 1
        lines = [*lines[: room - 1], Text(f"{more} more lines", style="dim")]
    # The keys stand in the screen's last line, however short the page is.
    lines += [Text()] * (room - len(lines))
    lines.append(Text(_KEYS, style="dim"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


@contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """A function that waits for a key, and returns it, or nothing after a while."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor, termios.TCSANOW)  # what was typed before counts
    try:
        yield lambda: _key(descriptor)
    finally:
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_key() -> str:
    select.select([], [], [], _EVERY)
    return ""


def _key(descriptor: int) -> str:
    """`q` at the terminal's end, too."""
    if not select.select([descriptor], [], [], _EVERY)[0]:
        return ""
    return os.read(descriptor, 1).decode("ascii", "replace") or "q"
