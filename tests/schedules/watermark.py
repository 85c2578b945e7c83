"""The watermark of streamed Steps: never ahead of a row that still comes.

Owns: this promise, at every moment of a simulated run. Does not own: the parts that follow
(weather.py).
"""

from __future__ import annotations

import numpy as np

from dataflow.batch import Keys
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.prompts import RUNNING
from engine.coordinator.streamed_groups import first_generations
from engine.coordinator.tables import PENDING
from engine.run.simulated_workers.simulation import Simulation


def require_watermark_behind(run: Simulation) -> None:
    """Every row of a first generation that still comes will have more tokens than the watermark."""
    for name, table in run.coordinator.sources.tables.items():
        if table.stream is None or not table.stream.watermark:
            continue
        watermark = table.stream.watermark
        for node in first_generations(table.nodes):
            least = _shortest_to_come(run, table, node)
            assert watermark < least, f"{name}: {watermark} is told, a row of {node} has {least}"


def _shortest_to_come(run: Simulation, table: PromptTable, node: str) -> int:
    """Tokens of the shortest row that still comes, as simulated Workers count them."""
    prompts = table.prompts
    slots = prompts.slots(RUNNING)
    at, samples = np.nonzero(table._tables[node].state[slots] == PENDING)
    slots = slots[at]
    keys = Keys(prompts.position[slots], samples.astype(np.int32), prompts.attempt[slots])
    # Those that are lost are given up just behind the rows that came with them.
    is_lost = run.outcomes.draw_lost_rows(node, keys) | run.outcomes.draw_failed_rows(node, keys)
    keys = keys.take(~is_lost)
    tokens = 1 + (keys.position * 31 + keys.sample) % 17
    return int(tokens.min(initial=np.iinfo(np.int32).max))
