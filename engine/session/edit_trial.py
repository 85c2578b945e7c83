"""What a resume changes in the parameters of a run, until a Step has ended with it.

Owns: taking it back where an error comes first, so that the next resume is without it. Does not
own: what may change (engine/keep/checkpoint/parameter_edits.py), the record of it
(engine/session/run_beginning.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType

from dataflow.errors import StorageError
from dataflow.safe_text import printable
from dataflow.storage import writing
from engine.keep.layouts_file import LAYOUTS
from engine.keep.run_folder import RunFolder
from engine.keep.untrusted_files import OPTIONS, PROFILE
from engine.session.run_beginning import CHANGES

_CHANGED = ("graph.json", CHANGES, OPTIONS, PROFILE, "plan.json", "plan.txt", LAYOUTS)
"""The records of a run that say what it goes on with."""


class TriedEdit:
    """Takes back what a resume wrote to the folder's records, where an error ends it before its
    first Step has ended; a context manager. A signal takes nothing back. what: the edit in words;
    empty if there is none.
    """

    def __init__(self, folder: RunFolder, what: str) -> None:
        self._folder = folder
        self._what = what
        self._texts_before: dict[str, str] = {}
        self._is_final = False

    def make_final(self, row: Mapping[str, float]) -> None:
        """Note that a Step has ended with it: it stays, whatever comes."""
        self._is_final = True

    def __enter__(self) -> TriedEdit:
        if not self._what:
            return self
        for name in _CHANGED:
            path = self._folder.path / name
            if path.is_file():
                self._texts_before[name] = path.read_text(encoding="utf-8", errors="replace")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._what or self._is_final or not isinstance(error, Exception):
            return
        start = f"{self._folder.path}: an error came before the first step with {self._what} ended"
        try:
            self._take_back()
            message = f"{start}, so it is taken back: the next resume is without it."
        except StorageError as failure:
            message = f"{start}, and it cannot be taken back: {failure} Fix: set the old value."
        print(printable(message), file=sys.stderr, flush=True)

    def _take_back(self) -> None:
        for name in _CHANGED:
            path = self._folder.path / name
            if name in self._texts_before:
                self._folder.write_text(name, self._texts_before[name])
            else:
                with writing("a record of the run", path):
                    path.unlink(missing_ok=True)
