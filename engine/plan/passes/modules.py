"""Which nodes share a module, and how each Model's versions reach its readers.

Owns: the modules' names (uses of one name in one Worker share a module), the PlannedModels. Does
not own: the Workers (place.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dataflow.carried_weights import Carried
from dataflow.model import Model
from dataflow.node import Node
from dataflow.rows import reader_of, writers
from engine.plan.cost.models import planned_dtype
from engine.plan.draft import Draft
from engine.plan.kernel_needs import kernel_name, needs_of
from engine.plan.plan import ModelUse, PlannedModel, PlannedNode, WeightRoute


def share_modules(draft: Draft) -> Draft:
    """Share modules wherever that is safe: with the writer, by nodes that take turns with it."""
    writers: dict[str, PlannedNode] = {}
    for node in draft.nodes:
        writers |= {use.model: node for use in node.states if use.access == "write"}
    rules = _Rules(
        models={model.name: model for model in draft.graph_models},
        carried=draft.phase.carried if draft.phase else {},
        unshared_kernels={n.name: _find_unshared_kernel(n, draft) for n in draft.nodes},
        merging=frozenset(n.name for n in draft.nodes if _merges(n, draft)),
        writers=writers,
    )
    nodes: list[PlannedNode] = []
    for node in draft.nodes:
        tokenizers = _find_tokenizer(draft.graph.node(node.name), draft)
        named = rules.name_modules(node, (*node.models, *tokenizers))
        nodes.append(_name_tables(named, writers))
    models = tuple(rules.plan_models(nodes))
    tables = tuple(_plan_tables(nodes, writers))
    shared_draft = replace(draft, nodes=tuple(nodes), models=models, tables=tables)
    # A follower's route is its leader's, which is looked up among all Models.
    routed_models = (replace(model, route=_choose_route(model, shared_draft)) for model in models)
    return replace(shared_draft, models=tuple(routed_models))


def _choose_route(model: PlannedModel, draft: Draft) -> WeightRoute:
    """What was asked for, else what all remote readers can have: IPC if each computes on the
    writer's device, collectives if each has another one; pull if some do and some do not.
    """
    leader = model.follows or model.name
    written = next(other for other in draft.models if other.name == leader)
    readers = draft.remote_readers(written)
    if not readers:
        return "pull"
    if draft.placing.weights != "auto":
        return draft.placing.weights
    if _share_one_device(written.writer, readers, draft):
        return "ipc"
    if _have_own_devices(written.writer, readers, draft):
        return "collective"
    return "pull"


def _share_one_device(node: str, readers: Sequence[str], draft: Draft) -> bool:
    """Whether each reader computes on the writer's host and on its device, the only one of both."""
    writer = draft.node(node).workers[0]
    device = draft.devices.get(writer, ())
    place = (draft.hosts.get(writer), device)
    reader_places = [(draft.hosts.get(reader), draft.devices.get(reader)) for reader in readers]
    return len(device) == 1 and all(reader_place == place for reader_place in reader_places)


def _have_own_devices(node: str, readers: Sequence[str], draft: Draft) -> bool:
    """Whether each reader computes on the writer's host, on another device than the writer."""
    writer = draft.node(node).workers[0]
    if writer not in draft.devices:
        return False
    writer_host = draft.hosts.get(writer)
    writer_devices = set(draft.devices[writer])
    for reader in readers:
        if reader not in draft.devices or draft.hosts.get(reader) != writer_host:
            return False
        if not writer_devices.isdisjoint(draft.devices[reader]):
            return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    models: Mapping[str, Model]
    writers: Mapping[str, PlannedNode]
    carried: Mapping[str, Carried]
    unshared_kernels: Mapping[str, str]
    """The kernel of each node that shares no module with other kernels; else empty."""
    merging: frozenset[str]
    """The nodes that compute with merged adapters."""

    def name_modules(self, node: PlannedNode, uses: Iterable[ModelUse]) -> PlannedNode:
        """The node with these uses, each with the name of its module."""
        named_uses: list[ModelUse] = []
        for use in uses:
            is_merged = node.name in self.merging and use.param != "tokenizer"
            module = self._name_module(node, use)
            if is_merged:
                # Neither its writer's nor that of a node that computes with the adapter beside.
                module += " merged"
            named_uses.append(replace(use, module=module, merged=is_merged))
        return replace(node, models=tuple(named_uses))

    def _name_module(self, node: PlannedNode, use: ModelUse) -> str:
        """The writer's own module, or a name for the reader's.

        Readers at lag 0 in the writer's Workers share its module; at a lag each has its own there;
        in other Workers all readers share a copy. A follower is one module in each Worker. A frozen
        Model, or copy, shares with every other of equal base, head, dtype and beginning. A kernel
        that can share with no other has one for each Model. A part of a module is shared by those
        that have the same part. What merges an adapter shares with what does so alone.
        """
        unshared_kernel = self.unshared_kernels[node.name]
        if unshared_kernel and use.param != "tokenizer":
            return f"{use.model} {unshared_kernel}"
        model = self.models[use.model]
        writer = self.writers.get(use.model)
        if writer is None:
            is_follower = model.follows is not None and model.copies is None
            name = use.model if is_follower else self._name_frozen(model)
            return name if use.param == "tokenizer" else _name_part(name, node)
        if node.name == writer.name or use.param == "tokenizer":
            return use.model
        return _name_reading(node, use, writer)

    def _name_frozen(self, model: Model) -> str:
        """The name of what stays as it is: that of all Models with these weights."""
        # One that names its dtype shares with one that has it of its base; where the base is not
        # here, nobody knows yet whether they are equal.
        dtype = planned_dtype(model) or model.dtype
        name = f"frozen:{model.base}:{model.head}:{dtype}"
        if model.adapter is not None:
            name += f":{model.adapter}"
        beginning = self.carried.get(model.name)
        if beginning:
            name += f":{beginning.model} after {beginning.phase}"
        return name

    def plan_models(self, nodes: Sequence[PlannedNode]) -> Iterator[PlannedModel]:
        """Each Model, with its readers and those of them that are aliases."""
        readings: dict[str, dict[str, ModelUse]] = defaultdict(dict)
        for node in nodes:
            for use in _find_readings(node):
                readings[use.model][node.name] = use
        for model in self.models.values():
            readers = readings[model.name]
            writer = self.writers.get(model.name)
            aliases: list[str] = []
            if writer:
                aliases = [name for name, use in readers.items() if use.module == model.name]
            yield PlannedModel(
                name=model.name,
                base=model.base,
                dtype=planned_dtype(model) or "",
                part=model.part,
                writer=writer.name if writer else "",
                readers=tuple(readers),
                aliases=tuple(aliases),
                follows=model.follows.name if model.follows and not model.copies else "",
                rate=model.rate,
                every=model.every,
            )


