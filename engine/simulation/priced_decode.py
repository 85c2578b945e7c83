"""A replica's decoding in simulated time, of a plan's node.

Owns: with which sizes, place and slots it begins. Does not own: when its rows begin and end
(engine/plan/joining_decode.py).
"""

from __future__ import annotations

from collections.abc import Callable

from engine.plan.costs import PlanCosts
from engine.plan.joining_decode import PricedDecode
from engine.plan.plan import PlannedNode
from engine.plan.row_lengths import RowLengths


def begin_decode(costs: PlanCosts, node: PlannedNode, slower: Callable[[], float]) -> PricedDecode:
    """Begin the decoding of one replica of a plan's node. slower: how much longer its kernel takes
    while others compute on its host, asked as rows come.
    """

    def slow_down(rows: RowLengths) -> float:
        return costs.correction(node.name, rows) * slower()

    return PricedDecode(
        costs.require_sizes(node.name),
        costs.place(node.name),
        costs.decode_limits(node.name),
        segments=node.segments,
        # What no profile has measured has the seconds of the cost model, whatever else runs.
        slowdown=slow_down if costs.entry(node.name) is not None else None,
    )
