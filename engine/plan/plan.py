"""The Plan: what runs where, with what, and what that should cost.

Owns: the data types, and a plan as JSON. Does not own: any decision (passes/), a plan in words
(explain/), nor anything that runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain, product
from typing import Any, Literal

from dataflow.carried_weights import Carried
from dataflow.display import Displayed
from dataflow.errors import GraphWarning, Origin
from dataflow.graph import Graph
from dataflow.kernel import Layout
from dataflow.loss_terms import ROWS
from dataflow.operator import TRAITS, Traits, Work
from dataflow.regions import Region
from engine.plan.cluster import Cluster
from engine.plan.estimates import Estimate, PlannedProcess
from engine.plan.host_regions import list_regions
from engine.plan.planned_input import PlannedInput, list_fetches
from engine.plan.planned_model import PlannedModel as PlannedModel
from engine.plan.planned_model import WeightRoute as WeightRoute
from engine.plan.planned_parts import PlannedEdge, PlannedRank
from engine.plan.planned_phase import PlannedPhase
from engine.plan.planned_source import PlannedSource

FORMAT = 1

Relation = Literal["source", "same", "expand", "subset", "reduce", "concat", "sink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """How a node uses a Model, or a Table."""

    param: str
    model: str
    access: Literal["read", "write"]
    trained: bool = False
    """Whether a weight edge brings the Model's versions."""
    module: str = ""
    """Uses of one name in one Worker share a module (the writer's, for an alias)."""
    merged: bool = False
    """Whether the node computes with the Model's adapter merged into matrices of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNode:
    """One node, decided."""

    name: str
    operator: str
    work: Work
    scope: str
    region: Region
    relation: Relation
    source: str = ""
    rows: int = 1
    """Rows of its output for each prompt."""
    inner: int = 1
    """Rows of its inputs for each prompt, which its chunks consist of: of a node that reduces,
    those that it reduces to; of a train node, its own rows, whose source is `source`.
    """
    inputs: tuple[PlannedInput, ...] = ()
    models: tuple[ModelUse, ...] = ()
    tables: tuple[ModelUse, ...] = ()
    kernel: str = ""
    layout: Layout = field(default_factory=Layout)
    workers: tuple[str, ...] = ("main",)
    """The replicas, each with its ranks in order."""
    chunking: Literal["cohort", "part", "ready"] = "cohort"
    """Prompts admitted together, so what shares a batch is decided before it starts; those of a
    part of a streamed Step; or whatever has come, as far as the scope allows.
    """
    chunks: int = 1
    """Into how many chunks of whole prompts a cohort (below the cut: a Step) is cut, whatever the
    replicas: equal chunks give equal bits.
    """
    loads: tuple[int, ...] = ()
    """Prompts of a Step that each replica has (of a train node, each share), where devices are
    unlike, so that all end together; empty: as many each.
    """
    returns: tuple[str, ...] = ()
    tokens: str = ""
    """The column whose length is a row's, if any."""
    weight: str = ""
    """The column by which a generation below weighs its rows, if any: told with each row, and not
    moved to that generation.
    """
    tail: float = 0.0
    """Of a generation in chunks: the share of the heaviest rows that have chunks of their own."""
    tail_chunks: int = 0
    """How many chunks those have; 0: as many as is their share of the weight."""
    max_lag: int = 0
    """As given to the node."""
    in_parts: bool = False
    """Whether it works on the parts of a streamed Step, one after another."""
    lag: int = 0
    """How many versions its rows' weights may trail the published ones; 0 except in a stream whose
    source has a lag.
    """
    refill: bool = False
    max_attempts: int = 10
    every: int = 0
    segments: int = 1
    """Of its rows, places for the rows of one episode, of which one is written at a time."""
    waits: bool = False
    """Whether its rows leave their slots between two turns, each until it is answered: a replica
    needs more rows than slots to have these full.
    """
    estimate: Estimate = field(default_factory=Estimate)

    @property
    def traits(self) -> Traits:
        """What its kind of work means."""
        return TRAITS[self.work]

    @property
    def states(self) -> tuple[ModelUse, ...]:
        """Its uses of Models and Tables, all of which have versions."""
        return (*self.models, *self.tables)

    @property
    def live_rows(self) -> int:
        """The most of its rows for each prompt that are under way at once."""
        return self.rows // self.segments

    @property
    def binds_late(self) -> bool:
        """Whether its rows are given to a replica only as the slots there fall free: a generation
        with lag whose chunks nobody asked for.
        """
        return self.chunking == "ready" and self.lag > 0 and self.traits.generates

    @property
    def gates(self) -> tuple[str, ...]:
        """The nodes whose rows it waits for."""
        return tuple(dict.fromkeys(i.gate for i in self.inputs))

    @property
    def row_sets(self) -> dict[str, tuple[PlannedInput, ...]]:
        """Its inputs by the rows that they stand on: its own, then those of terms of its loss."""
        row_sets: dict[str, tuple[PlannedInput, ...]] = {}
        for i in self.inputs:
            row_sets[i.row_set] = (*row_sets.get(i.row_set, ()), i)
        return row_sets

    @property
    def ranks(self) -> int:
        """Workers of one replica; more than one are a rank group, which acts in lock-step."""
        return self.layout.data * self.layout.tensor * self.layout.context

    @property
    def rank_groups(self) -> tuple[tuple[PlannedRank, ...], ...]:
        """The ranks of each replica, in order."""
        groups: list[tuple[PlannedRank, ...]] = []
        for first in range(0, len(self.workers), self.ranks):
            workers = self.workers[first : first + self.ranks]
            ranks = (self._make_rank(worker, index) for index, worker in enumerate(workers))
            groups.append(tuple(ranks))
        return tuple(groups)

    def _make_rank(self, worker: str, index: int) -> PlannedRank:
        share, part = divmod(index, self.layout.alike)
        return PlannedRank(worker=worker, index=index, share=share, part=part)

    @property
    def leads(self) -> tuple[str, ...]:
        """The first Worker of each replica, which is told of its chunks and keeps their rows."""
        return self.workers[:: self.ranks]

    @property
    def shares(self) -> tuple[tuple[str, ...], ...]:
        """Workers with the same rows: of a share, or a replica; the first one fetches."""
        alike = self.layout.alike
        firsts = range(0, len(self.workers), alike)
        return tuple(self.workers[first : first + alike] for first in firsts)

    @property
    def chunk_loads(self) -> tuple[int, ...]:
        """How much of a cohort each of its chunks is to have, in proportion, those of one replica
        after another; empty where all have as much.
        """
        if len(self.loads) < 2 or self.work == "train" or self.chunks % len(self.loads):
            return ()
        times = self.chunks // len(self.loads)
        return tuple(chain.from_iterable((load,) * times for load in self.loads))

    def share_of(self, worker: str) -> tuple[str, ...]:
        """The Workers that have a Worker's rows, itself included."""
        return next(share for share in self.shares if worker in share)

    def rank_of(self, worker: str) -> PlannedRank:
        """A Worker's rank. Raises KeyError for a Worker without this node."""
        for rank in chain.from_iterable(self.rank_groups):
            if rank.worker == worker:
                return rank
        raise KeyError(worker)


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What the passes decide. `nodes` in running order; train nodes in the order of the sinks."""

    nodes: tuple[PlannedNode, ...] = ()
    sources: tuple[PlannedSource, ...] = ()
    models: tuple[PlannedModel, ...] = ()
    tables: tuple[PlannedModel, ...] = ()
    edges: tuple[PlannedEdge, ...] = ()
    recorded: tuple[PlannedInput, ...] = ()
    """Columns that samples and row metrics are made of, taken when a Step has been trained."""
    recorder: str = "main"
    """The worker that writes them."""
    turns: tuple[tuple[str, ...], ...] = ()
    """Groups of Workers that take turns with devices; each Worker is in one group at most."""
    spare: tuple[str, ...] = ()
    """Workers that are not there at the beginning; they join and leave
    (engine/plan/replica_ranges.py).
    """
    hosts: Mapping[str, str] = field(default_factory=dict)
    """The host of each Worker; empty if all are on this one."""
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The GPUs, by their numbers on the host, of each Worker that computes with a Model."""
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Variables of a Worker's process that its kernels need."""
    processes: Mapping[str, PlannedProcess] = field(default_factory=dict)
    """What the process of each Worker takes beside its nodes; none on hosts with GPUs."""
    margins: Mapping[str, float] = field(default_factory=dict)
    """Of nodes whose memory ran out in the run before: by how much their bytes are counted more."""
    notes: tuple[str, ...] = ()
    """What the passes pruned, derived or chose, in words."""
    phase: PlannedPhase | None = None
    """Its place in a Program; None for the plan of a graph alone."""

    @property
    def first(self) -> int:
        """The Steps of the run before this plan's own, which count from 1."""
        return self.phase.first if self.phase else 0

    @property
    def states(self) -> tuple[PlannedModel, ...]:
        """The Models and Tables, all of which have versions."""
        return (*self.models, *self.tables)

    @property
    def phase_number(self) -> int:
        """Its phase in a Program, from 1; 0 for the plan of a graph alone."""
        return self.phase.number if self.phase else 0

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """Every Worker of some node."""
        workers: dict[str, None] = {}
        for node in self.nodes:
            workers |= dict.fromkeys(node.workers)
        return tuple(workers)

    def node(self, name: str) -> PlannedNode:
        """The planned node of that name; KeyError where there is none."""
        return self._node_by_name[name]

    @cached_property
    def _node_by_name(self) -> Mapping[str, PlannedNode]:
        return {node.name: node for node in reversed(self.nodes)}  # so that the first one counts

    def is_on_gpus(self, node: PlannedNode) -> bool:
        """Whether each Worker of a node has a GPU: replicas on both kinds of devices would round in
        two ways, and need the memory of either.
        """
        return all(worker in self.devices for worker in node.workers)

    def sources_of(self, node: PlannedNode) -> dict[str, str]:
        """The source of each row set of a node."""
        if not node.inputs:
            return {ROWS: node.source}
        return {name: self.node(i[0].gate).source for name, i in node.row_sets.items()}

    def with_ancestors(self, names: Iterable[str]) -> set[str]:
        """These nodes, and every node whose rows they wait for or read."""
        ancestors = set(names)
        for node in reversed(self.nodes):
            if node.name in ancestors:
                ancestors.update(node.gates)
                ancestors.update(fetch.producer for fetch in list_fetches(node.inputs))
        return ancestors

    def nodes_on(self, worker: str) -> list[PlannedNode]:
        """The nodes that a Worker runs, or has a rank of."""
        return list(self._nodes_by_worker.get(worker, ()))

    @cached_property
    def _nodes_by_worker(self) -> Mapping[str, Sequence[PlannedNode]]:
        nodes_on: dict[str, dict[str, PlannedNode]] = {worker: {} for worker in self.workers}
        for node in self.nodes:
            for worker in node.workers:
                nodes_on[worker][node.name] = node
        return {worker: list(nodes.values()) for worker, nodes in nodes_on.items()}

    def host_of(self, worker: str) -> str:
        """The host of a Worker; empty if all are on this one."""
        return self.hosts.get(worker, "")

    def turns_of(self, worker: str) -> tuple[str, ...]:
        """Its group of Workers that take turns, itself included; empty if it is in none."""
        return self.turns_by_worker.get(worker, ())

    @cached_property
    def turns_by_worker(self) -> Mapping[str, tuple[str, ...]]:
        """The group of each Worker that takes turns: the first, where it is in several."""
        groups: dict[str, tuple[str, ...]] = {}
        for group in reversed(self.turns):  # so that the first one counts
            groups |= dict.fromkeys(group, group)
        return groups

    def remote_readers(self, model: PlannedModel) -> tuple[str, ...]:
        """The Workers of a Model's readers, and of its followers', but for its writer's first."""
        if not model.writer:
            return ()
        writer = self.node(model.writer).workers[0]
        workers: dict[str, None] = {}
        for other in self.models:
            if model.name in (other.name, other.follows):
                for reader in other.copying_readers:
                    workers |= dict.fromkeys(self.node(reader).workers)
        return tuple(worker for worker in workers if worker != writer)


