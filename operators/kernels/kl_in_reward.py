"""The kernel of `kl_in_reward`: its function, and the divergence as a metric.

Owns: the metric. Does not own: the formula (operators/advantage_formulas.py), calling functions on
columns (host.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.batch import Batch
from dataflow.kernel import Chunk, KernelNode, Layout, Session
from dataflow.user import Columns
from operators.advantage_formulas import estimate_token_kl
from operators.kernels.host import ColumnFunction


class KlInReward(ColumnFunction):
    """Also reports `policy/kl_reference`, the mean over the trained tokens."""

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """As of any function on columns."""
        super().open(node, layout, session)
        self._session = session

    def run(self, chunk: Chunk) -> Iterator[Batch]:
        """As of any function on columns."""
        yield from super().run(chunk)
        schemas = self._node.schemas
        params = self._node.params
        rollout = Columns(chunk.inputs["rollout"], schemas["rollout"])
        reference = Columns(chunk.inputs["reference"], schemas["reference"])
        tokens = int((rollout["completion_mask"].values > 0).sum())
        if tokens:
            estimates = estimate_token_kl(
                rollout, reference, kind=params["kind"], dialect=params["dialect"]
            )
            total = float(estimates.sum())
            self._session.metric("policy/kl_reference", total / tokens, tokens)
