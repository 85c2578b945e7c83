"""The micro-batches that a node's rows are packed into.

Owns: which of a plan's numbers the packing takes. Does not own: packing (engine/plan/cost).
"""

from __future__ import annotations

from engine.plan.cost import training
from engine.plan.plan import PlannedNode
from engine.plan.row_lengths import RowLengths


def pack_rows_of(
    node: PlannedNode, rows: RowLengths, shared: int, divisor: int
) -> training.Microbatches:
    """Pack rows into a node's micro-batches; see training.pack_rows."""
    return training.pack_rows(
        rows.prompts,
        rows.answers,
        budget=node.layout.tokens,
        shared=max(1, shared),
        divisor=divisor,
    )
