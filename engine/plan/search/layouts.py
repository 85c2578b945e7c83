"""The layouts of a node, and what each costs on so many devices of a kind.

Owns: which layouts there are, and which are worth looking at. Does not own: prices and bytes
(engine/plan/cost/node_price.py), which of a node's axes may be chosen (searched_graph.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dataflow.kernel import Layout, Offload, Recompute
from engine.plan.cost.devices import Place
from engine.plan.cost.memory import HOST_PARTS, LASTING
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.node_price import NodeWork, node_parts, node_time
from engine.plan.search.problem import DevicePool, PricedLayout

_WEIGHTS = "weights"
_ALMOST = 1e-3
"""Of seconds: layouts that are no faster than this have to spare bytes."""

_MUCH = 1 / 8
"""Of a device's memory: what runs in less leaves nothing to spare."""
_LEAST_GAIN = 0.03
"""Of seconds: what ranks that each keep a part of the state have to be worth, where all fit."""

PlaceOf = Callable[[int, Layout], tuple[Place, float]]
"""(number of a pool, layout) -> where one replica stands, and the factor on its seconds by what was
measured.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What of a node's layout may be chosen. most: of its replicas, of a train node of its data
    ranks; fixed: how many it has, 0 where that is free. tensor: counts of ranks that have a part of
    each matrix; is_inner: whether the kernel runs these itself. shard, recompute, offload: the
    choices of each, the first of which is preferred. tokens, slots: the same, beside those of
    `base`.
    """

    base: Layout
    trains: bool = False
    most: int = 1
    fixed: int = 0
    tensor: tuple[int, ...] = (1,)
    is_inner: bool = False
    shard: tuple[bool, ...] = (False,)
    recompute: tuple[Recompute, ...] = ("none",)
    offload: tuple[Offload, ...] = ("none",)
    tokens: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()


