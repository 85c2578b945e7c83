"""The watermark of streamed Steps: never ahead of a row that still comes.

Owns: this promise, at every moment of a simulated run. Does not own: the parts that follow
(weather.py).
"""

from __future__ import annotations

import numpy as np

from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.prompts import RUNNING
from engine.coordinator.streamed_groups import first_generations
from engine.coordinator.tables import PENDING
from engine.run.simulated_workers.simulation import Simulation


def require_watermark_behind(run: Simulation) -> None:
    """Every row of a first generation that has not come will have more tokens than the
    watermark.
    """
    for name, table in run.coordinator.sources.tables.items():
        if table.stream is None or not table.stream.watermark:
            continue
        watermark = table.stream.watermark
        for node in first_generations(table.nodes):
            least = _shortest_to_come(table, node)
            assert watermark < least, f"{name}: {watermark} is told, a row of {node} has {least}"


def _shortest_to_come(table: PromptTable, node: str) -> int:
    """Tokens of the shortest row that may still come, as simulated Workers count them."""
    prompts = table.prompts
    slots = prompts.slots(RUNNING)
    at, samples = np.nonzero(table._tables[node].state[slots] == PENDING)
    tokens = 1 + (prompts.position[slots[at]] * 31 + samples) % 17
    return int(tokens.min(initial=np.iinfo(np.int32).max))