@dataclass(frozen=True, kw_only=True)
class Plan(Decisions, Displayed):
    """Everything decided about a graph, for one machine or several."""

    graph: str
    digest: str
    seed: int
    warnings: tuple[GraphWarning, ...] = ()
    """What looks wrong in the graph, and in the plan."""
    considered: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Layouts that were compared, in words, and why the others fell out."""
    cluster: Cluster | None = None
    """The machine that the plan is for."""
    program: Graph | None = field(default=None, compare=False, repr=False)
    """The graph of the nodes, pruned and resolved; graph.json in a run folder."""
    _page = "engine.session.notebook_pages:plan_page"

    def __repr__(self) -> str:
        count = len(self.workers)
        where = f"{count} Worker{'s' * (count > 1)}"
        return f"Plan({self.graph!r}, {len(self.nodes)} nodes in {where})"

    @property
    def phases(self) -> tuple[Plan, ...]:
        """A graph's plan is that of one phase, itself."""
        return (self,)

    @property
    def left(self) -> tuple[Mapping[str, Carried], ...]:
        """As of a ProgramPlan: nothing ran before its one phase."""
        return ({},)

    def with_phases(self, phases: Sequence[Plan]) -> Plan:
        """The one plan in the place of its own, as `ProgramPlan.with_phases`."""
        (plan,) = phases
        return plan

    def origin(self, node: str) -> Origin | None:
        """Where in the user's source a node was written; None where that is not known."""
        if self.program is None:
            return None
        return next((n.origin for n in self.program.nodes if n.name == node), None)

    def place(self, node: str) -> str:
        """`my_graph.py:14 score`: a node as messages name it, at run time as in the check."""
        origin = self.origin(node)
        return f"{origin} {node}" if origin else node

    @property
    def regions(self) -> dict[str, str]:
        """The region of each Worker's host (host_regions.py)."""
        regions = list_regions(self.hosts.values(), self.cluster)
        return {worker: regions.get(self.host_of(worker), "") for worker in self.workers}

    @property
    def stateful(self) -> frozenset[str]:
        """Workers whose state only a checkpoint restores: those of train and record nodes, and of
        readers of followers; and the others of their replicas, which end with them.
        """
        followers = {model.name for model in self.models if model.follows}
        stateful: set[str] = set()
        for node in self.nodes:
            models = {use.model for use in node.models if use.param != "tokenizer"}
            if node.traits.steps or not followers.isdisjoint(models):
                stateful.update(node.workers)
        for share in chain.from_iterable(node.shares for node in self.nodes):
            if not stateful.isdisjoint(share):
                stateful.update(share)
        return frozenset(stateful)

    @property
    def worlds(self) -> frozenset[tuple[str, str]]:
        """(sender, reader) for each pair of Workers with weights or columns by collectives."""
        pairs: set[tuple[str, str]] = set()
        for model in self.models:
            if model.writer and model.route == "collective":
                sender = self.node(model.writer).workers[0]
                pairs.update((sender, reader) for reader in self.remote_readers(model))
        for edge in self.edges:
            if edge.device:
                pairs.update(self._pairs_of(edge))
        return frozenset(pairs)

    def _pairs_of(self, edge: PlannedEdge) -> Iterator[tuple[str, str]]:
        """Both ends of an edge with device columns; the recorder checkpoints waiting rows."""
        producer = self.node(edge.producer)
        readers = self.node(edge.consumer).workers
        if producer.region == "stream":
            readers += (self.recorder,)
        pairs = product(producer.workers, readers)
        return ((sender, reader) for sender, reader in pairs if sender != reader)

    def to_json(self) -> str:
        """The plan as JSON, with its format version."""
        fields_by_name = asdict(replace(self, program=None))
        del fields_by_name["program"], fields_by_name["considered"]
        if self.phase is None:
            del fields_by_name["phase"]
        # These stand first, for whoever looks at the file.
        head = {"format": FORMAT, "graph": self.graph, "digest": self.digest, "seed": self.seed}
        return json.dumps(head | fields_by_name, indent=1, default=_to_plain)


def _to_plain(entry: Any) -> Any:
    return dict(entry) if isinstance(entry, Mapping) else str(entry)
