"""Lists of lists as list columns, without what tests of models import."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from dataflow.batch import Ragged


def ragged(rows: Sequence[Sequence[float]], kind: Any = np.int32) -> Ragged:
    """Lists as a list column."""
    lengths = [len(row) for row in rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Ragged(np.array(list(chain.from_iterable(rows)), dtype=kind), offsets)
