"""Requests to environments, as JSON: what a pool's calls become.

Owns: their form, and which dataset columns go along. Does not own: answers (answers.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.errors import DataError
from dataflow.operator import EVERY_COLUMN
from dataflow.prompt_types import Message
from operators.kernels.scoring_frames import describe_value


def reset_request(
    name: str, columns: Sequence[str], seed: int, row: Mapping[str, Any]
) -> dict[str, Any]:
    """Of a reset. columns: those that are passed. Raises DataError for a cell that JSON cannot
    hold.
    """
    passed: dict[str, Any] = {}
    for column, cell in row.items():
        if EVERY_COLUMN in columns or column in columns:
            passed[column] = cell
    for column, cell in passed.items():
        try:
            json.dumps(cell)
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"environment {name!r}: expected columns that JSON can hold, found"
                f" {describe_value(cell)} in column {column!r}. Fix: let its reset take only the"
                " columns that it needs."
            ) from error
    return {"call": "reset", "seed": seed, "row": passed}


def step_request(message: Message) -> dict[str, Any]:
    """Of a step."""
    return {"call": "step", "message": message}


def finish_request(reason: str) -> dict[str, Any]:
    """Of an episode's end."""
    return {"call": "finish", "reason": reason}


def drop_request(reason: str | None) -> dict[str, Any]:
    """Of an episode that is given up. reason: what its `finish` is told; None: nothing."""
    return {"call": "drop", "reason": reason}
