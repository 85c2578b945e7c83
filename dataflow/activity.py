"""What this process is doing, on a page that another process can read even if this one hangs.

Owns: the page's content. Does not own: the page and its reader (engine/run/loop/watchdog.py).
"""

from __future__ import annotations

import mmap

_page: mmap.mmap | None = None
"""One per process: if it has several runs, only one of them computes at a time."""


def show_on(page: mmap.mmap) -> None:
    """From now on, `show` writes to this page."""
    global _page
    _page = page


def hide(page: mmap.mmap) -> None:
    """Stop writing to this page."""
    global _page
    if _page is page:
        _page = None


def show(text: str) -> None:
    """Say what is under way from now on; does nothing if there is no page.

    The text ends with a NUL: what a longer one has left behind it is nothing's.
    """
    if _page is not None:
        shown = text.encode(errors="backslashreplace")[: len(_page) - 1] + b"\0"
        _page[: len(shown)] = shown
