"""Silence for transformers: it reports on its own what our checks raise or what does not matter.

Owns: its log level and progress bars around a call. Does not own: warnings of other libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' report of new weights: `require_sound` raises what matters in it."""
    before = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if bars:
            transformers_logging.enable_progress_bar()
