"""How large each engine is, and the environment of its process.

Owns: both, as Layout fields and Decisions.environments; the words about engines. Does not own: who
shares an engine (engine/plan/kernel_needs.py), the sizes (engine/plan/cost/kv_cache.py).

An engine is started once, for all nodes that share it: its rows are as long as the longest of any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dataflow.model import Model
from dataflow.needs import Needs
from dataflow.rows import Domains
from dataflow.shown import shown_bytes
from engine.plan.cost.kv_cache import MOST, UNSTATED_PROMPT, cache_bytes, longest_row, most_beside
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import WIDTHS
from engine.plan.cost.models import model_cost
from engine.plan.draft import Draft
from engine.plan.kernel_needs import engines as all_engines
from engine.plan.kernel_needs import kernel_name, model_of, needs_of
from engine.plan.lengths import all_lengths
from engine.plan.plan import PlannedNode
from engine.plan.prompt_bounds import most_prompt_tokens


def engines(draft: Draft) -> Draft:
    """Size each engine; say what a kernel needs of its Worker's process, and what engines mean."""
    found = all_engines(draft)
    lengths, alone = (_lengths(draft), _alone(draft)) if found else ({}, {})
    sized = {n.name: n for nodes in found for n in _sized(draft, nodes, lengths, alone)}
    nodes = tuple(sized.get(n.name, n) for n in draft.nodes)
    told = [
        note for group in found for note in _notes(draft, [sized[n.name] for n in group], lengths)
    ]
    notes = (*draft.notes, *told)
    return replace(draft, nodes=nodes, environments=_environments(draft), notes=notes)


def _environments(draft: Draft) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for node in draft.nodes:
        needs = needs_of(draft.graph, node)
        for worker in node.workers if needs.environment or needs.cpu_environment else ():
            gpus = draft.cluster.on(draft.host_of(worker)).gpus
            more = {} if gpus else needs.cpu_environment
            found[worker] = found.get(worker, {}) | dict(needs.environment) | dict(more)
    return found


def _lengths(draft: Draft) -> dict[str, Lengths]:
    shapes = {
        s.name: model_cost(s.base, s.head).shape for s in draft.graph.states if isinstance(s, Model)
    }
    return all_lengths(draft.graph, shapes)


def _sized(
    draft: Draft,
    nodes: Sequence[PlannedNode],
    lengths: Mapping[str, Lengths],
    alone: Mapping[str, int],
) -> list[PlannedNode]:
    """The nodes of an engine with its size; as they are where their Model's shape is unknown.
    alone: memory of the GPUs that a Worker has to itself.
    """
    model = next(s for s in draft.graph.states if s.name == model_of(nodes[0]))
    cost = model_cost(model.base) if isinstance(model, Model) else None
    shape = cost.shape if cost is not None else None
    if cost is None or shape is None or not needs_of(draft.graph, nodes[0]).cache:
        return list(nodes)
    assert isinstance(model, Model)
    dtype = model.dtype
    longest = max(_longest_row(draft, n, lengths[n.name], shape.context) for n in nodes)
    ranks = nodes[0].layout.inner
    weights = (cost.parameters or 0) * WIDTHS[dtype] // ranks
    gpus = [alone.get(worker) for node in nodes for worker in node.workers]
    most = min(MOST if gpu is None else most_beside(weights, gpu) for gpu in gpus)
    how = {"longest": longest, "dtype": dtype, "most": most}
    part = shape.part(ranks)
    sizes = (cache_bytes(part, lengths[n.name], rows=_rows(draft, n), **how) for n in nodes)
    size = max(sizes)
    return [replace(n, layout=replace(n.layout, cache_bytes=size, longest=longest)) for n in nodes]


def _longest_row(draft: Draft, node: PlannedNode, lengths: Lengths, context: int) -> int:
    """Of a node, no longer than all Models that read its rows can take."""
    graph_node = draft.graph.node(node.name)
    limits = [limit for limit in (context, graph_node.params.get("positions")) if limit]
    most_prompt = most_prompt_tokens(graph_node, Domains(draft.graph))
    return longest_row(lengths, min(limits, default=0), most_prompt)


