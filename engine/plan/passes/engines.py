"""How large each engine is, and the environment of its process.

Owns: both, as Layout fields and Decisions.environments; the words about engines. Does not own: who
shares an engine (engine/plan/kernel_needs.py), the sizes (engine/plan/cost/kv_cache.py).

An engine is started once, for all nodes that share it: its rows are as long as the longest of any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dataflow.needs import Needs
from dataflow.rows import Domains
from dataflow.safe_text import shown_bytes
from engine.plan.cost.kv_cache import MOST, UNSTATED_PROMPT, cache_bytes, longest_row, most_beside
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import WIDTHS
from engine.plan.cost.models import counted_dtype, model_cost
from engine.plan.draft import Draft
from engine.plan.episodes import writes_turns
from engine.plan.kernel_needs import find_engines, kernel_name, model_of, needs_of
from engine.plan.lengths import greatest_lengths
from engine.plan.plan import PlannedNode
from engine.plan.prompt_bounds import most_prompt_tokens


def size_engines(draft: Draft) -> Draft:
    """Size each engine; say what a kernel needs of its Worker's process, and what engines mean."""
    notes = list(draft.notes)
    nodes_by_name = {node.name: node for node in draft.nodes}
    engines = find_engines(draft)
    if engines:
        lengths = greatest_lengths(draft.graph)
        gpu_memory = _find_unshared_memory(draft)
        for engine_nodes in engines:
            sized_nodes = _size_nodes(draft, engine_nodes, lengths, gpu_memory)
            nodes_by_name |= {node.name: node for node in sized_nodes}
            notes.extend(_describe_engine(draft, sized_nodes, lengths))
    return replace(
        draft,
        nodes=tuple(nodes_by_name.values()),
        environments=_find_environments(draft),
        notes=tuple(notes),
    )


def _find_environments(draft: Draft) -> dict[str, dict[str, str]]:
    """The variables of each Worker's process that the kernels of its nodes need."""
    environments: dict[str, dict[str, str]] = {}
    for node in draft.nodes:
        needs = needs_of(draft.graph, node)
        if not needs.environment and not needs.cpu_environment:
            continue
        for worker in node.workers:
            variables = environments.setdefault(worker, {})
            variables |= needs.environment
            if not draft.cluster.on(draft.host_of(worker)).gpus:
                variables |= needs.cpu_environment
    return environments


def _size_nodes(
    draft: Draft,
    nodes: Sequence[PlannedNode],
    lengths: Mapping[str, Lengths],
    gpu_memory: Mapping[str, int],
) -> list[PlannedNode]:
    """The nodes of an engine with its size; as they are where their Model's shape is unknown.
    gpu_memory: of the GPUs that a Worker has to itself.
    """
    name = model_of(nodes[0])
    model = next((model for model in draft.graph_models if model.name == name), None)
    if model is None:
        return list(nodes)
    cost = model_cost(model.base)
    shape = cost.shape
    if shape is None or not needs_of(draft.graph, nodes[0]).cache:
        return list(nodes)
    ranks = nodes[0].layout.inner
    dtype = counted_dtype(model)
    weights = (cost.parameters or 0) * WIDTHS[dtype] // ranks
    longest = max(_longest_row(draft, n, lengths[n.name], shape.context) for n in nodes)
    most = min(_most_cache(node, weights, gpu_memory) for node in nodes)
    part = shape.part(ranks)
    sizes: list[int] = []
    for node in nodes:
        size = cache_bytes(
            part,
            lengths[node.name],
            rows=_kept_rows(draft, node),
            longest=longest,
            dtype=dtype,
            most=most,
        )
        sizes.append(size)
    size = max(sizes)
    return [replace(n, layout=replace(n.layout, cache_bytes=size, longest=longest)) for n in nodes]


def _most_cache(node: PlannedNode, weights: int, gpu_memory: Mapping[str, int]) -> int:
    """The most bytes of one rank's cache, by the smallest room of any of the node's Workers."""
    limits: list[int] = []
    for worker in node.workers:
        if worker in gpu_memory:
            limits.append(most_beside(weights, gpu_memory[worker]))
        else:
            limits.append(MOST)
    return min(limits)


def _longest_row(draft: Draft, node: PlannedNode, lengths: Lengths, context: int) -> int:
    """Tokens of a node's longest row, no more than all Models that read it can take."""
    graph_node = draft.graph.node(node.name)
    limits = [limit for limit in (context, graph_node.params.get("positions")) if limit]
    stated = graph_node.params.get("max_context")
    if stated:  # it bounds prompt and answer together
        return min([stated, *limits])
    most_prompt = most_prompt_tokens(graph_node, Domains(draft.graph))
    if writes_turns(graph_node):  # environments add to prompts what nobody knows
        most_prompt = max(most_prompt or 0, lengths.prompt, UNSTATED_PROMPT)
    return longest_row(lengths, min(limits, default=0), most_prompt)


