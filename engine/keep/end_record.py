"""How a run ended, kept in its folder as ended.json.

Owns: the record, when it is written, reading it. Does not own: why a run ends, in which state a
folder's run is (reader/run_state.py). A killed run leaves no record, and one that goes on deletes
it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec

from dataflow.errors import RunError, StorageError
from dataflow.safe_text import one_line
from dataflow.storage import writing
from engine.keep.run_folder import ENDED, RunFolder

_log = logging.getLogger(__name__)

EndState = Literal["finished", "interrupted", "failed"]
_LONGEST = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """interrupted: by a signal. reason: what the run said, or the first line of its error."""

    state: EndState
    reason: str


class EndRecord:
    """Writes the record as the block that it is around ends; `tell` says how it ended well.

    Raises StorageError if it cannot be written, unless the block raised something itself.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._end: RunEnd | None = None

    def tell(self, reason: str, *, interrupted: bool) -> None:
        """The run came to an end of its own, or one that a signal asked for."""
        self._end = RunEnd(state="interrupted" if interrupted else "finished", reason=reason)

    def __enter__(self) -> EndRecord:
        path = self._folder.path / ENDED
        with writing("a record of the run", path):
            path.unlink(missing_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            end = self._end
        else:
            end = _ended_by(error)
        assert end is not None, "nobody told how the run ended"
        try:
            self._folder.write_text(ENDED, msgspec.json.encode(end).decode() + "\n")
        except StorageError as lost:
            if error is None:
                raise
            _log.info("after that: %s", lost)


def _ended_by(error: BaseException) -> RunEnd:
    if isinstance(error, KeyboardInterrupt):
        state = "interrupted"
    else:
        state = "failed"
    first = str(error).partition("\n")[0] or type(error).__name__
    return RunEnd(state=state, reason=one_line(first)[:_LONGEST])


def end_of(folder: Path) -> RunEnd | None:
    """How a run ended; None if it left no word. Raises RunError for a damaged record."""
    path = folder / ENDED
    if not path.is_file():
        return None
    return parse_end(path.read_bytes(), path)


def parse_end(content: bytes, path: Path) -> RunEnd:
    """The record in a file's content. path: of the file. Raises RunError for a damaged one."""
    try:
        return msgspec.json.decode(content, type=RunEnd)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fix = "delete it: the run then counts as one that ended without a word"
        raise RunError(f"{path}: expected how the run ended, found {error}. Fix: {fix}.") from error
