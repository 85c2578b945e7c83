"""Values of `device` columns that a Worker keeps by block, on the device where they were made.

Does not own: the blocks and row lengths (the outbox), how others get them (pairs.py), which columns
are on a device (the plan). Threads need no lock: each call is one dictionary access.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dataflow.batch import Ragged
from dataflow.device import take_tensor_rows
from dataflow.errors import DataError, RunError

if TYPE_CHECKING:
    from torch import Tensor


class ColumnStore:
    """Device columns of blocks, by name."""

    def __init__(self) -> None:
        self._kept: dict[int, Mapping[str, Ragged]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, block: int, columns: Mapping[str, Ragged]) -> None:
        """Keep a block's columns, which must not change any more."""
        self._kept[block] = columns

    def release(self, block: int) -> None:
        """Forget a block's columns, if there are any."""
        self._kept.pop(block, None)

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def pick_rows(
        self, block: int, columns: Sequence[str], rows: np.ndarray | None
    ) -> list[Tensor]:
        """Take these rows (None: all) of each column on their device. Raises KeyError, RunError."""
        by_name = self._kept[block]
        if missing := [name for name in columns if name not in by_name]:
            expected, unknown = ", ".join(by_name), ", ".join(missing)
            raise RunError(
                f"block {block}: expected the device columns {expected}, found {unknown}"
            )
        wanted = [by_name[name] for name in columns]
        if rows is None:
            return [column.values for column in wanted]
        try:
            return [take_tensor_rows(column, rows).values for column in wanted]
        except DataError as error:
            raise RunError(f"block {block}: {error}") from error
