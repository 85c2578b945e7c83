"""What the plan should cost: memory of nodes, bytes of edges, parameters of Models.

Owns: the numbers that go into the formulas. Does not own: these (engine/plan/cost), seconds
(seconds.py), or whether it fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from dataflow.device import declared
from dataflow.loss import LossTerm
from dataflow.loss_terms import ROWS
from dataflow.model import Model
from dataflow.node import Node
from dataflow.schema import Schema
from engine.plan.cost import memory
from engine.plan.cost.column_bytes import column_bytes, data_bytes, row_bytes
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import Work
from engine.plan.cost.models import ModelCost, model_cost
from engine.plan.draft import Draft
from engine.plan.estimates import Estimate
from engine.plan.kernel_needs import needs_of
from engine.plan.lengths import all_lengths
from engine.plan.passes.seconds import timed
from engine.plan.plan import PlannedEdge, PlannedNode

Columns = tuple[str, ...]


def route(
    producer: PlannedNode, consumer: PlannedNode, hosts: Mapping[str, str], device: Columns = ()
) -> str:
    """How rows travel: `inproc` (both nodes in one Worker alone), `shm` on one host, else `zmq`."""
    if len(producer.workers) == 1 and producer.workers == consumer.workers:
        return "inproc"
    near = len({hosts.get(w) for w in (*producer.workers, *consumer.workers)}) == 1
    return ("shm" if near else "zmq") + (f" + collective ({', '.join(device)})" if device else "")


def estimate(draft: Draft) -> Draft:
    """Fill in the estimate of each node, the edges, and the parameters of each Model."""
    cost = _Cost(draft)
    nodes = tuple(replace(n, estimate=cost.node(n)) for n in draft.nodes)
    models = tuple(replace(m, parameters=cost.models[m.name].parameters) for m in draft.models)
    edges, notes = tuple(cost.edges()), (*draft.notes, *cost.notes())
    known = replace(draft, nodes=nodes, edges=edges, models=models, notes=notes)
    return timed(known, cost.models, cost.work)


@dataclass(frozen=True, slots=True)
class _Use:
    """A node's Model with its cost."""

    model: Model
    cost: ModelCost


_SHARDED = ("weights", "gradients", "optimizer")
"""Parts that ranks divide among them with shard."""


