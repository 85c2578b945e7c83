"""What the plan should cost: memory of nodes, bytes of edges, parameters of Models.

Owns: the numbers that go into the formulas. Does not own: these (engine/plan/cost), seconds
(seconds.py), or whether it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from dataflow.attention_paths import AttentionPath
from dataflow.device import declared_device_columns
from dataflow.loss import LossTerm
from dataflow.loss_terms import ROWS
from dataflow.model import Model
from dataflow.model_dtype import ComputedDtype
from dataflow.node import Node
from dataflow.schema import Schema
from dataflow.training_parts import count_gradient_sums
from engine.plan.base_sharing import find_owned_weights, name_beginnings
from engine.plan.cost import memory
from engine.plan.cost.attention import PACKED_WORK, planned_attention
from engine.plan.cost.column_bytes import row_bytes
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import Work
from engine.plan.cost.models import ModelCost, cost_of_model, counted_dtype
from engine.plan.cost.running_parts import (
    RunningKernel,
    count_exchanged,
    divide_among_ranks,
    running_parts,
    weight_parts,
)
from engine.plan.draft import Draft
from engine.plan.episodes import PARKED_PART
from engine.plan.estimates import Estimate
from engine.plan.kernel_needs import model_of, needs_of
from engine.plan.lengths import all_lengths
from engine.plan.passes.project import fetched_columns
from engine.plan.passes.seconds import add_seconds, time_nodes
from engine.plan.plan import PlannedModel, PlannedNode
from engine.plan.planned_input import PlannedInput
from engine.plan.planned_parts import PlannedEdge
from engine.plan.profiled_passes import kernel_family, kind_of_pass
from engine.plan.waiting_rows import size_columns

Columns = tuple[str, ...]


def choose_route(
    producer: PlannedNode, consumer: PlannedNode, hosts: Mapping[str, str], device: Columns = ()
) -> str:
    """How rows travel: `inproc` (both nodes in one Worker alone), `shm` on one host, else `zmq`."""
    if len(producer.workers) == 1 and producer.workers == consumer.workers:
        return "inproc"
    used_hosts = {hosts.get(worker) for worker in (*producer.workers, *consumer.workers)}
    route = "shm" if len(used_hosts) == 1 else "zmq"
    if device:
        route += f" + collective ({', '.join(device)})"
    return route


def estimate_costs(draft: Draft) -> Draft:
    """Fill in the estimate of each node, the edges, and the parameters of each Model."""
    cost = _Cost(draft)
    nodes = [replace(n, estimate=cost.estimate_node(n)) for n in draft.nodes]
    models: list[PlannedModel] = []
    for model in draft.models:
        model_cost = cost.model_costs[model.name]
        model = replace(model, parameters=model_cost.parameters)
        if model_cost.trained is not None:
            model = replace(model, trained_parameters=model_cost.version)
        models.append(model)
    estimated_draft = replace(
        draft,
        nodes=tuple(nodes),
        edges=tuple(cost.make_edges()),
        models=tuple(models),
        notes=(*draft.notes, *cost.describe_assumptions()),
    )
    return add_seconds(estimated_draft, cost.model_costs, cost.work_by_row_set)


def estimate_nodes(draft: Draft, names: Container[str]) -> Draft:
    """Fill in the estimates of some nodes anew, of which nothing has changed but what spares
    memory: that changes neither edges nor what Models are.
    """
    cost = _Cost(draft)
    nodes = list(draft.nodes)
    for index, node in enumerate(nodes):
        if node.name in names:
            nodes[index] = replace(node, estimate=cost.estimate_node(node))
    estimated_draft = replace(draft, nodes=tuple(nodes))
    return time_nodes(estimated_draft, cost.model_costs, cost.work_by_row_set, names)


def estimate_at(draft: Draft) -> Callable[[PlannedNode, int], Estimate]:
    """Make a function that estimates a node's bytes with rows of so many tokens as its longest."""
    cost = _Cost(draft)

    def estimate(planned: PlannedNode, row: int) -> Estimate:
        cost.lengthen_rows(row)
        return cost.estimate_node(planned)

    return estimate


def longest_rows(draft: Draft) -> dict[str, int]:
    """The tokens of the longest row of each node, of a train node of those that it trains."""
    cost = _Cost(draft)
    return {node.name: cost.find_longest_row(node) for node in draft.nodes}


@dataclass(frozen=True, slots=True)
class _Use:
    """A node's Model with its cost, and the dtype that counts."""

    model: Model
    cost: ModelCost
    dtype: ComputedDtype


