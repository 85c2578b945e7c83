"""In which state a run is: running, finished, interrupted, failed, killed, or not to be known.

Owns: telling that from a run folder. Does not own: the record of an end
(engine/keep/end_record.py), what shows that a process still has the folder
(engine/keep/run_folder.py), how far the run is (run_summary.py).
"""

from __future__ import annotations

from pathlib import Path

from dataflow.errors import DataflowError
from engine.keep.end_record import parse_end
from engine.keep.reader.open_folder import OpenFolder
from engine.keep.run_folder import ENDED, is_held

NO_WORD = "ended without a word"
"""The state of a run that no process holds and that left no record of its end: it was killed, or is
of a version that kept none.
"""
UNKNOWN = "unknown"


def run_state(folder: OpenFolder, path: Path, problems: list[str]) -> tuple[str, str]:
    """(state, reason) of a run; what keeps it from being known is added to problems."""
    try:
        content = folder.read(ENDED)
        if content is not None:
            end = parse_end(content, path / ENDED)
            return end.state, end.reason
        if is_held(folder.path):
            return ("running", "")
        return (NO_WORD, "")
    except (DataflowError, OSError) as error:
        problems.append(str(error))
        return UNKNOWN, ""
