"""What a plan's nodes and edges cost: its decisions put into the formulas of engine/plan/cost.

Owns: where each node stands (its devices, divided as its layout says), which rates count for it,
and the ways between Workers. Does not own: the formulas (engine/plan/cost), how many rows of which
lengths there are (passes/estimate.py, engine/simulation).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.loss_terms import ROWS
from dataflow.model import Model
from engine.plan.cluster import Cluster
from engine.plan.cost import training, transfers
from engine.plan.cost.decode import DecodeBatch, Decoded, cache_room, schedule_decode
from engine.plan.cost.devices import (
    CPU,
    Device,
    Link,
    Origin,
    Place,
    device,
)
from engine.plan.cost.machine_load import MachineLoad
from engine.plan.cost.model_passes import Sizes, Time
from engine.plan.cost.models import ModelCost, cost_of_model, counted_dtype
from engine.plan.cost.profile import PeakCorrection, Profile, ProfiledNode
from engine.plan.host_ways import HostWays
from engine.plan.packed_rows import pack_rows_of
from engine.plan.plan import Decisions, Plan, PlannedModel, PlannedNode
from engine.plan.profiled_passes import kernel_family, kind_of_pass, samples_of
from engine.plan.rates import Rates, correct_by_cells
from engine.plan.row_lengths import RowLengths


class PlanCosts:
    """Seconds of a plan's parts. profile: whose rates count for devices of its kind, before the
    catalogue's. What does not depend on rows is worked out once.
    """

    def __init__(
        self,
        decided: Decisions,
        graph: Graph,
        cluster: Cluster,
        profile: Profile | None = None,
        models: Mapping[str, ModelCost] | None = None,
    ) -> None:
        self._decided, self._graph, self._cluster = decided, graph, cluster
        self._ways = HostWays(decided, cluster)
        self._profile = profile
        self._rates = Rates(profile)
        self._models = {s.name: s for s in graph.states if isinstance(s, Model)}
        if not models:
            models = {name: cost_of_model(model) for name, model in self._models.items()}
        self._model_costs = models
        self._nodes = {n.name: n for n in decided.nodes}
        self._sizes: dict[str, Sizes | None] = {}
        self._places: dict[str, Place] = {}
        self._entries: dict[str, ProfiledNode | None] = {}
        self._at = ""
        self._views: dict[str, PlanCosts] = {}

    def on(self, worker: str) -> PlanCosts:
        """The same as seen from one Worker: nodes that it runs stand on its device. Elsewhere a
        node of several Workers stands on that of the first.
        """
        if self._are_all_alike:
            return self
        if worker not in self._views:
            view = copy(self)
            view._at, view._places, view._entries = worker, {}, {}
            self._views[worker] = view
        return self._views[worker]

    def device_kind(self, node: str) -> str:
        """The kind of device that a node stands on."""
        return self._device_kind(self._worker_of(self._nodes[node]))

    def is_alike(self, node: str) -> bool:
        """Whether all Workers of a node are on devices of one kind."""
        return len({self._device_kind(worker) for worker in self._nodes[node].workers}) == 1

    @cached_property
    def _are_all_alike(self) -> bool:
        return all(self.is_alike(name) for name in self._nodes)

    def _worker_of(self, node: PlannedNode) -> str:
        if self._at in node.workers:
            return self._at
        return node.workers[0]

    # --- where ------------------------------------------------------------------------------------

    def sizes(self, node: str) -> Sizes | None:
        """Sizes of the Model that a node computes with; None without one, or if its size is
        unknown.
        """
        planned = self._nodes[node]
        use = next((u for u in planned.models if u.param != "tokenizer"), None)
        if use is None or planned.work == "evaluate" or not planned.traits.computes:
            return None
        return self.sizes_of(use.model)

    def sizes_of(self, model: str) -> Sizes | None:
        """Sizes of a Model; None if its size is unknown."""
        if model not in self._sizes:
            self._sizes[model] = self._find_sizes(model)
        return self._sizes[model]

    def _find_sizes(self, model: str) -> Sizes | None:
        state, cost = self._models[model], self._model_costs[model]
        if cost.shape is None or cost.parameters is None:
            return None
        return Sizes(
            parameters=cost.parameters,
            shape=cost.shape,
            dtype=counted_dtype(state),
            head=state.head,
            trained=cost.trained,
        )

    def unpriced_reason(self, node: str) -> str:
        """Why no seconds of a node's passes are known; empty if they are."""
        if self.sizes(node) is None:
            return "the size of its Model is not known"
        reasons = (
            self._rates.why_unknown(self._device_kind(worker))
            for worker in dict.fromkeys(self._nodes[node].workers)
        )
        return next(filter(None, reasons), "")

    def place(self, node: str) -> Place:
        """Where one replica of a node stands. Raises PlanError where its device is not known."""
        if node not in self._places:
            self._places[node] = self._make_place(self._nodes[node])
        return self._places[node]

    def origin(self, node: str) -> Origin:
        """Where the rates of a node's passes come from."""
        by_kind = self.place(node).coefficients
        kind = kind_of_pass(self._nodes[node])
        origins: set[Origin] = {by_kind[kind].origin}
        if kind == "decode":  # a generation has passes of both kinds
            origins.add(by_kind["prefill"].origin)
        return origins.pop() if len(origins) == 1 else "catalogue"

    def outside_profile(self, node: str) -> bool:
        """Whether there is a profile, and it does not have a node's passes of its Model."""
        if self._profile is None or self.sizes(node) is None:
            return False
        return self.entry(node) is None

    @property
    def load(self) -> MachineLoad | None:
        """How busy the machine of the profile was; None without one."""
        if self._profile is None:
            return None
        return self._profile.load

    def peak(self, node: str) -> PeakCorrection | None:
        """The correction of the peak bytes of a node's passes; None where they were not measured on
        such a device.
        """
        entry = self.entry(node)
        return None if entry is None else entry.peak

    def entry(self, node: str) -> ProfiledNode | None:
        """What a profile says of a node's passes on such a device; None if it has none."""
        if node not in self._entries:
            self._entries[node] = self._find_entry(node)
        return self._entries[node]

    def _find_entry(self, node: str) -> ProfiledNode | None:
        planned = self._nodes[node]
        device_kind = self._device_kind(self._worker_of(planned))
        cores = _cores_of_rank(planned, device_kind)
        return self._rates.find_entry(planned, self.sizes(node), device_kind, cores)

    def beside(self, node: str) -> float:
        """How much longer a node's kernel takes while the host's other cores are busy, as was
        measured; 1 on a GPU.
        """
        entry = self.entry(node)
        if entry is None or self.place(node).device.is_gpu:
            return 1.0
        return entry.beside

    def cores(self, worker: str) -> int:
        """Cores of the host that a Worker is on."""
        return self._cluster.on(self._decided.host_of(worker)).cores

    @property
    def message(self) -> float:
        """Seconds from what a Worker tells the coordinator until what follows from it begins."""
        return transfers.MESSAGE if self._profile is None else self._profile.message

    @property
    def handling(self) -> float:
        """Seconds of a core that a message takes beside what nodes compute, as was measured."""
        return 0.0 if self._profile is None else self._profile.handling

    def link(self, one: str, other: str) -> Link:
        """The way from a Worker to another: memory, within a host, or the network."""
        if one == other:
            return Link(rate=self.host_device.memory_rate)
        host = self._decided.host_of(one)
        other_host = self._decided.host_of(other)
        if host == other_host:
            return Link(rate=self.host_device.link, delay=transfers.HOST_DELAY)
        return self._ways.between(one, other)

    @cached_property
    def host_device(self) -> Device:
        """The processors: as they were measured, or as the catalogue has them."""
        if self._profile is None or self._profile.device.is_gpu:
            return device(CPU)
        return self._profile.device

    # --- how long ---------------------------------------------------------------------------------

    def decode(self, node: str, rows: RowLengths) -> Decoded:
        """Schedule the generation of one replica's rows, in their order. Raises PlanError for a row
        that its cache cannot hold.
        """
        limits = self.decode_limits(node)
        batch = replace(limits, prompts=rows.prompts, answers=rows.answers)
        decoded = schedule_decode(self.require_sizes(node), self.place(node), batch)
        return decoded.times(self.correction(node, rows))

    def decode_limits(self, node: str) -> DecodeBatch:
        """Make a batch without rows: what limits those that one replica of a generation decodes."""
        planned = self._nodes[node]
        layout = planned.layout
        no_rows = RowLengths.of_none().prompts
        return DecodeBatch(
            prompts=no_rows,
            answers=no_rows,
            # The others of a prompt's answers may be decoded elsewhere.
            shared=-(-samples_of(planned) // layout.spread),
            slots=layout.slots,
            room=cache_room(self.require_sizes(node), self.place(node), layout.cache_bytes),
            budget=layout.tokens,
            copied=self._copies_prompts(planned),
        )

    def _copies_prompts(self, node: PlannedNode) -> bool:
        """Whether each row reads a copy of its prompt: on a GPU by torch
        (operators/kernels/torch/static_keys.py), without tensor ranks; vLLM's rows read the blocks
        that they share.
        """
        is_torch = kernel_family(node) == "torch" and node.layout.tensor == 1
        return is_torch and self.place(node.name).device.is_gpu

    def forward(self, node: str, rows: RowLengths, chunks: int = 1) -> Time:
        """Time of one rank's share of a replica's rows, which come in so many chunks."""
        planned = self._nodes[node]
        ranks = planned.layout.data
        fed = pack_rows_of(planned, rows, planned.inner, ranks)
        loads = chunks if planned.layout.offload == "weights" else 0
        time = training.forward_time(self.require_sizes(node), self.place(node), fed, loads=loads)
        return time.times(self.correction(node, rows, ranks))

    def train(
        self,
        node: str,
        sets: Mapping[str, RowLengths],
        *,
        share: bool = False,
        updates: bool = True,
    ) -> Time:
        """Time of one rank's share of a Step, whose rows are given by row set (`rows` for its own).
        share: they are those of the rank alone. updates: whether they are followed by the updates;
        those of a part of a Step are not.
        """
        planned, model, where = self._nodes[node], self.require_sizes(node), self.place(node)
        params = self._graph.node(node).params
        epochs = int(params["epochs"])
        ranks = 1 if share else planned.layout.data
        whole = Time()
        for name, rows in sets.items():
            inner = max(self._nodes[intake.gate].rows for intake in planned.row_sets[name])
            fed = pack_rows_of(planned, rows, inner, ranks)
            update_count = 0  # other row sets are trained in the same updates as the node's own
            if name == ROWS and updates:
                update_count = epochs * int(params["minibatches"])
            time = training.train_time(
                model,
                where,
                fed,
                epochs=epochs,
                updates=update_count,
                recomputed=planned.layout.recompute == "layers",
                offloaded=planned.layout.offload == "optimizer",
            )
            whole += time.times(self.correction(node, rows, ranks))
        return whole

    def update(self, node: str) -> Time:
        """Time of one rank's update of a Step whose gradients are there."""
        return self.train(node, {ROWS: RowLengths.of_none()})

    def weights(self, model: PlannedModel, worker: str, readers: int = 1, source: str = "") -> Time:
        """Time until a version has come from its writer, or another source, to one of so many
        readers. None in a Worker that has no module of its own, or where nobody knows the size.
        """
        sizes = self.sizes_of(model.name)
        reader = next((r for r in model.copying_readers if worker in self._nodes[r].workers), None)
        if sizes is None or reader is None or not model.writer:
            return Time()
        way = self.link(source or self._nodes[model.writer].workers[0], worker)
        if model.route == "collective" and not way.delay > transfers.HOST_DELAY:
            way = replace(way, rate=self.place(model.writer).device.link)
        elif model.route == "ipc":
            memory_rate = self.place(model.writer).device.memory_rate
            way = replace(way, rate=memory_rate / transfers.HASH_TRAFFIC)
        return transfers.weights_time(
            sizes, self.place(model.writer), self.place(reader), way, readers=readers
        )

    def start(self, worker: str) -> float:
        """Seconds until a Worker that begins during a run has opened its kernels; each Model that
        it reads is read once.
        """
        seconds_by_module: dict[str, float] = {}
        nodes = [node for node in self._decided.nodes if worker in node.workers]
        for node in nodes:
            sizes = self.sizes(node.name)
            if sizes is not None:
                module = next(u.module or u.model for u in node.models if u.param != "tokenizer")
                seconds_by_module[module] = self._opening_seconds(node.name, sizes)
        return transfers.START + sum(seconds_by_module.values())

    def _opening_seconds(self, node: str, sizes: Sizes) -> float:
        """Seconds until a node's kernel is open: as measured, else by the bytes that are read."""
        entry = self.entry(node)
        if entry is not None and entry.opening:
            return entry.opening
        return transfers.opening_seconds(sizes, self.place(node).device)

    def rows(self, size: float, sender: str, reader: str) -> Time:
        """Time of so many bytes of rows, from a Worker to another."""
        if sender == reader:
            return Time()  # values are passed as they are
        return transfers.rows_time(size, self.link(sender, reader))

    def function(self, node: str, rows: int) -> float | None:
        """Seconds of so many rows of a node that computes with no Model; None for a user's function
        that nobody has measured.
        """
        if self._profile is not None and node in self._profile.functions:
            return self._profile.functions[node] * rows
        operator = self._graph.node(node).operator
        if operator.parts or not operator.built_in:
            return None
        return transfers.columns_time(self._bytes_of_a_row[node] * rows).seconds

    def computing(self, node: str) -> float:
        """The share of a function's seconds in which it computes; all where nobody measured it."""
        if self._profile is None:
            return 1.0
        return self._profile.cpu.get(node, 1.0)

    def measured_function(self, node: str) -> bool:
        """Whether a profile has a node's function."""
        return self._profile is not None and node in self._profile.functions

    # --- within -----------------------------------------------------------------------------------

    @cached_property
    def _bytes_of_a_row(self) -> dict[str, float]:
        """Bytes of one row of each node's inputs (of a source: of what it makes), at the greatest
        lengths.
        """
        batches = {s.name: s.batch for s in self._decided.sources}
        read_bytes = dict.fromkeys(self._nodes, 0.0)
        made_bytes = dict.fromkeys(self._nodes, 0.0)
        for edge in self._decided.edges:
            read_bytes[edge.consumer] += edge.bytes
            made_bytes[edge.producer] = max(made_bytes[edge.producer], edge.bytes)
        bytes_of_a_row: dict[str, float] = {}
        for name, node in self._nodes.items():
            rows = max(1, batches.get(node.source, 1) * node.rows)
            bytes_of_a_row[name] = (read_bytes[name] or made_bytes[name]) / rows
        return bytes_of_a_row

    def require_sizes(self, node: str) -> Sizes:
        """Sizes of the Model that a node computes with. Raises PlanError if they are unknown."""
        sizes = self.sizes(node)
        if sizes is None:
            problem = f"expected a Model of known size, found {self.unpriced_reason(node)}"
            raise PlanError(f"{node}: {problem}. Fix: a base with a config.json and safetensors.")
        return sizes

    def correction(self, node: str, rows: RowLengths, divisor: int = 1) -> float:
        """The factor on fitted seconds: what a profile measured of rows like a rank's of these over
        what its fit says, times what a run adds.
        """
        return correct_by_cells(self.entry(node), rows, divisor)

    def _make_place(self, node: PlannedNode) -> Place:
        layout, device = node.layout, self._device_of(node)
        cores = _cores_of_rank(node, device.name)
        # A tensor rank's part is summed and gathered among those that have it.
        same_part = node.workers[: node.ranks : layout.tensor]
        return Place(
            device=device,
            coefficients=self._rates.find_coefficients(node, self.sizes(node.name), device, cores),
            cores=cores,
            data=layout.data,
            tensor=layout.tensor * layout.inner,
            context=layout.context,
            shard=layout.shard,
            rate=self._ways.ring_rate(same_part, device),
        )

    def _device_of(self, node: PlannedNode) -> Device:
        """The device of a node, with the rates that its coefficients are shares of."""
        kind = self._device_kind(self._worker_of(node))
        return self._rates.find_device(kind, is_measured=self.entry(node.name) is not None)

    def _device_kind(self, worker: str) -> str:
        """The kind of a Worker's GPUs, or `cpu`."""
        if worker not in self._decided.devices:
            return CPU
        return self._cluster.on(self._decided.host_of(worker)).kind


def _cores_of_rank(node: PlannedNode, device_kind: str) -> int:
    """Cores of one rank of a node; 1 on a GPU."""
    return node.layout.threads if device_kind == CPU else 1


def plan_costs(plan: Plan, profile: Profile | None = None) -> PlanCosts:
    """Price a plan that the planner has made."""
    assert plan.program is not None
    assert plan.cluster is not None
    return PlanCosts(plan, plan.program, plan.cluster, profile)
