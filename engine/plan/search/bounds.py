"""A placement in words: its groups, and what bounds its Step.

Owns: the words. Does not own: any number.
"""

from __future__ import annotations

from dataflow.kernel import Layout
from engine.plan.search.problem import DeviceGroup, Placement, PricedLayout, Problem


def describe_groups(problem: Problem, placement: Placement) -> str:
    """Write the groups: `rollout on 4 H100 (4 replicas); train_policy on 4 H100 (4 ranks)`."""
    return "; ".join(_describe_group(problem, placement, group) for group in placement.groups)


def _describe_group(problem: Problem, placement: Placement, group: DeviceGroup) -> str:
    pool = problem.pools[group.pool]
    names = [problem.nodes[member].name for member in group.members]
    layouts = dict.fromkeys(describe_layout(placement.layouts[member]) for member in group.members)
    unit = pool.kind if pool.is_gpu else "core" + "s" * (group.devices != 1)
    return f"{', '.join(names)} on {group.devices} {unit} ({'; '.join(layouts)})"


def describe_layout(priced: PricedLayout) -> str:
    """Write how a node is divided: `2 replicas x tensor 2`."""
    layout = priced.layout
    words: list[str] = []
    if layout.data > 1:
        words.append(f"{layout.data} ranks")
    if layout.replicas > 1:
        words.append(f"{layout.replicas} replicas")
    if layout.tensor * layout.inner > 1:
        words.append(f"tensor {layout.tensor * layout.inner}")
    text = " x ".join(words) or "whole"
    if layout.shard:
        text += ", sharded"
    if layout.recompute != "none":
        text += f", recompute {layout.recompute}"
    if layout.offload != "none":
        text += f", offload {layout.offload}"
    usual = Layout()
    if layout.tokens != usual.tokens:
        text += f", {layout.tokens} tokens at once"
    if layout.slots != usual.slots:
        text += f", {layout.slots} slots"
    return text


def describe_bound(problem: Problem, placement: Placement) -> str:
    """Write what a Step waits for most: of its busiest group the node that takes longest."""
    busiest: tuple[float, str] = (0.0, "")
    for group in placement.groups:
        seconds = sum(placement.layouts[member].seconds for member in group.members)
        longest = max(group.members, key=lambda member: placement.layouts[member].seconds)
        share = placement.layouts[longest].seconds / placement.seconds if placement.seconds else 0.0
        words = f"{problem.nodes[longest].name} takes {share:.0%} of it"
        busiest = max(busiest, (seconds, words))
    return busiest[1]
