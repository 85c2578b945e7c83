"""Closing what an attempt opens.

Owns: which error counts where there are two. Does not own: what is opened (attempts.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from dataflow.errors import StorageError

_log = logging.getLogger(__name__)


class _Closable(Protocol):
    def close(self) -> None: ...


C1 = TypeVar("C1", bound=_Closable)


@contextmanager
def close_at_end(thing: C1) -> Iterator[C1]:
    """Close it at the end. After an error, a failure to close is only logged. Raises what its
    `close` does.
    """
    try:
        yield thing
    except BaseException:
        try:
            thing.close()
        except StorageError as error:
            _log.info("after that: %s", error)
        raise
    thing.close()
