"""What this process is doing, on a page that another process can read even if this one hangs.

Owns: the page's content. Does not own: the page and its reader (engine/run/loop/watchdog.py).
"""

from __future__ import annotations

import mmap

_page: mmap.mmap | None = None
"""One per process: if it has several runs, only one of them computes at a time."""


def show_on(page: mmap.mmap) -> None:
    """Let `show` write to this page from now on."""
    global _page
    _page = page


def hide(page: mmap.mmap) -> None:
    """Stop writing to this page."""
    global _page
    if _page is page:
        _page = None


def show(text: str) -> None:
    """Write what is under way from now on; does nothing if there is no page."""
    if _page is None:
        return
    encoded = text.encode(errors="backslashreplace")[: len(_page) - 1]
    # A NUL ends the text: behind it there may be the rest of a longer one.
    terminated = encoded + b"\0"
    _page[: len(terminated)] = terminated
