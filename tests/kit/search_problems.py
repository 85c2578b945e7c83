"""Random problems of the search for layouts, priced by the real cost model, and the best placement
of each by trying everything.

Owns: both. Does not own: the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from dataflow.kernel import Layout
from engine.plan.cost.decode_curve import RowDistributions
from engine.plan.cost.devices import Kind, Place, device
from engine.plan.cost.distribution import lognormal
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import Work
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.models import Shape
from engine.plan.cost.node_price import NodeWork, place_layout
from engine.plan.search.group_price import GroupPrice, GroupPrices
from engine.plan.search.groupings import Grouping, list_groupings
from engine.plan.search.layouts import Axes, NodeLayouts
from engine.plan.search.problem import DevicePool, Problem, SearchedNode
from engine.plan.search.step_time import PlacementTimes

KINDS = ("H100", "A100", "H20", "L40S")
HOST_DEVICES = 8


def model_of(layers: int, hidden: int, heads: int) -> Sizes:
    """A decoder with key heads for each four heads."""
    shape = Shape(
        layers=layers,
        hidden=hidden,
        intermediate=4 * hidden,
        heads=heads,
        kv_heads=max(1, heads // 4),
        head_dim=hidden // heads,
        vocabulary=152_064,
        context=32_768,
        tied=False,
    )
    body = layers * (hidden * hidden * 5 // 2 + 12 * hidden * hidden)
    return Sizes(parameters=body + 2 * hidden * 152_064, shape=shape)


MODELS = (model_of(24, 1024, 16), model_of(28, 2048, 16), model_of(32, 4096, 32))
"""Of 0.6, 2.3 and 9 thousand million parameters."""


def pool_of(kind: str, devices: int) -> DevicePool:
    known = device(kind)
    price = known.operations["bfloat16"] / 1e14
    return DevicePool(
        kind=kind, devices=devices, per_host=HOST_DEVICES, memory=known.memory, price=price
    )


def work_of(draw: Random, kind: Kind) -> NodeWork:
    """Of one batch, with answers of reasoning's spread."""
    prompts, samples = draw.choice([16, 32, 64]), draw.choice([1, 4, 8])
    longest = draw.choice([512, 2048, 8192])
    mean = longest * draw.uniform(0.2, 0.5)
    return NodeWork(
        kind=kind,
        most=Work(
            lengths=Lengths(prompt=512, completion=longest), prompts=prompts, rows=prompts * samples
        ),
        lengths=RowDistributions(lognormal(200, 0.4, 512), lognormal(mean, 0.7, longest)),
        samples=samples,
    )


def make_node(
    draw: Random,
    number: int,
    kind: Kind,
    model: int,
    pools: Sequence[DevicePool],
    parents: Sequence[int],
) -> SearchedNode:
    sizes = MODELS[model % len(MODELS)]
    trains = kind == "train"
    axes = Axes(
        base=Layout(slots=draw.choice([64, 256])),
        trains=trains,
        most=16,
        tensor=(1, 2, 4) if kind != "forward" else (1, 2),
        shard=(False, True) if trains else (False,),
        recompute=("none", "layers") if trains else ("none",),
    )

    def place(pool: int, layout: Layout) -> tuple[Place, float]:
        return place_layout(device(pools[pool].kind), layout), 1.0

    layouts = NodeLayouts(sizes, [work_of(draw, kind)], axes, pools, place)
    return SearchedNode(
        name=f"{kind}{number}",
        prices=layouts.prices,
        parents=tuple(parents),
        model=model,
        most=layouts.count_useful(0),
        version=sizes.version_bytes,
        trains=trains,
    )


def make_problem(seed: int, nodes: int, *, most_devices: int = 16) -> Problem:
    """A graph of a generation, passes over its rows, and train nodes; on one or two kinds."""
    draw = Random(seed)
    devices = draw.randint(4, most_devices)
    pools = [pool_of(draw.choice(KINDS), devices)]
    if draw.random() < 0.5 and devices > 4:
        first = draw.randint(2, devices - 2)
        kinds = draw.sample(KINDS, 2)
        pools = [pool_of(kinds[0], first), pool_of(kinds[1], devices - first)]
    trains = 1 if nodes < 4 else draw.choice([1, 2])
    searched: list[SearchedNode] = [make_node(draw, 0, "decode", 0, pools, ())]
    for number in range(1, nodes - trains):
        kind: Kind = draw.choice(["forward", "forward", "decode"])
        parents = [draw.randrange(number)]
        searched.append(make_node(draw, number, kind, draw.randrange(nodes), pools, parents))
    for number in range(nodes - trains, nodes):
        model = 0 if number == nodes - 1 else draw.randrange(1, nodes)
        parents = list(range(nodes - trains))
        searched.append(make_node(draw, number, "train", model, pools, parents))
    return Problem(
        nodes=tuple(searched),
        pools=tuple(pools),
        lag=draw.choice([0, 1]),
        turn_rate=64e9,
    )


