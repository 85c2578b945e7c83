"""A graph on a cluster as a problem of the search.

Owns: which nodes and devices are searched, which of a node's axes may be chosen, and why nothing is
searched. Does not own: prices (layouts.py), what a user may ask for (engine/plan/options.py).

Whoever says where nodes are (`--turns`, `--context`, hosts, ranges of replicas, all `apart` or in
`one`) has placed them. Numbers of replicas and ranks, pins and nodes `--together` are kept, and
places found for the rest (asked_places.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dataflow.kernel import Layout, Offload
from engine.plan.cost.devices import Device, Place
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.models import cost_of_model
from engine.plan.cost.node_price import NodeWork
from engine.plan.costs import PlanCosts
from engine.plan.draft import Draft
from engine.plan.kernel_needs import find_model, group_engine_nodes, model_of, needs_of
from engine.plan.lengths import all_lengths
from engine.plan.passes.batching import may_bind_late
from engine.plan.passes.place import find_ancestors
from engine.plan.passes.placement_problems import count_most_ranks, why_one_replica
from engine.plan.passes.side_modules import has_side
from engine.plan.passes.tensor import count_worker_ranks, find_tensor_problems
from engine.plan.plan import PlannedNode
from engine.plan.priced_work import ASSUMED, PricedWork, StepLengths
from engine.plan.profiled_passes import kernel_family, samples_of
from engine.plan.rates import Rates, correct_by_work
from engine.plan.search.asked_places import Workers, find_pinned_groups, why_all_is_placed
from engine.plan.search.device_pools import DevicePools
from engine.plan.search.layouts import Axes, NodeLayouts
from engine.plan.search.problem import DevicePool, Problem, SearchedNode
from engine.plan.waiting_weights import why_weights_stay

_TOKENS = (32768, 8192, 4096)
_SLOTS = (512, 128, 64)
"""Beside those that nodes have by default."""
_MOST_TENSOR = 64
"""Ranks that have a part of each matrix; more are never looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedGraph:
    """problem: what is searched; None where nothing is, and why. hosts: of each pool."""

    problem: Problem | None = None
    why: str = ""
    hosts: tuple[tuple[str, ...], ...] = ()


def read_graph(draft: Draft, lengths: StepLengths = ASSUMED) -> SearchedGraph:
    """Make the problem of a draft whose kernels are chosen and whose nodes have no places. lengths:
    of answers.
    """
    why = why_all_is_placed(draft)
    if why:
        return SearchedGraph(why=why)
    pools = DevicePools(draft)
    why = pools.why_none()
    if why:
        return SearchedGraph(why=why)
    reader = _GraphReader(draft, pools, lengths)
    why = reader.why_unpriced() or reader.why_all_pinned()
    if why:
        return SearchedGraph(why=why)
    return SearchedGraph(problem=reader.make(), hosts=pools.host_names)


