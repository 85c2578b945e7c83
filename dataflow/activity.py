"""What this process is doing, on a page that a process outside can read whatever this one is in.

Owns: the page's content. Does not own: the page and who reads it (engine/run/watchdog.py).
"""

from __future__ import annotations

import mmap

_page: mmap.mmap | None = None
"""One for this process: of several runs in it one at a time computes."""


def show_on(page: mmap.mmap) -> None:
    """From now on `show` writes to this page."""
    global _page
    _page = page


def hide(page: mmap.mmap) -> None:
    """This page is read no longer."""
    global _page
    if _page is page:
        _page = None


def show(text: str) -> None:
    """What is under way from now on; nothing where nobody reads it."""
    if _page is not None:
        size = len(_page)
        _page[:] = text.encode(errors="backslashreplace")[:size].ljust(size, b"\0")
