"""By what a profile tells the passes of planned nodes apart, and which of its entries is one's.

Owns: a node's kind of pass, answers of a prompt and kernel family. Does not own: the profile
(engine/plan/cost/profile.py), what its entries do to a plan's costs (costs.py).
"""

from __future__ import annotations

from engine.plan.cost.devices import Kind
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.profile import Profile, ProfiledNode, model_key
from engine.plan.plan import PlannedNode


def kind_of_pass(node: PlannedNode) -> Kind:
    """What a node that computes with a Model does with it most."""
    if node.traits.generates:
        return "decode"
    if node.work == "train":
        return "train"
    return "forward"


def samples_of(node: PlannedNode) -> int:
    """Answers of one prompt, in the rows that a node generates or reads."""
    inner = max(1, node.inner)
    if node.traits.generates:
        return max(1, node.live_rows // inner)
    return inner


def kernel_family(node: PlannedNode) -> str:
    """Whose kernel runs it: each is measured apart."""
    if "vllm" in node.kernel:
        return "vllm"
    return "torch"


def nearest_entry(
    profile: Profile, node: PlannedNode, model: Sizes, kind: Kind, cores: int
) -> ProfiledNode | None:
    """Find the entry of a Model and kind of pass that is most like what a node does; None where it
    was not measured. cores: of one rank.
    """
    return profile.node(
        model_key(model),
        kind,
        samples=samples_of(node),
        cores=cores,
        kernel=kernel_family(node),
    )
