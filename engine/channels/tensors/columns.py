"""Values of columns declared `device` that a Worker keeps, by block, where they were made.

Owns: keeping them until their block is released, picking rows of them. Does not own: the blocks
(the outbox, which has how many values each row has), how others get them (pairs.py), which columns
are on a device (the plan).

Kept and released by a Worker's own threads, picked by those that send: each call is one look at a
dictionary, and what was found stays whole while somebody holds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dataflow.batch import Ragged
from dataflow.device import taken
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
        """Columns that can be asked for by this number; nobody changes them any more."""
        self._kept[block] = columns

    def release(self, block: int) -> None:
        """Forget them, if there are any."""
        self._kept.pop(block, None)

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def picked(self, block: int, columns: Sequence[str], rows: np.ndarray | None) -> list[Tensor]:
        """The values of these rows (None: of all) of each of these columns, picked on their device.

        Raises KeyError for a block that is not there, RunError for a column or a row that it has
        not.
        """
        kept = self._kept[block]
        missing = [name for name in columns if name not in kept]
        if missing:
            raise RunError(
                f"block {block}: expected the device columns {', '.join(kept)}, found"
                f" {', '.join(missing)}"
            )
        try:
            return [
                kept[name].values if rows is None else taken(kept[name], rows).values
                for name in columns
            ]
        except DataError as error:
            raise RunError(f"block {block}: {error}") from error
