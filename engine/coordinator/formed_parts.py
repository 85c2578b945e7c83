"""Into which parts a Step with a lag is cut as it is formed.

Owns: the cut. Does not own: what becomes of the parts (step_parts.py), those of a Step that is
generated meanwhile (part_cut.py).

All rows are there, so each part has rows of every length: ranks that train one together have about
as many tokens. The cut follows from the Step's prompts and their lengths alone.
"""

from __future__ import annotations

import numpy as np

from engine.coordinator.balance import split_evenly
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.streamed_groups import first_generations


def cut_formed(table: PromptTable, slots: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Cut these prompts (int64 [prompts], their slots) into as many parts of about equal tokens as
    have so many tokens of answers each.
    """
    slots = table.prompts.sort_slots(slots)
    positions = table.prompts.position[slots]
    prompt_tokens = np.zeros(len(slots), dtype=np.int64)
    for name in first_generations(table.nodes):
        rows = table.rows(name, slots)
        row_tokens = table.blocks.row_tokens(rows.block, rows.row)
        places = np.searchsorted(positions, rows.keys.position)
        np.add.at(prompt_tokens, places, row_tokens)
    count = max(1, int(prompt_tokens.sum()) // tokens)
    part = split_evenly(prompt_tokens, min(count, len(slots)))
    return [slots[part == number] for number in np.unique(part)]
