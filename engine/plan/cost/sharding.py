"""Seconds that passes take longer where FSDP splits the weights over data and context
ranks.

Owns: which bytes are gathered and summed in a pass, and which of them the device waits for. Does
not own: seconds of the pass itself (model_passes.py), bytes of memory (training_memory.py).

A layer is gathered for its forward and for its backward pass, what is in no layer once for both
(torch's fully_shard); gradients are summed into parts in float32. Tensor ranks each do so with
their part, among the data ranks that have the same.

On a GPU the next layer is gathered, and the gradients of the last one are summed, while a layer
computes: fully_shard gives both to streams of their own. A pass waits for what comes before its
first layer, and for what comes after its last one:

    forward    what is in no layer, one layer
    backward   one layer; the sums of one layer and of what is in no layer

All else is waited for as far as it takes longer than what the pass computes. Nothing is hidden
behind launches or behind the collectives of tensor ranks, and nothing on a CPU, whose cores do
both.
"""

from __future__ import annotations

from engine.plan.cost.devices import Place
from engine.plan.cost.memory import WIDTHS
from engine.plan.cost.model_passes import Sizes, Time


def sharding_time(
    model: Sizes, where: Place, computing: Time, passes: int, *, backward: float = 0.0
) -> Time:
    """Time that so many passes take longer, all of which take `computing` without it. backward:
    forward passes that each one's backward pass counts as; 0 without one. link: also what is
    hidden.
    """
    if not where.shard or where.sharing == 1:
        return Time()
    reached = where.coefficients["train"]
    rate = where.between * reached.link * where.sharing / (where.sharing - 1)
    tables = model.part_tables(where.tensor)
    layers = model.part_parameters(where.tensor) - tables
    one_layer = layers / model.shape.layers
    gathered_once = (tables + one_layer) * model.width
    gathered = (layers - one_layer) * model.width
    computed = (computing.seconds - computing.link - computing.latency) / passes
    forward = computed / (1.0 + backward) if where.device.is_gpu else 0.0
    waited = gathered_once / rate + max(0.0, gathered / rate - forward)
    link, collectives = (gathered_once + gathered) / rate, 1
    if backward:
        # Of a Model that trains a part: gradients of that, and the layers above it.
        summed = model.trained_parameters(where.tensor) * WIDTHS["float32"]
        at_ends = (tables + one_layer) / (tables + layers)
        passed = model.passed_share * layers * model.width
        first = min(passed, one_layer * model.width)
        ends = first + at_ends * summed
        between = passed - first + (1.0 - at_ends) * summed
        waited += ends / rate + max(0.0, between / rate - forward * backward)
        link, collectives = link + (ends + between) / rate, 3
    hops = passes * collectives * model.shape.layers * reached.hop
    return Time(seconds=passes * waited + hops, link=passes * link, latency=hops)