class NodeLayouts:
    """Of one node. works: what it does in a Step, on each of its row sets. place: where a layout of
    it stands.
    """

    def __init__(
        self,
        model: Sizes,
        works: Sequence[NodeWork],
        axes: Axes,
        pools: Sequence[DevicePool],
        place: PlaceOf,
    ) -> None:
        self._model, self._works, self._axes = model, works, axes
        self._pools, self._place = pools, place
        self.prices = lru_cache(maxsize=None)(self._prices)
        self._priced = lru_cache(maxsize=None)(self._price)

    def _prices(self, pool: int, devices: int) -> tuple[PricedLayout, ...]:
        """See LayoutPrices."""
        useful = min(devices, self.count_useful(pool))
        if useful < devices:
            return self.prices(pool, useful)
        priced = [self._price_on(pool, layout, devices) for layout in self._list(pool, devices)]
        for usual in tuple(priced):
            sized = self._list_sized(pool, usual)
            priced += [self._price_on(pool, layout, devices) for layout in sized]
        priced.sort(key=_order_of)
        best: list[PricedLayout] = []
        for each in priced:
            if not any(_is_as_good(other, each) for other in best):
                best.append(each)
        return tuple(best)

    def count_useful(self, pool: int) -> int:
        """Devices that some layout can use; any number of cores, as threads."""
        if not self._pools[pool].is_gpu:
            return self._pools[pool].devices
        tensor = max(t for t in self._axes.tensor if t <= self._pools[pool].per_host)
        return tensor * (self._axes.fixed or self._axes.most)

    def _list(self, pool: int, devices: int) -> Iterator[Layout]:
        """Layouts that use so many devices, or as many of them as they can."""
        axes, on_host = self._axes, self._pools[pool].per_host
        for tensor in axes.tensor:
            if tensor > min(devices, on_host):
                continue
            copies = min(axes.most, devices // tensor)
            if axes.fixed:
                if axes.fixed * tensor > devices:
                    continue
                copies = axes.fixed
            yield from self._list_copies(pool, tensor, copies, devices)

    def _list_copies(self, pool: int, tensor: int, copies: int, devices: int) -> Iterator[Layout]:
        axes = self._axes
        is_cpu = not self._pools[pool].is_gpu
        counts = [copies]
        if is_cpu and not axes.fixed:
            # Cores that no rank of its own has are threads of another.
            counts = [count for count in range(1, copies + 1) if devices % (count * tensor) == 0]
        for count in counts:
            layout = axes.base
            if axes.is_inner:
                layout = replace(layout, inner=tensor)
            else:
                layout = replace(layout, tensor=tensor)
            if is_cpu:
                layout = replace(layout, threads=max(1, devices // (count * tensor)))
            if axes.trains:
                layout = replace(layout, data=count)
            else:
                layout = replace(layout, replicas=count)
            yield from self._list_spared(layout, is_cpu=is_cpu)

    def _list_spared(self, layout: Layout, *, is_cpu: bool) -> Iterator[Layout]:
        """A layout with each way to spare memory."""
        axes = self._axes
        offloads = axes.offload[:1] if is_cpu else axes.offload
        for shard in axes.shard:
            if shard and layout.data == 1:
                continue
            for recompute in axes.recompute:
                for offload in offloads:
                    yield replace(layout, shard=shard, recompute=recompute, offload=offload)

    def _list_sized(self, pool: int, usual: PricedLayout) -> Iterator[Layout]:
        """A layout with other sizes of what is computed at once: with smaller ones where this takes
        much of a device's memory, with larger ones where there are so many rows, or where each
        micro-batch brings weights.
        """
        layout, work = usual.layout, self._works[0]
        takes_much = usual.running > _MUCH * self._pools[pool].memory
        for tokens in self._axes.tokens:
            is_smaller = tokens < layout.tokens
            if (is_smaller and takes_much) or (not is_smaller and layout.shard):
                yield replace(layout, tokens=tokens)
        has_more = work.rows // layout.replicas > layout.slots
        for slots in self._axes.slots:
            is_smaller = slots < layout.slots
            if (is_smaller and takes_much) or (not is_smaller and has_more):
                yield replace(layout, slots=slots)

    def _price_on(self, pool: int, layout: Layout, devices: int) -> PricedLayout:
        # Of GPUs the layout says how many it uses; of cores others may be idle.
        if self._pools[pool].is_gpu:
            devices = layout.replicas * layout.data * layout.tensor * layout.inner
        return self._priced(pool, layout, devices)

    def _price(self, pool: int, layout: Layout, devices: int) -> PricedLayout:
        where, factor = self._place(pool, layout)
        seconds = 0.0
        parts: dict[str, int] = {}
        is_on_gpu = where.device.is_gpu
        for work in self._works:
            seconds += node_time(self._model, where, layout, work).seconds
            for part, size in node_parts(self._model, layout, work, is_on_gpu).items():
                parts[part] = max(size, parts.get(part, 0))
        ranks = layout.replicas * layout.data * layout.tensor * layout.inner
        share = 1.0
        if not is_on_gpu:
            # Cores have the host's memory together.
            share = ranks / devices
        return _sum_parts(parts, layout, devices, seconds * factor, share, is_on_gpu=is_on_gpu)


def _sum_parts(
    parts: Mapping[str, int],
    layout: Layout,
    devices: int,
    seconds: float,
    share: float,
    *,
    is_on_gpu: bool,
) -> PricedLayout:
    """share: ranks of a device."""
    lasting = running = weights = waiting = 0
    for part, size in parts.items():
        size = int(size * share)
        if is_on_gpu and part in HOST_PARTS:
            waiting += size
        elif part == _WEIGHTS:
            weights = size
        elif part in LASTING:
            lasting += size
        else:
            running += size
    return PricedLayout(
        layout=layout,
        devices=devices,
        seconds=seconds,
        part=(layout.tensor * layout.inner, layout.shard),
        weights=weights,
        lasting=lasting,
        running=running,
        waiting=waiting,
    )


def _order_of(priced: PricedLayout) -> tuple[float, int]:
    """By seconds; whole weights count as faster than those of FSDP, unless these gain a little."""
    seconds = priced.seconds * (1.0 + _LEAST_GAIN if priced.layout.shard else 1.0)
    return seconds, priced.weights + priced.lasting + priced.running


def _is_as_good(one: PricedLayout, other: PricedLayout) -> bool:
    """Whether a layout is as fast as another, and takes no more memory of any kind. Weights that
    others share count only where parts are equal.
    """
    return (
        one.seconds <= other.seconds * (1.0 + _ALMOST)
        and one.part == other.part
        and one.weights + one.lasting + one.running <= other.weights + other.lasting + other.running
        and one.lasting + one.running <= other.lasting + other.running
    ) or (
        one.seconds <= other.seconds
        and one.weights + one.lasting + one.running <= other.lasting + other.running
    )