class _Cost:
    """The estimates of nodes, then of edges, from the greatest lengths of rows."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._nodes = {n.name: n for n in draft.graph.nodes}
        self._planned = {n.name: n for n in draft.nodes}
        self._sources = {s.name: s for s in draft.sources}
        self._states = {s.name: s for s in draft.graph.states if isinstance(s, Model)}
        self.models = {name: model_cost(m.base, m.head) for name, m in self._states.items()}
        self._lengths = all_lengths(
            draft.graph, {name: cost.shape for name, cost in self.models.items()}
        )
        self._on_device = {name: declared(node.schemas) for name, node in self._nodes.items()}
        self._columns = {name: self._sizes(node) for name, node in self._nodes.items()}
        self._owners = frozenset(_owners(draft))
        self._offering = {m.writer: m.route for m in draft.models if draft.remote_readers(m)}
        self._fetching = frozenset(_fetching(draft))

    def node(self, planned: PlannedNode) -> Estimate:
        """Bytes by part and seconds of one node."""
        use = self._use(planned)
        parts: dict[str, int] = {}
        if use is not None and use.cost.parameters is not None:
            weights = use.cost.parameters * memory.WIDTHS[use.model.dtype]
            use = replace(use, cost=use.cost.part(planned.layout.tensor))
            parts |= self._of_model(planned, use)
            if route := self._offering.get(planned.name):
                parts["snapshot" if route == "pull" else "copies"] = 2 * weights
            if planned.name in self._fetching:
                parts["fetched"] = weights
        parts |= self._rows(planned)
        return Estimate(bytes=parts)

    def _rows(self, planned: PlannedNode) -> dict[str, int]:
        """Of rows that wait: columns in host memory, and columns on the device."""
        device = self._on_device[planned.name]
        outbox = self._kept(planned, tuple(c for c in planned.returns if c not in device))
        on_device = self._kept(planned, tuple(c for c in planned.returns if c in device))
        sizes = {"outbox": outbox, "device_columns": on_device}
        return {part: size for part, size in sizes.items() if size}

    def _of_model(self, planned: PlannedNode, use: _Use) -> dict[str, int]:
        """Of one rank: its weights, and what it holds while it runs."""
        parts: dict[str, int] = {}
        if planned.name in self._owners:
            parts["weights"] = (use.cost.parameters or 0) * memory.WIDTHS[use.model.dtype]
            parts |= self._of_engine(planned, parts["weights"])
        parts |= self._running(planned, use)
        if planned.layout.shard:
            parts |= {p: -(-parts[p] // planned.layout.data) for p in _SHARDED if p in parts}
        return parts

    def _of_engine(self, planned: PlannedNode, weights: int) -> dict[str, int]:
        """Of a kernel that has processes and a cache of its own; its ranks read shared weights."""
        needs, ranks = needs_of(self._draft.graph, planned), planned.layout.inner
        shared = weights if ranks > 1 else 0
        sizes = {
            "engine": needs.memory * ranks + shared,
            "cache": planned.layout.cache_bytes * ranks,
        }
        return {part: size for part, size in sizes.items() if size}

    def _running(self, planned: PlannedNode, use: _Use) -> dict[str, int]:
        shape, dtype, head = use.cost.shape, use.model.dtype, use.model.head
        if planned.work == "train":
            weights = use.cost.parameters or 0
            sets = [memory.train_parts(weights, shape, w, dtype, head) for w in self._sets(planned)]
            # A micro-batch has rows of one set: the largest counts.
            return {part: max(each.get(part, 0) for each in sets) for part in sets[0]}
        work = self._work(planned)
        if shape is None:
            return {}
        if planned.traits.generates:
            parts = memory.decode_parts(shape, work, dtype)
            if planned.layout.cache_bytes:
                del parts["kv_cache"]  # held always, by the engine
            return parts
        return memory.forward_parts(shape, work, dtype, head)

    def _kept(self, planned: PlannedNode, columns: tuple[str, ...]) -> int:
        """Bytes of these columns, held until their Step is trained; in a stream, all admitted."""
        source = self._sources.get(planned.source)
        if source is None:
            return 0
        prompts = source.batch * (1 + source.max_lag if planned.region == "stream" else 1)
        made = -(-prompts // planned.layout.replicas)
        return made * planned.rows * row_bytes(self._columns[planned.name], columns)

    def _use(self, planned: PlannedNode) -> _Use | None:
        found = next((u for u in planned.models if u.param != "tokenizer"), None)
        if found is None or planned.work == "evaluate":
            return None
        return _Use(self._states[found.model], self.models[found.model])

    def work(self, planned: PlannedNode) -> dict[str, Work]:
        """What one replica (of a train node, one rank) does in a Step, by row set."""
        if planned.work == "train":
            return dict(zip(planned.row_sets, self._sets(planned), strict=True))
        return {ROWS: self._work(planned)}

    def _work(self, planned: PlannedNode) -> Work:
        lengths, layout = self._lengths[planned.name], planned.layout
        # An evaluation has as many rows as its data; assumed is only that they fill the slots.
        source = self._sources.get(planned.source)
        prompts = -(-(source.batch if source else layout.slots) // (layout.replicas * layout.data))
        return Work(
            lengths=lengths,
            prompts=prompts,
            rows=prompts * (planned.rows if planned.traits.generates else planned.inner),
            budget=layout.tokens,
            slots=layout.slots,
            entropy=False,
            listed=_listed(self._nodes[planned.name], planned.returns),
        )

    def _sets(self, train: PlannedNode) -> list[Work]:
        """The work on each row set of a train node."""
        layout, found = train.layout, []
        sources, loss = self._draft.sources_of(train), self._nodes[train.name].params["loss"]
        for name, inputs in train.row_sets.items():
            of, first = loss.on(name).terms, inputs[0]
            lengths = self._lengths[first.gate]
            inner = max(self._planned[i.gate].rows for i in inputs)
            prompts = -(-self._sources[sources[name]].batch // layout.data)
            atomic = any(t.function.scope == "group" for t in of)
            group = lengths.prompt + inner * lengths.completion
            found.append(
                Work(
                    lengths=lengths,
                    prompts=prompts,
                    rows=prompts * inner,
                    budget=max(layout.tokens, group) if atomic else layout.tokens,
                    slots=layout.slots,
                    entropy=any(t.function.entropy for t in of),
                    listed=_asked(self._nodes[train.name], of),
                    minibatches=int(self._nodes[train.name].params.get("minibatches", 1)),
                )
            )
        return found

    def edges(self) -> Iterator[PlannedEdge]:
        """Every data edge, with what a Step moves along it at the greatest lengths."""
        for planned in self._draft.nodes:
            yield from self._edges_of(planned)

    def _edges_of(self, planned: PlannedNode) -> Iterator[PlannedEdge]:
        columns: dict[str, dict[str, None]] = {}
        for fetch in (f for i in planned.inputs for f in i.fetches):
            columns.setdefault(fetch.producer, {}).update(dict.fromkeys(fetch.columns))
        for producer, names in columns.items():
            made = self._planned[producer]
            source = self._sources.get(made.source)
            rows = made.rows * (source.batch if source else 0)
            sizes = self._columns[producer]
            sent = row_bytes(sizes, tuple(names))
            device = tuple(n for n in names if n in self._on_device[producer])
            yield PlannedEdge(
                producer=producer,
                consumer=planned.name,
                columns=tuple(names),
                bytes=rows * sent,
                route=route(made, planned, self._draft.hosts, device),
                device=device,
                saved=rows * (sum(sizes.values()) - sent),
            )

    def _sizes(self, node: Node) -> dict[str, int]:
        """Bytes of one row's value of each column that a node offers."""
        lengths = self._lengths[node.name]
        sizes = {c.name: column_bytes(c, lengths) for s in node.schemas for c in s.columns.values()}
        if node.operator.work == "source":
            data = self._draft.dataset.get(node.name, {}).items()
            others = {n: data_bytes(n, kind, lengths) for n, kind in data if n not in sizes}
            sizes = others | sizes
        if node.operator.parts:
            sizes[node.operator.parts] = 4 * len(node.params["fns"])
        return sizes

    def notes(self) -> Iterator[str]:
        """What is unknown or assumed."""
        for name, cost in self.models.items():
            if cost.parameters is None:
                yield f"{name}: parameters, memory and seconds unknown: {cost.why}"
        for name, node in self._nodes.items():
            if node.operator.traits.generates or node.operator.tokenises:
                yield from _prompt_notes(node, self._lengths[name])
            if node.operator.reads_text:
                yield f"{name}: rows tokenised anew, assumed to be as long as they are"


