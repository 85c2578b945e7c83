"""What a node of some layout costs on some device, so quickly that thousands can be compared.

Owns: the price, (seconds of a Step, bytes of each device). Does not own: the formulas of passes and
bytes (model_passes.py, decode_curve.py, training.py, running_parts.py), which rows a plan's node
has (engine/plan/priced_work.py).

    seconds, size = node_cost(model, device("H100"), Layout(replicas=8, tensor=2), work)

Rows are said as distributions of lengths, whose quantiles stand for them. What depends on rows and
layout alone (the curve of a decode, the micro-batches of rows) is kept, so that another device
costs microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from dataflow.kernel import Layout
from engine.plan.cost import training
from engine.plan.cost.decode import cache_room
from engine.plan.cost.decode_curve import (
    DecodeRows,
    RowDistributions,
    decode_curve,
    make_batch,
    time_curve,
)
from engine.plan.cost.devices import CPU, Device, Kind, Place, catalogue_place
from engine.plan.cost.memory import HOST_PARTS, Work
from engine.plan.cost.model_passes import Sizes, Time
from engine.plan.cost.models import ModelCost
from engine.plan.cost.running_parts import (
    RunningKernel,
    divide_among_ranks,
    running_parts,
    weight_parts,
)

_MOST_PACKED = 16384
"""Rows that stand for all where these are packed into micro-batches."""
_MORE_STEPS = 4
"""Steps by whose seconds those of one are known where rows of several are decoded together."""
_KEPT = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeWork:
    """What a node does in a Step, all of its replicas together. It is equal to itself alone: keep
    it, and what was worked out for it is found again.

    most: the most rows and the greatest lengths, by which memory is counted. lengths: of its rows,
    by which seconds are. samples: rows that have one prompt. chunks: into how many these are cut, 0
    for one a replica. steps: 0, or how many Steps are under way at once in a generation that takes
    in rows as its slots become free: then its seconds are those between two Steps. updates, epochs:
    of a train node; updates 0 for rows of terms that have their own. is_torch: whether its kernel
    is.
    """

    kind: Kind
    most: Work
    lengths: RowDistributions
    samples: int = 1
    chunks: int = 0
    steps: int = 0
    updates: int = 1
    epochs: int = 1
    is_torch: bool = True

    @property
    def rows(self) -> int:
        """Rows of which a pass has some: of an episode one alone is under way."""
        return self.most.rows // self.most.segments


def node_cost(
    model: Sizes, device_or_place: Device | Place, layout: Layout, work: NodeWork
) -> tuple[float, int]:
    """Price a node: seconds of its busiest replica in a Step, and peak bytes of each rank, with
    weights of its own. A device has the catalogue's coefficients. Raises PlanError for a row that
    the layout's cache cannot hold, and for a dtype that the device does not compute.
    """
    where = device_or_place
    if isinstance(where, Device):
        where = place_layout(where, layout)
    seconds = node_time(model, where, layout, work).seconds
    return seconds, node_bytes(model, layout, work, is_on_gpu=where.device.is_gpu)


def place_layout(device: Device, layout: Layout) -> Place:
    """Stand one replica of a layout on devices of a kind, with the catalogue's coefficients."""
    return catalogue_place(
        device,
        cores=layout.threads if device.name == CPU else 1,
        data=layout.data,
        tensor=layout.tensor * layout.inner,
        context=layout.context,
        shard=layout.shard,
    )


