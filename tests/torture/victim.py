"""The run that is tortured: every writer of a run in one process, in a second or two.

Owns: the graph. Does not own: its parts (tests/processes/run_graphs.py), nor what is done to it.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "processes"), str(TESTS / "unit")]

import run_graphs  # noqa: E402

from dataflow.graph import Graph  # noqa: E402
from graphs.grpo import grpo  # noqa: E402


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
