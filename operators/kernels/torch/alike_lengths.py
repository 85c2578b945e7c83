"""Where rows in order are cut, so that those that are padded to one length are alike.

Owns: the cuts. Does not own: what a part computes, or what a further one costs (decode_pass.py,
prompt_feeding.py).

All rows of one product take as long as the longest of them, and what the others lack is hidden. One
row that was given a long answer would make every other one as slow.
"""

from __future__ import annotations

import numpy as np


def cut_alike(lengths: np.ndarray, least: float) -> list[tuple[int, int]]:
    """Cut rows into parts begin .. end - 1, in order, wherever that spares more than `least`.
    lengths: int64 [rows]; a part takes as many as its rows times the longest of them.
    """
    spans, parts = [(0, len(lengths))], list[tuple[int, int]]()
    while spans:
        begin, end = spans.pop()
        cut, spared = _find_cut(lengths[begin:end])
        if spared > least:
            spans += [(begin + cut, end), (begin, begin + cut)]
        else:
            parts.append((begin, end))
    return parts


def _find_cut(lengths: np.ndarray) -> tuple[int, int]:
    """The best place to cut, and how much less is taken if it is cut there."""
    rows = len(lengths)
    if rows < 2:
        return 0, 0
    longest_before = np.maximum.accumulate(lengths)[:-1]
    longest_behind = np.maximum.accumulate(lengths[::-1])[::-1][1:]
    before = np.arange(1, rows)
    taken = before * longest_before + (rows - before) * longest_behind
    best = int(taken.argmin())
    return best + 1, int(rows * lengths.max() - taken[best])
