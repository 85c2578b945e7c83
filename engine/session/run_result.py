"""What is known of a run that has ended.

Owns: the Result. Does not own: making one (attempts.py, finished_run.py), showing it in a notebook
(notebook_pages.py) or on the screen (engine/cli/run.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from dataflow.display import Displayed
from engine.keep.metrics.metrics_table import history


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Displayed):
    """How a run ended. metrics: the last Step's row. checkpoint: the last checkpoint's folder."""

    _page = "engine.session.notebook_pages:result_page"

    folder: Path
    reason: str
    step: int
    metrics: Mapping[str, float]
    checkpoint: Path | None
    trained: Mapping[str, Path] = field(default_factory=dict)
    """Model name -> its Hugging Face directory in the last checkpoint; in a Program, in that of the
    last phase that trained it.
    """
    best: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """Evaluate node with keep_best -> Hugging Face directories of its best versions, best first."""
    signal: int = 0
    """The signal that ended it (Ctrl-C: SIGINT), after a checkpoint; 0: none did."""

    def __repr__(self) -> str:
        return f"Result({str(self.folder)!r}: {self.reason}, step {self.step})"

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended it."""
        return self.signal != 0

    @property
    def history(self) -> pa.Table:
        """Every Step's metrics, also those before a resume, a column each: null where a Step lacks
        one, or its number was not finite.
        """
        return history(self.folder / "metrics.jsonl")
