"""What a plan's nodes and edges cost: its decisions put into the formulas of engine/plan/cost.

Owns: where each node stands (its devices, divided as its layout says), which rates count for it,
and the ways between Workers. Does not own: the formulas (engine/plan/cost), how many rows of which
lengths there are (passes/estimate.py, engine/predict/simulation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dataflow.errors import PlanError
from dataflow.graph import Graph
from dataflow.loss_terms import ROWS
from dataflow.model import Model
from engine.plan.cluster import Cluster
from engine.plan.cost import training, transfers
from engine.plan.cost.decode import DecodeBatch, Decoded, decode
from engine.plan.cost.devices import (
    CPU,
    KINDS,
    Coefficients,
    Device,
    Kind,
    Link,
    Origin,
    Place,
    catalogue,
    coefficients,
    device,
)
from engine.plan.cost.fit_errors import measured_over_fitted
from engine.plan.cost.machine_load import MachineLoad
from engine.plan.cost.model_passes import Sizes, Time
from engine.plan.cost.models import ModelCost, model_cost
from engine.plan.cost.profile import PeakCorrection, Profile, ProfiledNode, model_key
from engine.plan.plan import Decisions, Plan, PlannedModel, PlannedNode


@dataclass(frozen=True, slots=True, eq=False)
class RowLengths:
    """Tokens of each row's prompt and answer, int64 [rows]."""

    prompts: np.ndarray
    answers: np.ndarray

    def __len__(self) -> int:
        return len(self.answers)

    def take(self, rows: np.ndarray) -> RowLengths:
        """Some rows, by number or by a mask."""
        return RowLengths(self.prompts[rows], self.answers[rows])


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
        self._profile = profile
        self._states = {s.name: s for s in graph.states if isinstance(s, Model)}
        self._known = models or {n: model_cost(m.base, m.head) for n, m in self._states.items()}
        self._nodes = {n.name: n for n in decided.nodes}
        self._places: dict[str, Place] = {}
        self._entries: dict[str, ProfiledNode | None] = {}

    # --- where ------------------------------------------------------------------------------------

    def sizes(self, node: str) -> Sizes | None:
        """Of the Model that a node computes with; None without one, or if its size is unknown."""
        planned = self._nodes[node]
        use = next((u for u in planned.models if u.param != "tokenizer"), None)
        if use is None or planned.work == "evaluate" or not planned.traits.computes:
            return None
        return self.sizes_of(use.model)

    def sizes_of(self, model: str) -> Sizes | None:
        """Of a Model; None if its size is unknown."""
        said, cost = self._states[model], self._known[model]
        if cost.shape is None or cost.parameters is None:
            return None
        return Sizes(parameters=cost.parameters, shape=cost.shape, dtype=said.dtype, head=said.head)

    def unpriced(self, node: str) -> str:
        """Why no seconds of a node's passes are known; empty if they are."""
        if self.sizes(node) is None:
            return "the size of its Model is not known"
        kind = self._kind(self._nodes[node].workers[0])
        if kind in catalogue().devices or self._measured(kind):
            return ""
        return "its kind of GPU is not known" if not kind else f"nobody has measured a {kind} GPU"

    def place(self, node: str) -> Place:
        """Where one replica of a node stands. Raises PlanError where its device is not known."""
        if node not in self._places:
            self._places[node] = self._placed(self._nodes[node])
        return self._places[node]

    def origin(self, node: str) -> Origin:
        """Where the rates of a node's passes come from."""
        of = self.place(node).coefficients
        kind = kind_of_pass(self._nodes[node])
        kinds: tuple[Kind, ...] = ("decode", "prefill") if kind == "decode" else (kind,)
        found: list[Origin] = list({of[kind].origin for kind in kinds})
        return found[0] if len(found) == 1 else "catalogue"

    def outside_profile(self, node: str) -> bool:
        """Whether there is a profile, and it does not have a node's passes of its Model."""
        known = self.sizes(node) is not None
        return self._profile is not None and known and self.entry(node) is None

    @property
    def load(self) -> MachineLoad | None:
        """How busy the machine of the profile was; None without one."""
        return None if self._profile is None else self._profile.load

    def peak(self, node: str) -> PeakCorrection | None:
        """How the peak bytes of a node's passes are corrected; None where they were not measured on
        such a device.
        """
        entry = self.entry(node)
        return None if entry is None else entry.peak

    def entry(self, node: str) -> ProfiledNode | None:
        """What a profile says of a node's passes on such a device."""
        if node not in self._entries:
            self._entries[node] = self._profiled(node)
        return self._entries[node]

    def _profiled(self, node: str) -> ProfiledNode | None:
        planned, model = self._nodes[node], self.sizes(node)
        kind = self._kind(planned.workers[0])
        if model is None or self._profile is None or self._measured(kind) is None:
            return None
        how = _measured_with(planned, gpu=kind != CPU)
        return self._profile.node(model_key(model), kind_of_pass(planned), **how)

    def beside(self, node: str) -> float:
        """How much longer a node's kernel takes while the host's other cores are busy, as was
        measured; 1 on a GPU.
        """
        entry = self.entry(node)
        return 1.0 if entry is None or self.place(node).device.is_gpu else entry.beside

    def cores(self, worker: str) -> int:
        """Of the host that a Worker is on."""
        return self._cluster.on(self._decided.host_of(worker)).cores

    @property
    def message(self) -> float:
        """Seconds from what a Worker tells the coordinator until what follows from it begins."""
        return transfers.MESSAGE if self._profile is None else self._profile.message

    def link(self, one: str, other: str) -> Link:
        """The way from a Worker to another."""
        here, there = self._decided.host_of(one), self._decided.host_of(other)
        if one == other:
            return Link(rate=self.host_device.memory_rate)
        if here == there:
            return Link(rate=self.host_device.link, delay=transfers.HOST_DELAY)
        way = self._cluster.way(here, there)
        share = min(self._share_of_network(one), self._share_of_network(other))
        return replace(way, rate=way.rate * share)

    @cached_property
    def host_device(self) -> Device:
        """The processors: as they were measured, or as the catalogue has them."""
        measured = self._profile.device if self._profile is not None else None
        return measured if measured is not None and not measured.is_gpu else device(CPU)

    # --- how long ---------------------------------------------------------------------------------

    def decode(self, node: str, rows: RowLengths) -> Decoded:
        """One replica's rows, generated in their order. Raises PlanError for a row that its cache
        cannot hold.
        """
        planned, model = self._nodes[node], self._sizes(node)
        layout, where = planned.layout, self.place(node)
        ranks = layout.inner * layout.tensor
        room = layout.cache_bytes * ranks // max(1, model.cached_bytes)
        batch = DecodeBatch(
            prompts=rows.prompts,
            answers=rows.answers,
            shared=samples_of(planned),
            slots=layout.slots,
            room=room,
            budget=layout.tokens,
        )
        return decode(model, where, batch).times(self._off(node, rows))

    def forward(self, node: str, rows: RowLengths) -> Time:
        """One rank's share of a replica's rows."""
        planned = self._nodes[node]
        fed = self._fed(planned, rows, planned.inner, planned.layout.data)
        time = training.forward(self._sizes(node), self.place(node), fed)
        return time.times(self._off(node, rows, planned.layout.data))

    def train(self, node: str, sets: Mapping[str, RowLengths], *, share: bool = False) -> Time:
        """One rank's share of a Step, whose rows are given by row set (`rows` for its own). share:
        they are those of the rank alone.
        """
        planned, model, where = self._nodes[node], self._sizes(node), self.place(node)
        params = self._graph.node(node).params
        epochs = int(params["epochs"])
        updates = epochs * int(params["minibatches"])
        whole = Time()
        for name, rows in sets.items():
            gates = [i.gate for i in planned.row_sets[name]]
            inner = max(self._nodes[g].rows for g in gates)
            fed = self._fed(planned, rows, inner, 1 if share else planned.layout.data)
            own = updates if name == ROWS else 0
            time = training.train(model, where, fed, epochs=epochs, updates=own)
            whole += time.times(self._off(node, rows, 1 if share else planned.layout.data))
        return whole

    def weights(self, model: PlannedModel, worker: str, readers: int = 1) -> Time:
        """Until a version has come from its writer to a Worker; so many fetch it at once. No time
        in a Worker that has no module of its own, or where nobody knows the size.
        """
        sizes = self.sizes_of(model.name)
        reader = next((r for r in model.copied if worker in self._nodes[r].workers), None)
        if sizes is None or reader is None or not model.writer:
            return Time()
        way = self.link(self._nodes[model.writer].workers[0], worker)
        if model.route == "collective" and not way.delay > transfers.HOST_DELAY:
            way = replace(way, rate=self.place(model.writer).between)
        return transfers.weights(
            sizes, self.place(model.writer), self.place(reader), way, readers=readers
        )

    def start(self, worker: str) -> float:
        """Until a Worker that begins during a run has opened its kernels; each Model that it reads
        is read once.
        """
        opened: dict[str, float] = {}
        for node in (n for n in self._decided.nodes if worker in n.workers):
            sizes = self.sizes(node.name)
            if sizes is None:
                continue
            entry, device = self.entry(node.name), self.place(node.name).device
            measured = entry.opening if entry is not None else 0.0
            module = next(u.module or u.model for u in node.models if u.param != "tokenizer")
            opened[module] = measured or transfers.opening(sizes, device)
        return transfers.START + sum(opened.values())

    def rows(self, size: float, sender: str, reader: str) -> Time:
        """Of so many bytes of rows, from a Worker to another."""
        if sender == reader:
            return Time()  # values are passed as they are
        return transfers.rows(size, self.link(sender, reader))

    def function(self, node: str, rows: int) -> float | None:
        """Seconds of so many rows of a node that computes with no Model; None for a user's function
        that nobody has measured.
        """
        measured = self._profile.functions if self._profile is not None else {}
        if node in measured:
            return measured[node] * rows
        operator = self._graph.node(node).operator
        if operator.parts or not operator.built_in:
            return None
        return transfers.columns(self._bytes_of_a_row[node] * rows).seconds

    def computing(self, node: str) -> float:
        """The share of a function's seconds in which it computes; all where nobody measured it."""
        return 1.0 if self._profile is None else self._profile.cpu.get(node, 1.0)

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
        moved = dict.fromkeys(self._nodes, 0.0)
        made = dict.fromkeys(self._nodes, 0.0)
        for edge in self._decided.edges:
            moved[edge.consumer] += edge.bytes
            made[edge.producer] = max(made[edge.producer], edge.bytes)
        rows = {n.name: max(1, batches.get(n.source, 1) * n.rows) for n in self._nodes.values()}
        return {name: (moved[name] or made[name]) / rows[name] for name in self._nodes}

    def _sizes(self, node: str) -> Sizes:
        found = self.sizes(node)
        if found is None:
            problem = f"expected a Model of known size, found {self.unpriced(node)}"
            raise PlanError(f"{node}: {problem}. Fix: a base with a config.json and safetensors.")
        return found

    def _off(self, node: str, rows: RowLengths, divisor: int = 1) -> float:
        """What a profile has measured of rows like a rank's of these, over what its fit says, with
        what a run adds.
        """
        entry = self.entry(node)
        if entry is None or not len(rows):
            return 1.0
        lengths = float(rows.prompts.mean()), float(rows.answers.mean())
        return entry.in_run * measured_over_fitted(entry.cells, len(rows) / divisor, *lengths)

    def _fed(
        self, node: PlannedNode, rows: RowLengths, shared: int, divisor: int
    ) -> training.Microbatches:
        how = {"budget": node.layout.tokens, "shared": max(1, shared), "divisor": divisor}
        return training.packed(rows.prompts, rows.answers, **how)

    def _placed(self, node: PlannedNode) -> Place:
        layout, of = node.layout, self._device(node)
        first, *others = node.workers[: node.ranks]
        home = self._decided.host_of(first)
        far = [w for w in others if self._decided.host_of(w) != home]
        return Place(
            device=of,
            coefficients=self._coefficients(node, of),
            cores=1 if of.is_gpu else layout.threads,
            data=layout.data,
            tensor=layout.tensor * layout.inner,
            context=layout.context,
            shard=layout.shard,
            rate=min((self.link(first, w).rate for w in far), default=0.0),
        )

    def _device(self, node: PlannedNode) -> Device:
        """As it was measured for passes that a profile has: their shares are of these rates. Others
        have the catalogue's, so that no rate of one Model's machine, perhaps a busy one, is mixed
        with shares of the catalogue; unless that does not have the device.
        """
        kind = self._kind(node.workers[0])
        measured = self._measured(kind)
        listed = kind in catalogue().devices
        if measured is not None and (self.entry(node.name) is not None or not listed):
            return measured
        return device(kind or "GPU of no known kind")

    def _measured(self, kind: str) -> Device | None:
        """What a profile says of a kind."""
        profile = self._profile
        return profile.device if profile is not None and profile.device.name == kind else None

    def _coefficients(self, node: PlannedNode, of: Device) -> Mapping[Kind, Coefficients]:
        """The catalogue's, but for what was measured of this Model on such a device."""
        found, model = dict(coefficients(of)), self.sizes(node.name)
        if self._profile is None or model is None or self._profile.device.name != of.name:
            return found
        how = _measured_with(node, gpu=of.is_gpu)
        for kind in KINDS:
            if entry := self._profile.node(model_key(model), kind, **how):
                found[kind] = entry.coefficients
        return found

    def _kind(self, worker: str) -> str:
        """Of a Worker's devices: a GPU's kind, or `cpu`."""
        if worker not in self._decided.devices:
            return CPU
        return self._cluster.on(self._decided.host_of(worker)).kind

    def _share_of_network(self, worker: str) -> float:
        """Of its host's network cards, one a GPU."""
        gpus = self._decided.devices.get(worker)
        there = len(self._cluster.on(self._decided.host_of(worker)).gpus)
        return len(gpus) / there if gpus and there else 1.0


def kind_of_pass(node: PlannedNode) -> Kind:
    """What a node that computes with a Model does with it most."""
    if node.traits.generates:
        return "decode"
    return "train" if node.work == "train" else "forward"


def samples_of(node: PlannedNode) -> int:
    """Answers of one prompt, in the rows that a node generates or reads."""
    inner = max(1, node.inner)
    return max(1, node.rows // inner) if node.traits.generates else inner


def kernel_family(node: PlannedNode) -> str:
    """Whose kernel runs it: each is measured apart."""
    return "vllm" if "vllm" in node.kernel else "torch"


def _measured_with(node: PlannedNode, *, gpu: bool) -> dict[str, Any]:
    """By what a profile tells the entries of one Model and kind of pass apart."""
    cores = 1 if gpu else node.layout.threads
    return {"samples": samples_of(node), "cores": cores, "kernel": kernel_family(node)}


def plan_costs(plan: Plan, profile: Profile | None = None) -> PlanCosts:
    """Of a plan that the planner has made."""
    assert plan.program is not None
    assert plan.cluster is not None
    return PlanCosts(plan, plan.program, plan.cluster, profile)