def let_sleep(problem: Problem, seed: int) -> Problem:
    """The problem with generations that have Workers of their own, on hosts with so little memory
    that not all that sleeps there fits.
    """
    draw = Random(seed)
    nodes = [replace(node, is_alone=node.name.startswith("decode")) for node in problem.nodes]
    pools: list[DevicePool] = []
    for pool in problem.pools:
        host_memory = int(pool.memory * draw.uniform(0.1, 0.8))
        pools.append(replace(pool, host_memory=host_memory))
    return replace(problem, nodes=tuple(nodes), pools=tuple(pools))


def make_large_problem(kinds: Sequence[str], lag: int, nodes: int, devices: int) -> Problem:
    """A graph of so many nodes, each with a Model of its own: eight train, the others generate and
    read in turns. Some nodes have equal work, as nodes that read the same rows do.
    """
    draw = Random(0)
    pools = [pool_of(kind, devices // len(kinds)) for kind in kinds]
    trained = range(nodes - 8, nodes)
    searched: list[SearchedNode] = []
    shared: dict[tuple[Kind, int, int], SearchedNode] = {}
    for number in range(nodes):
        kind: Kind = "train"
        parents: Sequence[int] = range(max(0, number - 100), nodes - 8)
        if number not in trained:
            kind = draw.choice(["forward", "forward", "decode"]) if number else "decode"
            parents = [draw.randrange(max(0, number - 40), number)] if number else ()
        key = (kind, draw.randrange(len(MODELS)), draw.randrange(8))
        if key not in shared:
            shared[key] = make_node(draw, number, kind, key[1], pools, ())
        node = replace(shared[key], name=f"{kind}{number}", parents=tuple(parents), model=number)
        searched.append(node)
    return Problem(nodes=tuple(searched), pools=tuple(pools), lag=lag, turn_rate=64e9)


Table = list[tuple[int, GroupPrice]]
"""Numbers of devices of a group, with its price on so many."""


def exhaust(problem: Problem, known: float = float("inf")) -> float:
    """The least seconds of a Step over all groupings and all divisions; infinite where nothing
    fits. known: seconds of a placement; what cannot be shorter is left out.
    """
    exhaustion = _Exhaustion(problem, known)
    units = [(number,) for number in range(len(problem.nodes))]
    for grouping in list_groupings(units, len(problem.pools)):
        exhaustion.try_grouping(grouping)
    return exhaustion.best


class _Free:
    """Devices and bytes of hosts, of each pool, that no group has."""

    def __init__(self, devices: Sequence[int], on_hosts: Sequence[int]) -> None:
        self._devices, self._on_hosts = devices, on_hosts

    def without(self, pool: int, count: int, size: int) -> _Free | None:
        """What remains; None where there is not as much. Where hosts have no bound, no price has
        bytes there.
        """
        devices, on_hosts = [*self._devices], [*self._on_hosts]
        devices[pool] -= count
        on_hosts[pool] -= size
        if devices[pool] < 0 or on_hosts[pool] < 0:
            return None
        return _Free(devices, on_hosts)


class _Exhaustion:
    """Branches on the devices of one group after another, and leaves out what is no shorter even
    if all groups to come were as fast as they can be.
    """

    def __init__(self, problem: Problem, known: float) -> None:
        self._problem = problem
        self._prices, self._times = GroupPrices(problem), PlacementTimes(problem)
        self.best = known

    def try_grouping(self, grouping: Grouping) -> None:
        tables: list[Table] = []
        for group in grouping:
            table: Table = []
            for count in range(1, self._problem.pools[group.pool].devices + 1):
                price = self._prices.price(group.members, group.pool, count)
                if price is not None:
                    table.append((count, price))
            if not table:
                return
            tables.append(table)
        fastest = [min((p for _, p in table), key=lambda p: p.busy) for table in tables]
        free = [pool.devices for pool in self._problem.pools]
        on_hosts = [pool.devices * pool.host_memory for pool in self._problem.pools]
        self._branch(grouping, tables, fastest, _Free(free, on_hosts), 0)

    def _branch(
        self,
        groups: Grouping,
        tables: Sequence[Table],
        prices: list[GroupPrice],
        free: _Free,
        place: int,
    ) -> None:
        """prices: of groups before `place` as chosen, of others the least."""
        seconds = self._times.seconds(groups, prices)
        if seconds >= self.best:
            return
        if place == len(groups):
            self.best = seconds
            return
        pool = groups[place].pool
        for count, price in tables[place]:
            remaining = free.without(pool, count, price.waiting)
            if remaining is not None:
                chosen = [*prices[:place], price, *prices[place + 1 :]]
                self._branch(groups, tables, chosen, remaining, place + 1)