class _GraphReader:
    """Reads the nodes of a draft."""

    def __init__(self, draft: Draft, pools: DevicePools, lengths: StepLengths) -> None:
        self._draft, self._pools = draft, pools
        self._rates = Rates(draft.profile)
        costs = {model.name: cost_of_model(model) for model in draft.graph_models}
        self._costs = PlanCosts(draft, draft.graph, draft.cluster, draft.profile, costs)
        self._nodes = [node for node in draft.nodes if _is_searched(node)]
        self._numbers = {node.name: number for number, node in enumerate(self._nodes)}
        pinned_groups = find_pinned_groups(draft.placing, list(self._numbers))
        self._are_pins_lists = pinned_groups is not None
        self._pinned = pinned_groups or {}
        shapes = {name: cost.shape for name, cost in costs.items()}
        late = replace(draft, nodes=tuple(map(self._bind_late, draft.nodes)))
        greatest = all_lengths(draft.graph, shapes)
        self._work = PricedWork(late, draft.graph, greatest, lengths)
        self._late = {node.name: node for node in late.nodes}
        self._alike: dict[tuple[object, ...], NodeWork] = {}
        """Works of one content are one, whose curves are worked out once."""
        self._layouts: dict[tuple[object, ...], NodeLayouts] = {}
        self._tensor: dict[tuple[object, ...], tuple[int, ...]] = {}

    def _bind_late(self, node: PlannedNode) -> PlannedNode:
        """A generation as it is where its Workers do not train."""
        if may_bind_late(self._draft, node):
            return replace(node, chunking="ready", chunks=1)
        return node

    def why_unpriced(self) -> str:
        """Why the price of some node is not known; empty if all are."""
        for node in self._nodes:
            if self._costs.sizes(node.name) is None:
                return f"the size of the Model of {node.name} is not known"
        return "" if self._nodes else "no node of a Step computes with a Model"

    def why_all_pinned(self) -> str:
        """Why pins leave nothing to search; empty if they do not."""
        placing, names = self._draft.placing, list(self._numbers)
        if not self._are_pins_lists:
            return "--pin has nodes on Workers of which others have some, not the first ones"
        if all(name in placing.pin for name in names):
            return "--pin says where nodes are"
        return ""

    def make(self) -> Problem:
        """The problem."""
        draft = self._draft
        ancestors = find_ancestors(draft.nodes)
        writers: dict[str, int] = {}
        for node in self._nodes:
            if node.work == "train":
                writers[model_of(node)] = self._numbers[node.name]
        searched: list[SearchedNode] = []
        for node in self._nodes:
            above = ancestors[node.name]
            parents = sorted(self._numbers[name] for name in above if name in self._numbers)
            read = self._read_node(node, tuple(parents), writers)
            searched.append(replace(read, pinned=self._pinned.get(node.name, ())))
        return Problem(
            nodes=tuple(searched),
            pools=self._pools.pools,
            lag=min((source.max_lag for source in draft.sources), default=0),
            together=tuple(self._join_nodes()),
            objective=draft.placing.objective,
            way=self._pools.way,
            turn_rate=self._find_turn_rate(),
        )

    def _find_turn_rate(self) -> float:
        pool = self._pools.pools[0]
        return self._rates.find_device(pool.kind, is_measured=False).host_link

    def _join_nodes(self) -> Iterator[frozenset[int]]:
        """Nodes that have to share devices: of one engine, pinned to the same Workers, together."""
        joined: list[set[str]] = []
        by_workers: dict[Workers, list[str]] = {}
        for name, workers in self._pinned.items():
            by_workers.setdefault(workers, []).append(name)
        together = self._draft.placing.together
        for names in (*group_engine_nodes(self._draft), *by_workers.values(), *together):
            members = {name for name in names if name in self._numbers}
            touched = [other for other in joined if not other.isdisjoint(members)]
            joined = [other for other in joined if other.isdisjoint(members)]
            joined.append(members.union(*touched))
        for members in joined:
            if len(members) > 1:
                yield frozenset(self._numbers[name] for name in members)

    def _read_node(
        self, node: PlannedNode, parents: tuple[int, ...], writers: Mapping[str, int]
    ) -> SearchedNode:
        model = self._costs.sizes(node.name)
        assert model is not None
        name = model_of(node)
        late = self._late[node.name]
        layouts = self._find_layouts(late, model)
        beside_training = None
        if late is not node:
            beside_training = self._find_layouts(node, model).prices
        trained = any(use.trained for use in node.models)
        useful = [layouts.count_useful(pool) for pool in range(len(self._pools.pools))]
        return SearchedNode(
            name=node.name,
            prices=layouts.prices,
            beside_training=beside_training,
            parents=parents,
            model=name,
            most=max(useful),
            writer=writers.get(name, -1) if trained else -1,
            version=model.version_bytes,
            trains=node.work == "train",
            is_alone=needs_of(self._draft.graph, node).own_worker,
        )

    def _find_layouts(self, node: PlannedNode, model: Sizes) -> NodeLayouts:
        axes, works = self._read_axes(node), tuple(self._list_works(node))
        key = (model, works, axes, node.kernel, samples_of(node), node.binds_late)
        if key not in self._layouts:
            self._layouts[key] = NodeLayouts(
                model, works, axes, self._pools.pools, _Places(self, node, model).place
            )
        return self._layouts[key]

    def _list_works(self, node: PlannedNode) -> Iterator[NodeWork]:
        chunks = self._draft.placing.chunks.get(node.name, 0)
        for work in self._work.list_works(node):
            work = replace(work, chunks=chunks)
            distributions = work.lengths
            key = (
                *(getattr(work, name) for name in _CONTENT),
                distributions.prompts.lengths.tobytes(),
                distributions.answers.lengths.tobytes(),
            )
            yield self._alike.setdefault(key, work)

    def _read_axes(self, node: PlannedNode) -> Axes:
        draft, placing = self._draft, self._draft.placing
        trains, name = node.work == "train", node.name
        pinned = len(placing.pin.get(name, ())) // count_worker_ranks(draft, node)
        shard: tuple[bool, ...] = (False,)
        offload: tuple[Offload, ...] = ("none",)
        if trains:
            most, fixed = count_most_ranks(draft, node), pinned or placing.ranks.get(name, 0)
            if not has_side(draft, node):
                shard = (True,) if placing.shard else (False, True)
            offload = ("none", "optimizer")
        else:
            works = tuple(self._work.list_works(node))
            most = 1 if why_one_replica(draft, node) else works[0].most.prompts
            fixed = pinned or placing.replicas.get(name, 0)
            if not why_weights_stay(draft, node):
                offload = ("none", "weights")
        recompute = ("none", "layers") if trains and not has_side(draft, node) else ("none",)
        asked_tokens, asked_slots = placing.microbatch.get(name), placing.slots.get(name)
        base = Layout(tokens=asked_tokens or Layout().tokens, slots=asked_slots or Layout().slots)
        return Axes(
            base=base,
            trains=trains,
            most=max(most, fixed),
            fixed=fixed,
            tensor=tuple(self._list_tensor(node)),
            is_inner=not trains and needs_of(draft.graph, node).tensor,
            shard=shard,
            recompute=(placing.recompute[name],) if name in placing.recompute else recompute,
            offload=(placing.offload[name],) if name in placing.offload else offload,
            tokens=() if asked_tokens or node.traits.generates else _TOKENS,
            slots=() if asked_slots or not _has_slots(node) else _SLOTS,
        )

    def _list_tensor(self, node: PlannedNode) -> Iterator[int]:
        """Counts of ranks with a part of each matrix that the node can have."""
        placing = self._draft.placing
        is_counted = node.name in placing.pin and not needs_of(self._draft.graph, node).tensor
        if node.name in placing.tensor or is_counted:
            yield placing.tensor.get(node.name, 1)
            return
        model = find_model(self._draft, node)
        key = (node.work, node.kernel, node.max_lag, model and replace(model, name=""))
        if key not in self._tensor:
            self._tensor[key] = tuple(self._find_tensor(node))
        yield from self._tensor[key]

    def _find_tensor(self, node: PlannedNode) -> Iterator[int]:
        yield 1
        count = 2
        on_host = max(pool.per_host for pool in self._pools.pools)
        while count <= min(on_host, _MOST_TENSOR):
            if not list(find_tensor_problems(self._draft, node, count)):
                yield count
            count *= 2

    def find_place(
        self, node: PlannedNode, model: Sizes, number: int, layout: Layout
    ) -> tuple[Place, float]:
        """See PlaceOf."""
        pool = self._pools.pools[number]
        cores = 1 if pool.is_gpu else layout.threads
        entry = self._rates.find_entry(node, model, pool.kind, cores)
        where = self._rates.find_device(pool.kind, is_measured=entry is not None)
        place = Place(
            device=where,
            coefficients=self._rates.find_coefficients(node, model, where, cores),
            cores=cores,
            data=layout.data,
            tensor=layout.tensor * layout.inner,
            shard=layout.shard,
            rate=_ring_rate(pool, where, layout),
        )
        (work, *_) = self._work.list_works(node)
        return place, correct_by_work(entry, work, layout)


_CONTENT = ("kind", "most", "samples", "chunks", "steps", "updates", "epochs", "is_torch")
"""Fields of a NodeWork beside its lengths."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Where layouts of a node stand."""

    reader: _GraphReader
    node: PlannedNode
    model: Sizes

    def place(self, pool: int, layout: Layout) -> tuple[Place, float]:
        return self.reader.find_place(self.node, self.model, pool, layout)


def _has_slots(node: PlannedNode) -> bool:
    """Whether its replicas decode rows by themselves; an engine's memory is what it is granted."""
    return node.traits.generates and kernel_family(node) == "torch"


def _is_searched(node: PlannedNode) -> bool:
    return node.region != "evaluation" and node.work != "evaluate" and node.traits.computes


def _ring_rate(pool: DevicePool, device: Device, layout: Layout) -> float:
    """Bytes a second that each data rank sends to the next; 0 within a host. A ring enters and
    leaves each host once, by the network cards of all of its ranks.
    """
    if not pool.is_gpu or layout.data * layout.tensor <= pool.per_host:
        return 0.0
    beside = max(1, pool.per_host // layout.tensor)
    return min(device.link, device.network * beside)
