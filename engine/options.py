"""How a run is run: everything that is not the algorithm.

Owns: the options, once, for the command line and for Python. Does not own: the graph's own
parameters (its function's signature), nor any decision of the planner.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:  # the fields' docstrings are the command line's help
    """How the run is run; the graph's own parameters say what it computes."""

    steps: int | None = None
    """Steps to run; without it one pass over the training data."""
    seed: int = 0
    """Every random draw of the run comes from it."""
    name: str | None = None
    """Name of the run folder; the graph's own by default."""
    runs: Path = Path("runs")
    """Folder that holds the run folders."""
    overwrite: bool = False
    """Replace an earlier run of the same name."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes one at the end only."""
    keep: int = 2
    """Checkpoints to keep."""
    samples_every: int = 1
    """Steps between sample files."""
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Views of the metrics beside metrics.jsonl."""
    threads: int | None = None
    """Threads of each kernel; all cores by default."""
    inproc: bool = False
    """Run user functions in this process too, so that breakpoints and prints in them work (no time limit then)."""
    progress: bool = True
    """Show progress."""
    watchdog: float = 300.0
    """Seconds without any progress after which the run stops and names who waits for whom."""