def _find_unshared_memory(draft: Draft) -> dict[str, int]:
    """Worker -> memory of its smallest GPU, of those that share theirs only with Workers that are
    asleep meanwhile.
    """
    turns: dict[str, tuple[str, ...]] = {}
    for group in draft.turns:
        turns |= dict.fromkeys(group, group)
    # Workers that take turns are one user of a GPU, since all but one of them are asleep.
    users: dict[tuple[str, int], set[str | tuple[str, ...]]] = defaultdict(set)
    for worker, gpus in draft.devices.items():
        for index in gpus:
            users[draft.host_of(worker), index].add(turns.get(worker, worker))
    memory: dict[str, int] = {}
    for worker, gpus in draft.devices.items():
        host = draft.host_of(worker)
        most_users = max((len(users[host, index]) for index in gpus), default=0)
        if most_users == 1:
            host_gpus = draft.cluster.on(host).gpus
            memory[worker] = min(host_gpus[index] for index in gpus)
    return memory


def _kept_rows(draft: Draft, node: PlannedNode) -> int:
    """Rows whose keys and values an engine keeps at once: those that it decodes, of an evaluation
    as many as fill the slots; where rows are written in turns, all of a chunk.
    """
    slots = node.layout.slots
    batches = {source.name: source.batch for source in draft.sources}
    batch = batches.get(node.source, slots)
    replicas = node.layout.replicas
    if node.source in batches and writes_turns(draft.graph.node(node.name)):
        return -(-batch // max(node.chunks, replicas)) * node.live_rows
    return min(slots, -(-batch // replicas) * node.live_rows)


def _describe_engine(
    draft: Draft, nodes: Sequence[PlannedNode], lengths: Mapping[str, Lengths]
) -> Iterator[str]:
    first = nodes[0]
    layout = first.layout
    needs = needs_of(draft.graph, first)
    kernel = kernel_name(draft.graph.node(first.name).operator, first.kernel)
    names = ", ".join(node.name for node in nodes)
    parts = [f"its own copy of {model_of(first)!r}"]
    if layout.cache_bytes:
        parts.append(f"at most {shown_bytes(layout.cache_bytes * layout.inner)} of keys and values")
        parts.append(f"rows of at most {layout.longest:,} tokens")
    where = ", ".join(first.workers)
    yield f"{names}: an engine of {kernel} alone in {where}: {', '.join(parts)}"
    if needs.seconds:
        yield f"{names}: about {needs.seconds:.0f} s until {kernel} has started"
    if not draft.cluster.on(draft.host_of(first.workers[0])).gpus:
        yield from (f"{names}: {text}" for text in needs.on_cpu)
        if any(map(draft.turns_of, first.workers)):
            problem = "weights, keys and values of an engine stay in a CPU's memory"
            yield f"{names}: turns free nothing here: {problem} while others have their turn"
    for node in nodes:
        yield from _describe_assumed_prompt(draft, node)
        yield from _describe_sampler(draft, node, kernel)
        yield from _describe_interrupts(draft, node, needs, lengths[node.name])


def _describe_assumed_prompt(draft: Draft, node: PlannedNode) -> Iterator[str]:
    """Where longer prompts may come than the engine has room for."""
    graph_node = draft.graph.node(node.name)
    assumed = UNSTATED_PROMPT + graph_node.params["max_tokens"]
    if node.layout.longest != assumed:
        return  # it is as long as the Model's positions, or another node's rows are longer
    room = f"{node.name}: the engine has room for prompts of {UNSTATED_PROMPT:,} tokens, and"
    if writes_turns(graph_node):
        yield (
            f"{room} nobody knows what environments add to them; interact(max_context=...) bounds"
            " whole rows"
        )
    elif most_prompt_tokens(graph_node, Domains(draft.graph)) is None:
        yield (
            f"{room} the data does not say how long they are; generate(max_prompt_tokens=...) sets"
            " another bound"
        )


def _describe_sampler(draft: Draft, node: PlannedNode, kernel: str) -> Iterator[str]:
    """What a kernel's own sampler does not promise."""
    sampler = draft.graph.node(node.name).params.get("sampler", "keyed")
    if sampler != "keyed":
        yield (
            f"{node.name}: sampler={sampler!r}: {kernel} draws the tokens, with a seed for each"
            " row; unlike those of sampler='keyed' they are not the tokens of other kernels, and"
            " the rows that run beside a row may change them"
        )


def _describe_interrupts(
    draft: Draft, node: PlannedNode, needs: Needs, row: Lengths
) -> Iterator[str]:
    """Where new weights within a row cost more than they save."""
    on_update = draft.graph.node(node.name).params.get("on_update")
    if not node.lag or on_update != "interrupt" or row.completion >= needs.pays_off:
        return
    recomputed = row.prompt + row.completion / 2
    yield (
        f"{node.name}: on_update='drain' costs less: of answers of at most {row.completion} tokens"
        f" a version that interrupts one computes up to {recomputed:,.0f} again,"
        f" {recomputed / row.completion:.1f} for each token written"
    )
