"""The run that is tortured: every writer of a run in one process, in a second or two."""

from __future__ import annotations

from pathlib import Path

from dataflow.graph import Graph
from graphs.grpo import grpo
from tests.kit import run_graphs


def evaluated(folder: str) -> Graph:
    """GRPO with two evaluations, the best versions of one of which are kept."""
    return run_graphs.evaluated(Path(folder), every=2, keep_best=1)


def lagging(folder: str) -> Graph:
    """GRPO at lag 1."""
    return run_graphs.small(Path(folder), max_lag=1)


def small(folder: str) -> Graph:
    """GRPO."""
    return run_graphs.small(Path(folder))


def asking(base: str, data: str) -> Graph:
    """GRPO on any data."""
    return grpo(base, data, run_graphs.vowels, n=2, batch=2, max_tokens=2)