def node_time(model: Sizes, where: Place, layout: Layout, work: NodeWork) -> Time:
    """Time a Step's rows of the busiest replica; of a train node those of one rank."""
    if work.kind == "decode":
        return _decode_time(model, where, layout, work)
    rows = _pack_share(work, layout.replicas, layout.data, layout.tokens)
    if work.kind == "forward":
        calls = 0
        if layout.offload == "weights":
            calls = -(-(work.chunks or layout.replicas) // layout.replicas)
        return training.forward_time(model, where, rows, loads=calls)
    return training.train_time(
        model,
        where,
        rows,
        epochs=work.epochs,
        updates=work.updates,
        recomputed=layout.recompute == "layers",
        offloaded=layout.offload == "optimizer",
    )


def decode_rows(where: Place, layout: Layout, work: NodeWork, room: int) -> DecodeRows:
    """The rows of a generation's largest chunk. room: tokens of its cache, 0 for no limit."""
    chunks = work.chunks or layout.replicas
    samples = -(-work.samples // layout.spread)
    row_count = -(-work.most.prompts * layout.spread // chunks) * samples
    busy = chunks
    if work.steps:
        # Whoever is free gets the next prompt: all have as many, but for those that get none.
        busy = min(layout.replicas, work.most.prompts * layout.spread * work.steps)
        row_count = -(-work.most.prompts * work.samples // busy)
    return DecodeRows(
        rows=row_count,
        samples=work.samples,
        shared=samples,
        among=busy,
        slots=layout.slots,
        room=room,
        budget=layout.tokens,
        copied=work.is_torch and layout.tensor == 1 and where.device.is_gpu,
    )


def _decode_time(model: Sizes, where: Place, layout: Layout, work: NodeWork) -> Time:
    room = cache_room(model, where, layout.cache_bytes)
    rows = decode_rows(where, layout, work, room)
    if work.steps:
        return _time_between_steps(model, where, work, rows)
    time = time_curve(model, where, decode_curve(work.lengths, rows))
    # A replica decodes its chunks one after another.
    turns = -(-(work.chunks or layout.replicas) // layout.replicas)
    return time if turns == 1 else time.times(turns)


def _time_between_steps(model: Sizes, where: Place, work: NodeWork, rows: DecodeRows) -> Time:
    """Time of a Step's rows amid those of the others: what so many Steps more take longer."""
    slots = min(rows.slots, rows.rows * work.steps)
    times: list[Time] = []
    for steps in (1, 1 + _MORE_STEPS):
        repeated = replace(rows, rows=rows.rows * steps, slots=slots)
        times.append(time_curve(model, where, decode_curve(work.lengths, repeated)))
    few, many = times
    return (many + few.times(-1.0)).times(1.0 / _MORE_STEPS)


@lru_cache(maxsize=_KEPT)
def _pack_share(work: NodeWork, replicas: int, ranks: int, budget: int) -> training.Microbatches:
    """Pack the rows of one rank into micro-batches."""
    prompts = -(-work.most.prompts // replicas)
    rows = prompts * (work.rows // max(1, work.most.prompts))
    standing = min(rows, _MOST_PACKED)
    batch = make_batch(work.lengths, DecodeRows(rows=standing, samples=work.samples))
    packed = training.pack_rows(
        batch.prompts, batch.answers, budget=budget, shared=work.samples, divisor=ranks
    )
    if rows == standing:
        return packed
    times = rows / standing
    return replace(
        packed,
        tokens=packed.tokens * times,
        keys=packed.keys * times,
        predicted=packed.predicted * times,
        passes=round(packed.passes * times),
        rows=round(packed.rows * times),
    )


def node_bytes(model: Sizes, layout: Layout, work: NodeWork, *, is_on_gpu: bool) -> int:
    """Peak bytes of one rank, with weights of its own."""
    parts = node_parts(model, layout, work, is_on_gpu)
    host_parts = HOST_PARTS if is_on_gpu else ()
    return sum(size for part, size in parts.items() if part not in host_parts)


@lru_cache(maxsize=_KEPT)
def node_parts(model: Sizes, layout: Layout, work: NodeWork, is_on_gpu: bool) -> Mapping[str, int]:
    """Bytes of one rank, with weights of its own, by part (memory.py)."""
    tensor = layout.tensor * layout.inner
    whole = ModelCost(
        parameters=model.parameters, shape=model.shape, trained=model.trained, head=model.head
    )
    part = whole.part(tensor)
    parameters = (part.parameters or 0) + part.added
    kernel = RunningKernel(
        kind=work.kind,
        layout=layout,
        dtype=model.dtype,
        head=model.head,
        is_on_gpu=is_on_gpu,
        has_static_keys=is_on_gpu and work.is_torch and layout.tensor == 1,
        passed_layers=part.passed_layers,
        read_layers=part.read_layers,
        narrow=part.narrow,
        parameters=parameters,
    )
    share = share_work(work.most, layout)
    parts = running_parts(part.version, part.shape, (share,), kernel)
    parts |= weight_parts(parameters, kernel)
    # Of torch on a GPU the formula has the cache, else an engine's has a fixed size.
    parts["cache"] = parts.get("cache", 0) + layout.cache_bytes
    return divide_among_ranks(parts, layout)


def share_work(whole: Work, layout: Layout) -> Work:
    """The most that one replica does of a Step, or one rank of a train node."""
    prompts = -(-whole.prompts * layout.spread // (layout.replicas * layout.data))
    rows_of_prompt = -(-whole.rows // max(1, whole.prompts) // layout.spread)
    return replace(
        whole,
        prompts=prompts,
        rows=prompts * rows_of_prompt,
        budget=layout.tokens,
        slots=layout.slots,
    )
