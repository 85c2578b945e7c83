"""Which nodes share a module, and how each Model's versions reach its readers.

Owns: the modules' names (uses of one name in one Worker share a module), the PlannedModels. Does
not own: the Workers (place.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dataflow.model import Model
from dataflow.node import Node
from dataflow.program import Carried
from dataflow.rows import reader_of, writers
from engine.plan.draft import Draft
from engine.plan.kernel_needs import kernel_name, needs_of
from engine.plan.plan import ModelUse, PlannedModel, PlannedNode


def modules(draft: Draft) -> Draft:
    """Share modules wherever that is safe: with the writer, by nodes that take turns with it."""
    rules = _Rules(
        models={s.name: s for s in draft.graph.states if isinstance(s, Model)},
        carried=draft.phase.carried if draft.phase else {},
        alone={n.name: _alone(n, draft) for n in draft.nodes},
        writers={u.model: n for n in draft.nodes for u in n.models if u.access == "write"},
    )
    tokenizers = {n.name: tuple(_tokenizer(n, draft)) for n in draft.graph.nodes}
    uses = ((*n.models, *tokenizers[n.name]) for n in draft.nodes)
    nodes = tuple(map(rules.shared, draft.nodes, uses))
    shared = replace(draft, nodes=nodes, models=tuple(rules.planned(nodes)))
    return replace(shared, models=tuple(replace(m, route=_route(m, shared)) for m in shared.models))


def _route(model: PlannedModel, draft: Draft) -> Literal["pull", "collective"]:
    """As asked for, else collectives if the remote readers have devices of their own."""
    written = next(m for m in draft.models if m.name == (model.follows or model.name))
    readers = draft.remote_readers(written)
    if not readers or draft.placing.weights == "pull":
        return "pull"
    if draft.placing.weights == "collective":
        return "collective"
    return "collective" if _own_devices(written.writer, readers, draft) else "pull"


def _own_devices(node: str, readers: Sequence[str], draft: Draft) -> bool:
    """Whether each reader computes on the writer's host, on another device than the writer."""
    devices, hosts, writer = draft.devices, draft.hosts, draft.node(node).workers[0]
    return writer in devices and all(
        reader in devices
        and not set(devices[reader]) & set(devices[writer])
        and hosts.get(reader) == hosts.get(writer)
        for reader in readers
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    models: Mapping[str, Model]
    writers: Mapping[str, PlannedNode]
    carried: Mapping[str, Carried]
    alone: Mapping[str, str]
    """The kernel of each node that shares no module with other kernels; else empty."""

    def shared(self, node: PlannedNode, uses: tuple[ModelUse, ...]) -> PlannedNode:
        """The node with these uses, each with the name of its module."""
        return replace(node, models=tuple(replace(u, module=self._module(node, u)) for u in uses))

    def _module(self, node: PlannedNode, use: ModelUse) -> str:
        """The writer's own module, or a name for the reader's.

        Readers at lag 0 in the writer's Workers share its module; at a lag each has its own there;
        in other Workers all readers share a copy. A follower is one module in each Worker. A frozen
        Model, or copy, shares with every other of equal base, head, dtype and beginning. A kernel
        that can share with no other has one for each Model.
        """
        if self.alone[node.name] and use.param != "tokenizer":
            return f"{use.model} {self.alone[node.name]}"
        model = self.models[use.model]
        writer = self.writers.get(use.model)
        if writer is None:
            follows = model.follows is not None and model.copies is None
            return use.model if follows else self._frozen(model)
        if node.name == writer.name or use.param == "tokenizer":
            return use.model
        if writer.layout.partial or not set(node.workers) <= set(writer.workers):
            return f"{use.model} copy"
        return f"{use.model}@{node.name}" if node.lag else use.model

    def _frozen(self, model: Model) -> str:
        """The name of what stays as it is: that of all Models with these weights."""
        weights, name = self.carried.get(model.name), f"{model.base}:{model.head}:{model.dtype}"
        return f"frozen:{name}" + (f":{weights.model} after {weights.phase}" if weights else "")

    def planned(self, nodes: tuple[PlannedNode, ...]) -> Iterator[PlannedModel]:
        """Each Model, with its readers and those of them that are aliases."""
        readings: dict[str, dict[str, ModelUse]] = defaultdict(dict)
        for node in nodes:
            for use in _readings(node):
                readings[use.model][node.name] = use
        for model in self.models.values():
            readers = readings[model.name]
            writer = self.writers.get(model.name)
            aliases = [name for name, u in readers.items() if writer and u.module == model.name]
            yield PlannedModel(
                name=model.name,
                base=model.base,
                writer=writer.name if writer else "",
                readers=tuple(readers),
                aliases=tuple(aliases),
                follows=model.follows.name if model.follows and not model.copies else "",
                rate=model.rate,
                every=model.every,
            )


def _alone(node: PlannedNode, draft: Draft) -> str:
    if needs_of(draft.graph, node).shares_module:
        return ""
    return kernel_name(draft.graph.node(node.name).operator, node.kernel)


def _readings(node: PlannedNode) -> Iterator[ModelUse]:
    """The Models whose versions the node needs."""
    if node.work != "evaluate":
        yield from (u for u in node.models if u.access == "read" and u.param != "tokenizer")


def _tokenizer(node: Node, draft: Draft) -> Iterator[ModelUse]:
    """The tokenizer of a node that reads or makes text and token ids: that of the Model that wrote
    the ids; of texts of the data, that of the first Model that reads their ids.
    """
    asked = node.operator.work == "source" and "prompt_text" in draft.node(node.name).returns
    for maker in [node] if node.operator.tokenises or asked else _decoded(node):
        generates = maker.operator.traits.generates
        made_by = draft.node(maker.name) if generates else _made_for(maker, draft)
        if made_by is not None:
            yield ModelUse(param="tokenizer", model=made_by.models[0].model, access="read")
            return


def _made_for(maker: Node, draft: Draft) -> PlannedNode | None:
    """The node whose Model has the tokenizer of these texts: if none reads the ids, the first with
    one on the same source.
    """
    reader = reader_of(draft.graph, maker)
    if reader is not None:
        return draft.node(reader.name)
    source = draft.node(maker.name).source
    texts = {n.name for n in draft.graph.nodes if n.operator.reads_text}
    found = (n for n in draft.nodes if n.models and source in draft.sources_of(n).values())
    return next((n for n in found if n.name not in texts), None)


def _decoded(node: Node) -> tuple[Node, ...]:
    """The nodes that wrote the token ids that a node reads as text."""
    decodes = node.operator.decodes
    return writers(node.inputs[decodes]) if decodes else ()