def _alone(draft: Draft) -> dict[str, int]:
    """Worker -> memory of its smallest GPU, of those that share theirs only with Workers that are
    asleep meanwhile.
    """
    turns = {worker: group for group in draft.turns for worker in group}
    on: dict[tuple[str, int], set[str | tuple[str, ...]]] = defaultdict(set)
    for worker, gpus in draft.devices.items():
        for index in gpus:
            on[draft.host_of(worker), index].add(turns.get(worker, worker))
    found: dict[str, int] = {}
    for worker, gpus in draft.devices.items():
        host = draft.host_of(worker)
        if gpus and all(len(on[host, index]) == 1 for index in gpus):
            found[worker] = min(draft.cluster.on(host).gpus[index] for index in gpus)
    return found


def _rows(draft: Draft, node: PlannedNode) -> int:
    """Rows that a node decodes at once; an evaluation's fill the slots."""
    batch = next((s.batch for s in draft.sources if s.name == node.source), node.layout.slots)
    return min(node.layout.slots, -(-batch // node.layout.replicas) * node.rows)


def _notes(
    draft: Draft, nodes: Sequence[PlannedNode], lengths: Mapping[str, Lengths]
) -> Iterator[str]:
    first, layout = nodes[0], nodes[0].layout
    needs = needs_of(draft.graph, first)
    kernel = kernel_name(draft.graph.node(first.name).operator, first.kernel)
    names, where = ", ".join(n.name for n in nodes), ", ".join(first.workers)
    keeps = [f"its own copy of {model_of(first)!r}"]
    if layout.cache_bytes:
        keeps.append(f"at most {shown_bytes(layout.cache_bytes * layout.inner)} of keys and values")
        keeps.append(f"rows of at most {layout.longest:,} tokens")
    yield f"{names}: an engine of {kernel} alone in {where}: {', '.join(keeps)}"
    if needs.seconds:
        yield f"{names}: about {needs.seconds:.0f} s until {kernel} has started"
    if not draft.cluster.on(draft.host_of(first.workers[0])).gpus:
        yield from (f"{names}: {text}" for text in needs.on_cpu)
        if any(map(draft.turns_of, first.workers)):
            kept = "weights, keys and values of an engine stay in a CPU's memory"
            yield f"{names}: turns free nothing here: {kept} while others have their turn"
    for node in nodes:
        yield from _assumed_prompt(draft, node)
        yield from _sampler(draft, node, kernel)
        yield from _interrupted(draft, node, needs, lengths[node.name])


def _assumed_prompt(draft: Draft, node: PlannedNode) -> Iterator[str]:
    """Where longer prompts may come than the engine has room for."""
    graph_node = draft.graph.node(node.name)
    assumed = UNSTATED_PROMPT + graph_node.params["max_tokens"]
    if node.layout.longest != assumed:
        return  # it is as long as the Model's positions, or another node's rows are longer
    if most_prompt_tokens(graph_node, Domains(draft.graph)) is None:
        yield (
            f"{node.name}: the engine has room for prompts of {UNSTATED_PROMPT:,} tokens, and the"
            " data does not say how long they are; generate(max_prompt_tokens=...) sets another"
            " bound"
        )


def _sampler(draft: Draft, node: PlannedNode, kernel: str) -> Iterator[str]:
    """What a kernel's own sampler does not promise."""
    sampler = draft.graph.node(node.name).params.get("sampler", "keyed")
    if sampler != "keyed":
        yield (
            f"{node.name}: sampler={sampler!r}: {kernel} draws the tokens, with a seed for each"
            " row; unlike those of sampler='keyed' they are not the tokens of other kernels, and"
            " the rows that run beside a row may change them"
        )


def _interrupted(draft: Draft, node: PlannedNode, needs: Needs, row: Lengths) -> Iterator[str]:
    """Where new weights within a row cost more than they save."""
    asked = draft.graph.node(node.name).params.get("on_update")
    if not node.lag or asked != "interrupt" or row.completion >= needs.pays_off:
        return
    again = row.prompt + row.completion / 2
    yield (
        f"{node.name}: on_update='drain' costs less: of answers of at most {row.completion} tokens"
        f" a version that interrupts one computes up to {again:,.0f} again,"
        f" {again / row.completion:.1f} for each token written"
    )
