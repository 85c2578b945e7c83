"""The kernel of `turn_reward`: its function, and the share of episodes without a reward.

Owns: the metric. Does not own: the formula (operators/turn_formulas.py), calling functions on
columns (host.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.batch import Batch
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from operators.kernels.host import ColumnFunction
from operators.turn_formulas import find_unrewarded


class TurnRewards(ColumnFunction):
    """Also reports `reward/turn/none`, the share of rows without any reward."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """As of any function on columns."""
        super().open(node, layout, session)
        self._session = session

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """As of any function on columns."""
        unrewarded = find_unrewarded(chunk.inputs["episode"])
        if len(unrewarded):
            self._session.metric("reward/turn/none", float(unrewarded.mean()), len(unrewarded))
        yield from super().run(chunk)
