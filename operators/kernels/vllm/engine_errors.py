"""What goes wrong in vLLM, as one error of this project: its first cause, or ranks that are gone.

Owns: the words, and telling the two apart. Does not own: what becomes of the engine (engine.py), of
its Worker (engine/run/worker_process).
"""

from __future__ import annotations

import logging
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dataflow.errors import DataflowError, KernelError, ProcessLost

NOTICED = 2.0
"""Seconds within which the end of a rank's process is noticed, after what it caused elsewhere."""

_BY_VLLM = (0, -signal.SIGTERM)
"""Exit codes of ranks that vLLM ends, once it has noticed that one is gone."""

_IN_A_RANK = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)


_CAUSE = "DATAFLOW_VLLM_CAUSE"
"""The variable with the path at which the first rank that does not start notes why."""


@contextmanager
def noted_causes() -> Iterator[Path]:
    """A file in which a rank that is started meanwhile notes why it does not start: vLLM says that
    in the rank's log alone.
    """
    with tempfile.TemporaryDirectory(prefix="dataflow-vllm-") as folder:
        path = Path(folder) / "cause"
        os.environ[_CAUSE] = str(path)
        try:
            yield path
        finally:
            del os.environ[_CAUSE]


class NotesCause(logging.Handler):
    """In a rank's process: notes the first exception that any rank logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._path = os.environ.get(_CAUSE, "")

    def emit(self, record: logging.LogRecord) -> None:
        """Note it, unless another rank has, or the start is over."""
        error = record.exc_info[1] if record.exc_info else None
        if self._path and isinstance(error, Exception):
            with suppress(OSError), open(self._path, "x", encoding="utf-8") as file:
                file.write(first_cause(error))


class VllmErrors:
    """A context that turns exceptions of vLLM's into one error. ranks: processes, of an executor
    of several.
    """

    def __init__(
        self,
        model: str,
        what: str,
        ranks: list[Any],
        instead: str = "",
        noted: Path | None = None,
    ) -> None:
        """what: expected, as a part of a sentence. instead: a fix. noted: where a rank has noted
        the cause, if it is there.
        """
        self._model = model
        self._what = what
        self._ranks = ranks
        self._instead = instead
        self._noted = noted

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, DataflowError):
            return
        expected = f"Model {self._model!r}: expected {self._what}"
        lost = find_lost_rank(self._ranks)
        if lost:
            raise ProcessLost(f"{expected}, found that {lost}.") from error
        fix = self._instead or "see the traceback in its Worker's log"
        cause = first_cause(error)
        if self._noted is not None and self._noted.is_file():
            cause = self._noted.read_text(encoding="utf-8")
        raise KernelError(f"{expected}, found {cause}. Fix: {fix}.") from error


def first_cause(error: Exception) -> str:
    """The error in one line; of one in a rank's process, what that said."""
    text = " ".join(str(error).split())
    in_rank = _IN_A_RANK.search(text)
    if in_rank:
        return in_rank[1]
    return f"{type(error).__name__}: {text}".rstrip(". ")


def find_lost_rank(processes: list[Any]) -> str:
    """How the first rank ended that vLLM did not end; empty if all are there."""
    if not processes or not wait([process.sentinel for process in processes], NOTICED):
        return ""
    ended = [process for process in processes if process.exitcode is not None]
    # False sorts first: a rank that ended otherwise than those that vLLM ends.
    first = min(ended, key=lambda process: process.exitcode in _BY_VLLM, default=None)
    if first is None:
        return ""
    rank = f"its rank {processes.index(first)} of {len(processes)}"
    if first.exitcode < 0:
        return f"{rank} was killed by {signal.Signals(-first.exitcode).name}"
    return f"{rank} ended with code {first.exitcode}"
