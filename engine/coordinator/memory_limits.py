"""Limits that were lowered because a kernel's memory ran out, and what is left to lower.

    work                 first                              then
    decode               half as many rows at once          nothing, once it is one
    forward, train       half as many tokens in a pass,     train: layers are computed again in the
                         while that cuts it                 backward pass (recompute)

Owns: the limits of each node, and when the run has to end. Does not own: which work is begun again
(losses.py), what limits do in a kernel.

Limits are a node's, not a Worker's: at lag 0 a chunk has the same bits on every replica, so all
replicas take the same at once. They hold for the rest of the run, over attempts; a chunk that was
told with others keeps those, unless it was short itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from dataflow.memory_limits import MemoryLimits, MemoryNeed
from engine.plan.plan import Plan, PlannedNode
from engine.protocol.memory_messages import LimitLowered, Short

METRIC = "short"
"""short/NODE: how often its memory ran out in a Step."""


class LoweredLimits:
    """Of one run. lowered: of each node whose limits are lower than the plan's."""

    def __init__(self, plan: Plan, lowered: Mapping[str, MemoryLimits] | None = None) -> None:
        self._plan = plan
        self.lowered = dict(lowered or {})
        self._shorts: Counter[str] = Counter()

    def of(self, node: str) -> MemoryLimits | None:
        """What a node is told; None where it is the plan's."""
        return self.lowered.get(node)

    def lower(self, short: Short) -> LimitLowered | str | None:
        """A node was short of memory: what it has from now on, or why nothing helps. None where the
        limits that it had then were lowered meanwhile.
        """
        node = self._plan.node(short.node)
        before = self.of(node.name) or MemoryLimits.of(node.layout)
        self._shorts[node.name] += 1
        if short.limits != before:
            return None
        limits = find_lower(node.work, before, short.need)
        if limits is None:
            return self._describe_end(node, before, short)
        self.lowered[node.name] = limits
        peak = 0
        # With less at once than planned its estimate is of something else.
        if before == MemoryLimits.of(node.layout):
            peak = short.peak
        return LimitLowered(
            node=node.name,
            worker=short.worker,
            limits=limits,
            before=before,
            error=short.error,
            peak=peak,
        )

    def take_metrics(self) -> dict[str, float]:
        """How often nodes were short since the last call."""
        shorts, self._shorts = self._shorts, Counter()
        return {f"{METRIC}/{node}": float(count) for node, count in sorted(shorts.items())}

    def _describe_end(self, node: PlannedNode, limits: MemoryLimits, short: Short) -> str:
        """Why the run ends: nothing is left to lower."""
        need = short.need
        what = f"room for {need.doing}" if need.doing else "enough memory"
        if need.key is not None:
            what += f", of which row {need.key} has up to {need.longest} tokens"
        has = f"{limits.slots} rows at once" if node.work == "decode" else f"{limits.tokens} tokens"
        if limits.recompute == "layers":
            has += ", with layers computed again"
        return (
            f"{self._plan.place(node.name)}: expected {what}, found none at the lowest limits"
            f" ({has}): {short.error}. Fix: {_fix(node)}."
        )


def find_lower(work: str, limits: MemoryLimits, need: MemoryNeed) -> MemoryLimits | None:
    """The next lower limits for a node of this work; None where nothing would be less."""
    if work == "decode":
        slots = min(limits.slots, need.rows or limits.slots)
        return replace(limits, slots=slots // 2) if slots > 1 else None
    tokens = min(limits.tokens, need.tokens or limits.tokens)
    if need.is_divisible and tokens > 1:
        return replace(limits, tokens=tokens // 2)
    # An update of the weights has no activations: it is as large with recompute.
    if work == "train" and limits.recompute == "none" and need.key is not None:
        return replace(limits, recompute="layers")
    return None


def _fix(node: PlannedNode) -> str:
    """What the user can do about it."""
    if node.work == "decode":
        return f"a smaller max_tokens of {node.name}, or more memory"
    if node.work == "train":
        return f"--offload {node.name}=optimizer, --ranks {node.name}=2 --shard, or shorter rows"
    return f"--offload {node.name}=weights, shorter rows, or more memory"
