"""What is searched: nodes, pools of devices, and what layouts cost.

Owns: the data types. Does not own: prices (layouts.py), any search.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from dataflow.kernel import Layout
from engine.plan.placement import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePool:
    """Devices of one kind: GPUs, or a host's cores. per_host: of a host; tensor ranks stay within
    one. memory: bytes of each. price: of one for an hour; 0 where it is not known. host_memory:
    bytes of a host for each of its devices; 0 where there is no bound.
    """

    kind: str
    devices: int
    per_host: int
    memory: int
    price: float = 0.0
    is_gpu: bool = True
    host_memory: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLayout:
    """A layout of a node, and what it costs. devices: that it uses. seconds: of a Step. Bytes of
    each device: weights, which nodes of one Model and one `part` have once; lasting, all else that
    stays between calls; running, what is there while it runs; waiting, what it always has in host
    memory.
    """

    layout: Layout
    devices: int
    seconds: float
    part: Hashable = 1
    weights: int = 0
    lasting: int = 0
    running: int = 0
    waiting: int = 0


LayoutPrices = Callable[[int, int], Sequence[PricedLayout]]
"""(number of a pool, devices) -> layouts that use so many devices or fewer, each of which is better
than any other in something: seconds, by which they are ordered, or bytes.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchedNode:
    """A node that computes with a Model. beside_training: prices where a train node shares its
    devices; None where they are the same. parents: numbers of the nodes whose rows it waits for.
    model: nodes of equal ones share weights. most: devices that it can use. writer: the number of
    the node that trains its Model, -1 where nobody does. version: bytes of a version of it.
    is_alone: whether its kernel has its Worker to itself, so that it takes turns with others.
    pinned: Workers that its group was asked to have; nodes with different ones share no devices.
    """

    name: str
    prices: LayoutPrices
    beside_training: LayoutPrices | None = None
    parents: tuple[int, ...] = ()
    model: Hashable = None
    most: int = 1 << 30
    writer: int = -1
    version: int = 0
    trains: bool = False
    is_alone: bool = False
    pinned: tuple[str, ...] = ()


def _no_seconds(writer: int, reader: int, size: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """nodes: in running order. lag: Steps that generation may be ahead. together: numbers of nodes
    that have to share devices. way: seconds of so
    many bytes of weights from a pool to another. turn_rate: bytes a second of weights that come and
    go where Workers take turns; 0 where this takes no time.
    """

    nodes: tuple[SearchedNode, ...]
    pools: tuple[DevicePool, ...]
    lag: int = 0
    together: tuple[frozenset[int], ...] = ()
    objective: Objective = "seconds"
    way: Callable[[int, int, int], float] = _no_seconds
    turn_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Members:
    """Nodes that are to share devices of a pool, however many."""

    members: tuple[int, ...]
    pool: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Nodes that share devices. members: their numbers, ascending."""

    members: tuple[int, ...]
    pool: int
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A whole answer, and its price. layouts: of each node, by number. seconds: of a Step. cost: of
    a Step, in the unit of the pools' prices; 0 where these are not known.
    """

    groups: tuple[DeviceGroup, ...]
    layouts: tuple[PricedLayout, ...] = field(repr=False)
    seconds: float
    cost: float = 0.0

    @property
    def devices(self) -> int:
        """Devices of all groups."""
        return sum(group.devices for group in self.groups)
