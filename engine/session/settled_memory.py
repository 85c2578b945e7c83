"""Memory that lasts as long as a run, which the garbage collector need not look at.

Owns: when it is frozen, and thawed. Does not own: what it holds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.protocol.events import Opened


@contextmanager
def settled_memory() -> Iterator[Callable[[Opened], None]]:
    """Keep what imports and opening made out of the garbage collector's walks."""
    # What the process itself has frozen would be thawed at the end.
    settles = not gc.get_freeze_count()

    def take(event: Opened) -> None:
        if settles:
            gc.collect()
            gc.freeze()

    try:
        yield take
    finally:
        if settles:
            gc.unfreeze()