def _name_reading(node: PlannedNode, use: ModelUse, writer: PlannedNode) -> str:
    """The module of a reader of what another node writes: the writer's own, if it is safe."""
    has_equal_part = node.layout.has_equal_part(writer.layout)
    if not (has_equal_part and set(node.workers) <= set(writer.workers)):
        return _name_part(f"{use.model} copy", node)
    return f"{use.model}@{node.name}" if node.lag else use.model


def _name_part(name: str, node: PlannedNode) -> str:
    """The name of a module, or of a node's part of it."""
    tensor = node.layout.tensor
    return name if tensor == 1 else f"{name} in {tensor} parts"


def _name_tables(node: PlannedNode, writers: Mapping[str, PlannedNode]) -> PlannedNode:
    """The node with the name of the statistics that it has of each Table."""
    uses: list[ModelUse] = []
    for use in node.tables:
        writer = writers[use.model]
        is_writer = node.name == writer.name
        module = use.model if is_writer else _name_reading(node, use, writer)
        uses.append(replace(use, module=module))
    return replace(node, tables=tuple(uses))


def _plan_tables(
    nodes: Sequence[PlannedNode], writers: Mapping[str, PlannedNode]
) -> Iterator[PlannedModel]:
    """Each Table, with its readers and those of them that are aliases. Its versions are pulled."""
    readings: dict[str, dict[str, ModelUse]] = defaultdict(dict)
    for node in nodes:
        for use in node.tables:
            readers = readings[use.model]
            if use.access == "read":
                readers[node.name] = use
    for name, readers in readings.items():
        aliases = tuple(node for node, use in readers.items() if use.module == name)
        writer = writers[name].name
        yield PlannedModel(
            name=name, base="", writer=writer, readers=tuple(readers), aliases=aliases
        )


def _merges(node: PlannedNode, draft: Draft) -> bool:
    """Whether a node is asked to merge its Model's adapter."""
    return bool(draft.graph.node(node.name).params.get("merge")) and node.work == "decode"


def _find_unshared_kernel(node: PlannedNode, draft: Draft) -> str:
    """The name of the node's kernel if it shares no module with other kernels; else empty."""
    if needs_of(draft.graph, node).shares_module:
        return ""
    return kernel_name(draft.graph.node(node.name).operator, node.kernel)


def _find_readings(node: PlannedNode) -> Iterator[ModelUse]:
    """The Models whose versions the node needs."""
    if node.work != "evaluate":
        yield from (u for u in node.models if u.access == "read" and u.param != "tokenizer")


def _find_tokenizer(node: Node, draft: Draft) -> Iterator[ModelUse]:
    """The tokenizer of a node that reads or makes text and token ids: that of the Model that wrote
    the ids; of texts of the data, that of the first Model that reads their ids.
    """
    gives_text = node.operator.work == "source" and "prompt_text" in draft.node(node.name).returns
    makes_ids = node.operator.tokenises or gives_text
    for maker in [node] if makes_ids else _find_decoded(node):
        planned_maker = _find_model_node(maker, draft)
        if planned_maker is not None:
            model = planned_maker.models[0].model
            yield ModelUse(param="tokenizer", model=model, access="read")
            return


def _find_model_node(maker: Node, draft: Draft) -> PlannedNode | None:
    """The node whose Model has the tokenizer of what `maker` makes: itself if it generates, else
    the reader of its ids; if none reads them, the first with a Model on the same source.
    """
    if maker.operator.traits.generates:
        return draft.node(maker.name)
    reader = reader_of(draft.graph, maker)
    if reader is not None:
        return draft.node(reader.name)
    source = draft.node(maker.name).source
    text_readers = {node.name for node in draft.graph.nodes if node.operator.reads_text}
    for node in draft.nodes:
        reads_source = source in draft.sources_of(node).values()
        if node.models and reads_source and node.name not in text_readers:
            return node
    return None


def _find_decoded(node: Node) -> tuple[Node, ...]:
    """The nodes that wrote the token ids that a node reads as text."""
    decodes = node.operator.decodes
    return writers(node.inputs[decodes]) if decodes else ()
