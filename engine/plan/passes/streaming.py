"""Which Steps are worked on in parts, by which nodes: synchronous ones while they are generated,
those of a source with a lag once they are formed.

Owns: that, as PlannedSource.stream and PlannedNode.in_parts, and why the stream ends where it does.
Does not own: which rows are a part (engine/coordinator/part_cut.py), nor what a part of a loss is
(dataflow/training_parts.py).

A node works on parts if all that it reads below a generation does, and it needs no whole Step. With
a lag the next rows are generated while this Step is trained; parts let nodes below the cut, which
read the weights that the Step starts from, compute in Workers of their own while others train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import chain

from dataflow.loss_terms import Loss
from dataflow.training_parts import why_not_in_parts
from engine.plan.draft import Draft
from engine.plan.passes.place import find_ancestors
from engine.plan.plan import Decisions, PlannedNode
from engine.plan.planned_input import list_fetches
from engine.plan.planned_source import PlannedSource

PARTS = 8
"""Parts of a Step of which every answer has half of its greatest length, where no price chooses
(engine/plan/stream_choice.py). More of them begin sooner, and each costs a pass over the weights.
"""


def stream_steps(draft: Draft) -> Draft:
    """Work on parts where it was asked for, and may be."""
    if draft.placing.stream == "off":
        return draft
    below = find_parts_below_cut(draft.nodes, draft.sources, partial(_why_whole, draft))
    if _is_beside_training(draft.nodes, below):
        return _cut_formed_steps(draft, below)
    why_not = find_why_no_stream(draft)
    if why_not:
        return replace(draft, notes=(*draft.notes, f"no Step is streamed: {why_not}"))
    in_parts, ends = find_parts(draft.nodes, partial(_why_whole, draft))
    nodes = list[PlannedNode]()
    for node in draft.nodes:
        works_on_parts = node.name in in_parts
        nodes.append(work_in_parts(node) if works_on_parts else node)
    nodes = raise_readers(nodes)
    sources = tuple(_stream(draft, source, nodes) for source in draft.sources)
    nodes = let_rows_leave(nodes, sources)
    notes = (*draft.notes, *_describe(sources, nodes, ends))
    return replace(draft, nodes=nodes, sources=sources, notes=notes)


def find_why_no_stream(decided: Decisions) -> str:
    """Why no Step of the plan can be streamed; empty if it can."""
    late = [source.name for source in decided.sources if source.max_lag]
    if late:
        return f"{late[0]} has a lag, with which rows are generated while others are trained"
    generations = [n for n in decided.nodes if n.region == "stream" and n.traits.generates]
    if not generations:
        return "nothing is generated"
    generating = set(chain.from_iterable(node.workers for node in generations))
    computing = [n for n in decided.nodes if n not in generations and n.work != "source"]
    if all(generating.issuperset(node.workers) for node in computing):
        return "the Worker that generates does everything else, too (--workers apart or --pin)"
    return ""


def find_parts(
    nodes: Sequence[PlannedNode], why_whole: Callable[[PlannedNode], str]
) -> tuple[set[str], dict[str, str]]:
    """The nodes that work on parts, and why others on a generation do not, where the reason is
    theirs. why_whole: why a node needs the whole Step; empty if it does not.
    """
    ancestors = find_ancestors(nodes)
    generations = {n.name for n in nodes if n.region == "stream" and n.traits.generates}
    # What of a part is there before the cut of parts, or is made part by part.
    readable: set[str] = set()
    in_parts: set[str] = set()
    ends: dict[str, str] = {}
    for node in nodes:
        is_below = bool(generations & ancestors[node.name])
        if node.region == "evaluation" or not (is_below or node.region == "stream"):
            continue
        if not is_below:
            readable.add(node.name)
            continue
        producers = {fetch.producer for fetch in list_fetches(node.inputs)}
        if not readable.issuperset(producers.union(node.gates)):
            continue
        why_not = why_whole(node)
        if why_not:
            ends[node.name] = why_not
        else:
            in_parts.add(node.name)
            readable.add(node.name)
    return in_parts, ends


def find_parts_below_cut(
    nodes: Sequence[PlannedNode],
    sources: Sequence[PlannedSource],
    why_whole: Callable[[PlannedNode], str],
) -> set[str]:
    """The nodes below the cut that work on parts of a Step that is formed; none unless all sources
    have a lag. why_whole: as in find_parts.
    """
    in_parts: set[str] = set()
    if not all(source.max_lag for source in sources):
        return in_parts
    readable = {node.name for node in nodes if node.region == "stream"}
    for node in nodes:
        producers = {fetch.producer for fetch in list_fetches(node.inputs)}
        is_readable = readable.issuperset(producers.union(node.gates))
        if node.region == "step" and is_readable and not why_whole(node):
            in_parts.add(node.name)
            readable.add(node.name)
    return in_parts


def raise_readers(nodes: Sequence[PlannedNode]) -> list[PlannedNode]:
    """The nodes; those with a Model that work on parts and read nothing below the cut are above it.
    No weights change before the Step's update, so values of a part need not wait for others'
    columns of it. Where a selection leaves rows out, they wait until it has.
    """
    above: set[str] = set()
    selecting: set[str] = set()
    for node in nodes:
        if node.region == "stream":
            above.add(node.name)
        if node.relation == "subset":
            selecting.add(node.source)
    raised: list[PlannedNode] = []
    for node in nodes:
        producers = {fetch.producer for fetch in list_fetches(node.inputs)}
        is_forward = node.in_parts and node.work != "train" and node.traits.computes
        reads_above = above.issuperset(producers.union(node.gates))
        if is_forward and reads_above and node.source not in selecting:
            node = work_in_parts(replace(node, region="stream"))
        raised.append(node)
    return raised


def _is_beside_training(nodes: Sequence[PlannedNode], in_parts: Set[str]) -> bool:
    """Whether some of these nodes would compute while others of them train."""
    of_parts = [node for node in nodes if node.name in in_parts]
    training: set[str] = set()
    for node in of_parts:
        if node.work == "train":
            training.update(node.workers)
    computing = [node for node in of_parts if node.work != "train" and node.traits.computes]
    return bool(training) and any(training.isdisjoint(node.workers) for node in computing)


def _cut_formed_steps(draft: Draft, in_parts: Set[str]) -> Draft:
    """Let these nodes work on parts of each Step that is formed, and log-probs and values above the
    cut on rows as they come, so that the Step is formed soon after its last row.
    """
    early = set(_find_early(draft))
    nodes: list[PlannedNode] = []
    for node in draft.nodes:
        if node.name in in_parts:
            node = replace(node, in_parts=True)
        elif node.name in early:
            node = replace(node, chunking="ready", chunks=1)
        nodes.append(node)
    cut_sources = {node.source for node in nodes if node.in_parts}
    sources: list[PlannedSource] = []
    notes = list(draft.notes)
    for source in draft.sources:
        if source.name in cut_sources:
            tokens = draft.placing.part_tokens or least_part_tokens(nodes)
            source = replace(source, part_tokens=tokens)
            of_source = [node for node in nodes if node.source == source.name]
            names = ", ".join(node.name for node in of_source if node.in_parts)
            notes.append(f"{names}: work on parts of {tokens} tokens once a Step is formed")
        sources.append(source)
    if early:
        notes.append(f"{', '.join(sorted(early))}: take rows as they come")
    return replace(draft, nodes=tuple(nodes), sources=tuple(sources), notes=tuple(notes))


def _find_early(draft: Draft) -> Iterator[str]:
    """The nodes with a Model above the cut that take whatever has come: beside generation, where
    nobody asked for chunks of theirs. A longer lag leaves them time to fill passes.
    """
    generating: set[str] = set()
    for node in draft.nodes:
        if node.traits.generates:
            generating.update(node.workers)
    for node in draft.nodes:
        is_above = node.region == "stream" and node.lag == 1
        is_forward = node.traits.computes and not node.traits.generates
        is_free = node.name not in draft.placing.chunks and generating.isdisjoint(node.workers)
        if is_above and is_forward and is_free:
            yield node.name


def _why_whole(draft: Draft, node: PlannedNode) -> str:
    """Why a node needs the whole Step; empty if it does not."""
    if node.scope == "batch" and node.work != "train":
        return "batch scope: it needs every row of the Step"
    if node.work != "train":
        return ""
    if len(node.row_sets) > 1:
        return "it trains on rows of several sources"
    params = draft.graph.node(node.name).params
    loss = params["loss"]
    assert isinstance(loss, Loss)
    return why_not_in_parts(loss, params)


def work_in_parts(node: PlannedNode) -> PlannedNode:
    """The node, working on parts."""
    if node.region == "stream":
        return replace(node, chunking="part", in_parts=True)
    return replace(node, in_parts=True)


def let_rows_leave(
    nodes: Sequence[PlannedNode], sources: Sequence[PlannedSource]
) -> tuple[PlannedNode, ...]:
    """The nodes, of which rows of first generations leave as parts of a streamed Step get full."""
    streamed = [source for source in sources if source.stream != "off"]
    tokens_by_source = {source.name: source.part_tokens for source in streamed}
    leaving: list[PlannedNode] = []
    for node in nodes:
        tokens = tokens_by_source.get(node.source, 0)
        is_first = not node.in_parts and node.region == "stream" and node.traits.generates
        if tokens and is_first:
            # Twice for each part: the later a replica tells how far its rows are, the later a part
            # begins.
            layout = replace(node.layout, part_tokens=max(1, tokens // (2 * node.chunks)))
            node = replace(node, layout=layout)
        leaving.append(node)
    return tuple(leaving)


def set_part_tokens(sources: Sequence[PlannedSource], tokens: int) -> tuple[PlannedSource, ...]:
    """The sources, those of streamed Steps with parts of so many tokens."""
    changed: list[PlannedSource] = []
    for source in sources:
        if source.stream != "off":
            source = replace(source, part_tokens=tokens)
        changed.append(source)
    return tuple(changed)


def least_part_tokens(nodes: Sequence[PlannedNode]) -> int:
    """Tokens of the smallest part that fills a micro-batch of every rank that trains on parts: less
    costs a rank as much as a whole one.
    """
    trains = [node.layout for node in nodes if node.in_parts and node.work == "train"]
    return max((layout.tokens * layout.data for layout in trains), default=1)


def _stream(draft: Draft, source: PlannedSource, nodes: Sequence[PlannedNode]) -> PlannedSource:
    """Of a source with rows that are worked on in parts: how, and how large a part is."""
    if not any(node.in_parts and node.source == source.name for node in nodes):
        return source
    tokens = draft.placing.part_tokens or _choose_tokens(source, nodes, draft)
    stream = "arrival" if draft.placing.stream == "arrival" else "ordered"
    return replace(source, stream=stream, part_tokens=tokens)


def _choose_tokens(source: PlannedSource, nodes: Sequence[PlannedNode], draft: Draft) -> int:
    """As many parts as pay, but each fills a micro-batch of every rank."""
    most = 0
    for node in nodes:
        if node.source == source.name and node.region == "stream" and node.traits.generates:
            answer = int(draft.graph.node(node.name).params["max_tokens"])
            most += source.batch * node.live_rows * answer
    return max(least_part_tokens(nodes), most // (2 * PARTS))


def _describe(
    sources: Sequence[PlannedSource], nodes: Sequence[PlannedNode], ends: dict[str, str]
) -> Iterator[str]:
    for source in sources:
        if source.stream == "off":
            continue
        names = [n.name for n in nodes if n.in_parts and n.source == source.name]
        order = {"ordered": "by their longest answer", "arrival": "as they come"}[source.stream]
        yield (
            f"{', '.join(names)}: work on parts of {source.part_tokens} tokens while {source.name}"
            f" is generated, groups {order}"
        )
    for name, why in ends.items():
        yield f"the stream ends at {name}: {why}"
