"""The rows that a decode loop writes: of each its prompt and its random stream, by number.

Owns: the numbers, which go to other rows when theirs have left, so that a loop that never ends
keeps no more than what is in it. Does not own: what was written (decoding.py), which rows wait
(row_queue.py), keys (torch/).
"""

from __future__ import annotations

import numpy as np

from operators.kernels.decoding import DecodeTask

GONE = -1
"""The prompt of a number that no row has."""


class TaskRows:
    """The rows of a DecodeTask, and of those that join it. prompt_of_row int64 [numbers], GONE
    where there is no row; seeds uint64 [numbers]; lengths int64 [prompts]: tokens of each prompt.
    """

    def __init__(self, task: DecodeTask) -> None:
        counts = task.row_counts
        self.prompt_of_row = np.repeat(np.arange(len(counts)), counts)
        self.seeds = task.seeds.copy()
        self.lengths = task.prompts.lengths.astype(np.int64)
        self._ids = _list_prompts(task)
        self._members = counts.copy()

    def __len__(self) -> int:
        """How many numbers there are."""
        return len(self.prompt_of_row)

    def prompt(self, number: int) -> np.ndarray:
        """The token ids of a prompt."""
        return self._ids[number]

    def count(self) -> int:
        """Count the rows that have not left."""
        return int((self.prompt_of_row != GONE).sum())

    def list_prompts(self) -> np.ndarray:
        """The prompts of rows that have not left, int64 ascending."""
        return np.flatnonzero(self._members)

    def join(self, task: DecodeTask, held: np.ndarray) -> np.ndarray:
        """Take in the rows of a further task. held: bool [prompts], which numbers are in use though
        their rows have left. Returns the rows' numbers, int64 ascending, in the task's order.
        """
        counts = task.row_counts
        prompts = self._number_prompts(len(counts), held)
        rows = self._number_rows(int(counts.sum()))
        self.prompt_of_row[rows] = np.repeat(prompts, counts)
        self.seeds[rows] = task.seeds
        self.lengths[prompts] = task.prompts.lengths
        self._members[prompts] = counts
        for number, ids in zip(prompts.tolist(), _list_prompts(task), strict=True):
            self._ids[number] = ids
        return rows

    def release(self, rows: np.ndarray) -> None:
        """These rows have left: their numbers, and those of prompts without rows, are free."""
        np.subtract.at(self._members, self.prompt_of_row[rows], 1)
        self.prompt_of_row[rows] = GONE

    def order_prompts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The prompts of these rows, each once, in the order of the rows; and of each row the index
        of its prompt among them. int64.
        """
        prompts, firsts, indices = np.unique(
            self.prompt_of_row[rows], return_index=True, return_inverse=True
        )
        order = np.argsort(firsts)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return prompts[order], rank[indices]

    def _number_rows(self, count: int) -> np.ndarray:
        free = np.flatnonzero(self.prompt_of_row == GONE)
        more = _count_more(count - len(free), len(self))
        if more:
            free = np.concatenate([free, len(self) + np.arange(more)])
            self.prompt_of_row = np.pad(self.prompt_of_row, (0, more), constant_values=GONE)
            self.seeds = np.pad(self.seeds, (0, more))
        return free[:count]

    def _number_prompts(self, count: int, held: np.ndarray) -> np.ndarray:
        total = len(self._ids)
        free = np.flatnonzero((self._members == 0) & ~held)
        more = _count_more(count - len(free), total)
        if more:
            free = np.concatenate([free, total + np.arange(more)])
            self.lengths = np.pad(self.lengths, (0, more))
            self._members = np.pad(self._members, (0, more))
            self._ids += [np.zeros(0, np.int32)] * more
        return free[:count]


def _list_prompts(task: DecodeTask) -> list[np.ndarray]:
    return [task.prompts[index] for index in range(len(task.prompts))]


def _count_more(missing: int, total: int) -> int:
    """How many numbers to add where some are missing: a quarter at least, so that many tasks that
    join one by one copy little.
    """
    return max(missing, total // 4) if missing > 0 else 0