class _Cost:
    """The estimates of nodes, then of edges, from the greatest lengths of rows."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._nodes = {n.name: n for n in draft.graph.nodes}
        self._planned = {n.name: n for n in draft.nodes}
        self._sources = {s.name: s for s in draft.sources}
        self._models = {model.name: model for model in draft.graph_models}
        self.model_costs = {name: cost_of_model(model) for name, model in self._models.items()}
        shapes = {name: cost.shape for name, cost in self.model_costs.items()}
        self._greatest = self._lengths = all_lengths(draft.graph, shapes)
        self._on_device = {
            name: declared_device_columns(node.schemas) for name, node in self._nodes.items()
        }
        self._column_bytes = {name: self._size_columns(n) for name, n in self._nodes.items()}
        begun_models = name_beginnings(self._models, draft.phase)
        self._owned = find_owned_weights(draft.nodes, begun_models, self.model_costs)
        self._routes = {m.writer: m.route for m in draft.models if draft.remote_readers(m)}
        self._pulling = frozenset(_find_pulling(draft))

    def lengthen_rows(self, row: int) -> None:
        """Count with longest rows of so many tokens, by the completions of those that have some."""
        self._lengths = {name: _stretch(each, row) for name, each in self._greatest.items()}
        self._column_bytes = {name: self._size_columns(n) for name, n in self._nodes.items()}

    def find_longest_row(self, planned: PlannedNode) -> int:
        """The tokens of the longest row that a node computes with."""
        names = [planned.name]
        if planned.work == "train":
            names = [inputs[0].gate for inputs in planned.row_sets.values()]
        return max(self._greatest[name].row for name in names)

    def estimate_node(self, planned: PlannedNode) -> Estimate:
        """Bytes by part and seconds of one node."""
        use = self._find_use(planned)
        parts: dict[str, int] = {}
        exchanged = 0
        if use is not None and use.cost.parameters is not None:
            # A version that travels is whole: these bytes are not divided among tensor ranks.
            version_bytes = use.cost.version * memory.WIDTHS[use.dtype]
            use = replace(use, cost=use.cost.part(planned.layout.tensor))
            parts |= self._model_parts(planned, use)
            works = self.work_by_row_set(planned).values()
            exchanged = count_exchanged(use.cost.shape, works, self._find_kernel(planned, use))
            route = self._routes.get(planned.name)
            if route == "pull":
                parts["snapshot"] = 2 * version_bytes
            elif route:
                parts["copies"] = 2 * version_bytes
            if planned.name in self._pulling:
                parts["fetched"] = version_bytes
        parts |= self._row_parts(planned)
        paths = self._list_paths(planned)
        return Estimate(bytes=parts, attention=paths, exchanged=exchanged)

    def _list_paths(self, planned: PlannedNode) -> tuple[AttentionPath, ...]:
        """The paths of a node's attention over packed rows."""
        if planned.work not in PACKED_WORK:
            return ()
        use = self._find_use(planned)
        if use is None:
            return ()
        return planned_attention(
            use.model.base, use.dtype, is_on_gpu=self._draft.is_on_gpus(planned)
        )

    def _find_tree_path(self, planned: PlannedNode) -> AttentionPath:
        return Estimate(attention=self._list_paths(planned)).tree_path

    def _row_parts(self, planned: PlannedNode) -> dict[str, int]:
        """Bytes of rows that wait: of columns in host memory, and of columns on the device."""
        device_columns = self._on_device[planned.name]
        outbox = self._waiting_bytes(
            planned, [c for c in planned.returns if c not in device_columns]
        )
        on_device = self._waiting_bytes(
            planned, [c for c in planned.returns if c in device_columns]
        )
        return _without_zeros({"outbox": outbox, "device_columns": on_device})

    def _model_parts(self, planned: PlannedNode, use: _Use) -> dict[str, int]:
        """Bytes of one rank: of its weights, and of what it holds while it runs."""
        parts: dict[str, int] = {}
        owned, kernel = self._owned.get(planned.name), self._find_kernel(planned, use)
        if owned is not None:
            parts |= weight_parts(owned.base, kernel, beside=owned.beside, merged=owned.merged)
            parts |= self._engine_parts(planned, owned.base * memory.WIDTHS[use.dtype])
        parts |= self._running_parts(planned, use, kernel)
        return divide_among_ranks(parts, planned.layout)

    def _engine_parts(self, planned: PlannedNode, weights: int) -> dict[str, int]:
        """Bytes of a kernel's own processes and cache; its ranks read shared weights."""
        ranks = planned.layout.inner
        engine = needs_of(self._draft.graph, planned).memory * ranks
        if ranks > 1:
            engine += weights
        return _without_zeros({"engine": engine, "cache": planned.layout.cache_bytes * ranks})

    def _find_kernel(self, planned: PlannedNode, use: _Use) -> RunningKernel:
        return RunningKernel(
            kind=kind_of_pass(planned),
            layout=planned.layout,
            dtype=use.dtype,
            head=use.model.head,
            is_on_gpu=self._draft.is_on_gpus(planned),
            has_static_keys=self._has_static_keys(planned),
            gradient_sums=self._count_sums(planned),
            passed_layers=use.cost.passed_layers,
            read_layers=use.cost.read_layers,
            narrow=use.cost.narrow,
            parameters=use.cost.parameters or 0,
        )

    def _running_parts(
        self, planned: PlannedNode, use: _Use, kernel: RunningKernel
    ) -> dict[str, int]:
        shape, layout = use.cost.shape, planned.layout
        works = tuple(self.work_by_row_set(planned).values())
        parts = running_parts(use.cost.version, shape, works, kernel)
        if shape is not None and layout.parked and not layout.cache_bytes:
            parts[PARKED_PART] = layout.parked * memory.token_keys(shape, use.dtype)
        return parts

    def _count_sums(self, planned: PlannedNode) -> int:
        """The sums of gradients that a train node keeps between the parts of a Step."""
        if planned.work != "train" or not planned.in_parts:
            return 0
        return count_gradient_sums(self._nodes[planned.name].params["loss"])

    def _has_static_keys(self, planned: PlannedNode) -> bool:
        """Whether a node generates by torch on GPUs, without tensor ranks. The few Models that no
        CUDA graph holds (operators/kernels/torch/static_rule.py) need less.
        """
        is_torch = kernel_family(planned) == "torch"
        return self._draft.is_on_gpus(planned) and is_torch and planned.layout.tensor == 1

    def _waiting_bytes(self, planned: PlannedNode, columns: Sequence[str]) -> int:
        """Bytes of these columns, held until their Step is trained; in a stream, of all prompts
        that may be admitted.
        """
        source = self._sources.get(planned.source)
        if source is None:
            return 0
        waiting = source.most if planned.region == "stream" else source.batch
        prompts = -(-waiting // planned.layout.replicas)
        sizes = self._column_bytes[planned.name]
        return prompts * planned.rows * row_bytes(sizes, tuple(columns))

    def _find_use(self, planned: PlannedNode) -> _Use | None:
        model = model_of(planned)
        if not model or planned.work == "evaluate":
            return None
        state = self._models[model]
        return _Use(state, self.model_costs[model], counted_dtype(state))

    def work_by_row_set(self, planned: PlannedNode) -> dict[str, Work]:
        """What one replica (of a train node, one rank) does in a Step, by row set."""
        if planned.work == "train":
            return dict(zip(planned.row_sets, self._work_of_sets(planned), strict=True))
        return {ROWS: self._work_of(planned)}

    def _work_of(self, planned: PlannedNode) -> Work:
        layout = planned.layout
        source = self._sources.get(planned.source)
        # An evaluation has as many rows as its data; assumed is only that they fill the slots.
        batch = layout.slots if source is None else source.batch
        # A prompt whose answers are spread is there for each of their spans.
        prompts = _most_prompts(planned, batch * layout.spread)
        rows_of_prompt = planned.rows if planned.traits.generates else planned.inner
        rows_of_prompt = -(-rows_of_prompt // layout.spread)
        return Work(
            lengths=self._lengths[planned.name],
            prompts=prompts,
            rows=prompts * rows_of_prompt,
            segments=planned.segments,
            budget=layout.tokens,
            slots=layout.slots,
            entropy=False,
            listed=_count_made_lists(self._nodes[planned.name], planned.returns),
            attention=self._find_tree_path(planned),
        )

    def _work_of_sets(self, train: PlannedNode) -> list[Work]:
        """The work on each row set of a train node."""
        sources = self._draft.sources_of(train)
        works: list[Work] = []
        for name, inputs in train.row_sets.items():
            batch = self._sources[sources[name]].batch
            works.append(self._work_of_set(train, name, inputs, batch))
        return works

    def _work_of_set(
        self, train: PlannedNode, name: str, inputs: Sequence[PlannedInput], batch: int
    ) -> Work:
        layout = train.layout
        node = self._nodes[train.name]
        terms: Sequence[LossTerm] = node.params["loss"].on(name).terms
        lengths = self._lengths[inputs[0].gate]
        rows_of_prompt = max(self._planned[i.gate].rows for i in inputs)
        budget = layout.tokens
        if any(term.function.scope == "group" for term in terms):
            # Such a loss sees a group at once, which may be longer than the budget.
            budget = max(budget, lengths.prompt + rows_of_prompt * lengths.completion)
        prompts = _most_prompts(train, batch)
        return Work(
            lengths=lengths,
            prompts=prompts,
            rows=prompts * rows_of_prompt,
            budget=budget,
            slots=layout.slots,
            entropy=any(term.function.entropy for term in terms),
            listed=_count_read_lists(node, terms),
            minibatches=int(node.params.get("minibatches", 1)),
            attention=self._find_tree_path(train),
        )

    def make_edges(self) -> Iterator[PlannedEdge]:
        """Every data edge, with what a Step moves along it at the greatest lengths."""
        for planned in self._draft.nodes:
            for producer, columns in fetched_columns(planned.inputs).items():
                yield self._make_edge(self._planned[producer], planned, tuple(columns))

    def _make_edge(
        self, producer: PlannedNode, consumer: PlannedNode, columns: Columns
    ) -> PlannedEdge:
        source = self._sources.get(producer.source)
        batch = 0 if source is None else source.batch
        rows = producer.rows * batch
        sizes = self._column_bytes[producer.name]
        sent = row_bytes(sizes, columns)
        device = tuple(name for name in columns if name in self._on_device[producer.name])
        return PlannedEdge(
            producer=producer.name,
            consumer=consumer.name,
            columns=columns,
            bytes=rows * sent,
            route=choose_route(producer, consumer, self._draft.hosts, device),
            device=device,
            saved=rows * (sum(sizes.values()) - sent),
        )

    def _size_columns(self, node: Node) -> dict[str, int]:
        """Bytes of one row's value of each column that a node offers."""
        dataset = self._draft.dataset.get(node.name, {})
        return size_columns(node, self._planned[node.name], self._lengths[node.name], dataset)

    def describe_assumptions(self) -> Iterator[str]:
        """What is unknown or assumed."""
        for name, cost in self.model_costs.items():
            if cost.parameters is None:
                yield f"{name}: parameters, memory and seconds unknown: {cost.why}"
        for name, node in self._nodes.items():
            if node.operator.traits.generates or node.operator.tokenises:
                yield from _describe_prompts(node, self._lengths[name])
            if node.operator.reads_text:
                yield f"{name}: rows tokenised anew, assumed to be as long as they are"


def _most_prompts(node: PlannedNode, prompts: int) -> int:
    """The most of so many prompts that one replica has; of a train node, one share."""
    if node.loads:
        return -(-prompts * max(node.loads) // sum(node.loads))
    return -(-prompts // (node.layout.replicas * node.layout.data))


def _stretch(lengths: Lengths, row: int) -> Lengths:
    if lengths.completion:
        completion = max(1, row - lengths.prompt)
        return replace(lengths, completion=completion, counts=None, context=0)
    return replace(lengths, prompt=row, counts=None, context=0)


def _without_zeros(parts: Mapping[str, int]) -> dict[str, int]:
    return {part: size for part, size in parts.items() if size}


def _describe_prompts(node: Node, lengths: Lengths) -> Iterator[str]:
    """How long prompts are, if they were counted, or are assumed to be."""
    if lengths.counts is not None:
        yield f"{node.name}: prompts of {lengths.counts}"
    elif lengths.bound:
        answers = f" and answers of {lengths.completion}" if node.operator.tokenises else ""
        why = f" ({lengths.uncounted})" if lengths.uncounted else ""
        assumed = f"prompts of {lengths.prompt}{answers} tokens assumed{why}"
        yield f"{node.name}: {assumed}: {lengths.bound}"


def _count_made_lists(node: Node, returns: Columns) -> int:
    """Further tokens in each place, in the lists that a node makes."""
    most = 0
    for schema in node.schemas:
        for column in schema.columns:
            if column in returns:
                most = max(most, _list_size(schema, column))
    return most


def _count_read_lists(node: Node, terms: Iterable[LossTerm]) -> int:
    """Further tokens in each place, at which terms of a loss read."""
    total = 0
    for term in terms:
        if term.function.ids:
            name, column = term.function.ids
            port = node.inputs[f"{term.label}.{name}"]
            total += _list_size(port.schema, column)
    return total


def _list_size(schema: type[Schema], name: str) -> int:
    """How many values a column has in one place, if they are a list of a fixed length."""
    kind = schema.columns[name].type
    return kind.list_size if pa.types.is_fixed_size_list(kind) else 0


def _find_pulling(draft: Draft) -> Iterator[str]:
    """Nodes that pull versions which another Worker writes."""
    planned = {n.name: n for n in draft.nodes}
    for model in draft.models:
        if not model.writer or model.route != "pull":
            continue
        remote_workers = draft.remote_readers(model)
        for reader in model.copying_readers:
            if not set(planned[reader].workers).isdisjoint(remote_workers):
                yield reader