def _prompt_notes(node: Node, lengths: Lengths) -> Iterator[str]:
    """How long prompts are, if they were counted, or are assumed to be."""
    if lengths.counts is not None:
        yield f"{node.name}: prompts of {lengths.counts}"
    elif lengths.bound:
        answers = f" and answers of {lengths.completion}" if node.operator.tokenises else ""
        why = f" ({lengths.uncounted})" if lengths.uncounted else ""
        assumed = f"prompts of {lengths.prompt}{answers} tokens assumed{why}"
        yield f"{node.name}: {assumed}: {lengths.bound}"


def _listed(node: Node, returns: Columns) -> int:
    """Further tokens in each place, in the lists that a node makes."""
    return max((_size(s, c) for s in node.schemas for c in s.columns if c in returns), default=0)


def _asked(node: Node, terms: Iterable[LossTerm]) -> int:
    """Further tokens in each place, at which terms of a loss read."""
    reading = [(t.label, t.function.ids) for t in terms if t.function.ids]
    schemas = (node.inputs[f"{label}.{port}"].schema for label, (port, _) in reading)
    return sum(_size(s, column) for s, (_, (_, column)) in zip(schemas, reading, strict=True))


def _size(schema: type[Schema], name: str) -> int:
    """How many values a column has in one place, if they are a list of a fixed length."""
    kind = schema.columns[name].type
    return kind.list_size if pa.types.is_fixed_size_list(kind) else 0


def _fetching(draft: Draft) -> Iterator[str]:
    """Nodes that pull versions which another Worker writes."""
    planned = {n.name: n for n in draft.nodes}
    for model in draft.models:
        if model.writer and model.route == "pull":
            remote = set(draft.remote_readers(model))
            yield from (r for r in model.copied if remote & set(planned[r].workers))


def _owners(draft: Draft) -> Iterator[str]:
    """Nodes that weights count for: of those that share a module, the trainer or the first."""
    seen: set[tuple[str, str]] = set()
    for node in sorted(draft.nodes, key=lambda n: n.work != "train"):
        for use in node.models:
            if use.param != "tokenizer" and node.work != "evaluate":
                held = {(worker, use.module) for worker in node.workers}
                if not held <= seen:
                    yield node.name
                seen |= held
