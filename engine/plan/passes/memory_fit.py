"""Which train nodes compute layers again, or leave the optimizer's state on the host, and which
forward nodes leave their weights there, so that the plan fits.

Owns: the choice for nodes that no option names, and why. Does not own: what fits
(checks/memory.py), bytes (cost/training_memory.py), seconds (cost/training.py).

All cost time and change no number. So nothing is chosen while all fits. Else every combination is
priced, and the first in order of price that fits is taken: by seconds of a Step, where they are
known; then by how many nodes it changes; computing again before waiting on the host; of several
nodes weights that nobody trains first, then the train node with the most activations. Where none
fits, nothing is chosen, and the check says so.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from math import prod
from typing import NamedTuple

from dataflow.kernel import Layout, Offload, Recompute
from dataflow.safe_text import shown_bytes
from engine.plan.checks.memory import MemoryRoom, check_memory, find_memory_rooms
from engine.plan.draft import Draft
from engine.plan.passes.correct import correct_peaks
from engine.plan.passes.estimate import estimate_costs, estimate_nodes
from engine.plan.passes.processes import estimate_processes
from engine.plan.passes.side_modules import has_side
from engine.plan.plan import PlannedNode
from engine.plan.waiting_weights import can_weights_wait

_MOST_COMBINATIONS = 256
"""Of choices for each node; where there are more, nodes of one kind of work have the same."""


class _Choice(NamedTuple):
    """How one node spares memory."""

    recompute: Recompute
    offload: Offload

    def apply(self, layout: Layout) -> Layout:
        """The layout with this choice."""
        return replace(layout, recompute=self.recompute, offload=self.offload)


_Combination = Mapping[str, _Choice]
"""The choice for each node."""


def fit_memory(draft: Draft) -> Draft:
    """Choose for the nodes where memory is too small; change nothing if all fits, or nothing
    can be chosen that makes it fit.
    """
    if not any(check_memory(draft)):
        return draft
    full_rooms = [room for room in find_memory_rooms(draft, draft.cluster) if room.is_full]
    nodes = sorted(_find_candidates(draft, full_rooms), key=_Order(draft).key)
    names = {node.name for node in nodes}
    curable = [room for room in full_rooms if not names.isdisjoint(room.node_names)]
    # What is too small elsewhere stays so, whatever is chosen here.
    hosts = _find_hosts(draft, nodes)
    incurable_count = len(list(check_memory(draft, hosts))) - len(curable)
    trials = _Trials(draft, nodes, hosts)
    for combination in trials.list_by_price():
        trial = trials.make(combination)
        if len(list(check_memory(trial, hosts))) <= incurable_count:
            chosen = _estimate(draft, combination)
            notes = _describe(draft, chosen, combination, curable)
            return replace(chosen, notes=(*draft.notes, *notes))
    return draft


def _find_hosts(draft: Draft, nodes: Iterable[PlannedNode]) -> set[str]:
    """The hosts of these nodes, on which alone a choice for one of them changes what is needed."""
    workers = chain.from_iterable(node.workers for node in nodes)
    return set(map(draft.host_of, workers))


def _find_candidates(draft: Draft, rooms: Sequence[MemoryRoom]) -> Iterator[PlannedNode]:
    """The nodes in these rooms for which something can be chosen."""
    names: set[str] = set()
    for room in rooms:
        names |= room.node_names
    for node in draft.nodes:
        if node.name in names and len(_list_choices(draft, node)) > 1:
            yield node


def _list_choices(draft: Draft, node: PlannedNode) -> list[_Choice]:
    """All choices for a node, beginning with what it has: those that no option excludes."""
    if node.work != "train":
        return _list_waits(draft, node)
    recompute: list[Recompute] = [node.layout.recompute]
    offload: list[Offload] = [node.layout.offload]
    if node.name not in draft.placing.recompute and not has_side(draft, node):
        recompute = ["none", "layers"]
    # The host's memory is no other where it is the device.
    if node.name not in draft.placing.offload and draft.is_on_gpus(node):
        offload = ["none", "optimizer"]
    # Computing again comes first: it changes faster.
    pairs = product(offload, recompute)
    return [_Choice(again, waits) for waits, again in pairs]


def _list_waits(draft: Draft, node: PlannedNode) -> list[_Choice]:
    """All choices for a node that does not train: whether its weights wait."""
    choices = [_Choice(node.layout.recompute, node.layout.offload)]
    if node.name in draft.placing.offload or not draft.is_on_gpus(node):
        return choices
    if can_weights_wait(draft, node):
        choices.append(_Choice(node.layout.recompute, "weights"))
    return choices


class _Order:
    """The order of nodes, of which the last ones change first."""

    def __init__(self, draft: Draft) -> None:
        self._written = {model.name for model in draft.models if model.writer}

    def key(self, node: PlannedNode) -> tuple[bool, bool, int]:
        """By what their weights do, then by activations."""
        is_frozen = self._written.isdisjoint(use.model for use in node.models)
        return node.work != "train", is_frozen, node.estimate.bytes.get("activations", 0)


@dataclass(frozen=True, slots=True)
class _Price:
    """Of a combination, by which they are ordered."""

    seconds: float
    changes: int
    waiting: int
    """Nodes whose state waits on the host."""
    order: int

    @property
    def key(self) -> tuple[float, int, int, int]:
        """Cheaper ones first."""
        return self.seconds, self.changes, self.waiting, self.order


class _Trials:
    """Drafts of all combinations, of which each node's estimate is made once for each choice."""

    def __init__(self, draft: Draft, nodes: Sequence[PlannedNode], hosts: Container[str]) -> None:
        """nodes: those to choose for; the first that changes is the last of them. hosts: theirs."""
        self._draft, self._nodes = draft, nodes
        self._near: list[PlannedNode] = []
        """All that is on these hosts."""
        for node in draft.nodes:
            if any(host in hosts for host in map(draft.host_of, node.workers)):
                self._near.append(node)
        self._choices = {node.name: _list_choices(draft, node) for node in nodes}
        self._estimated: dict[_Choice, Draft] = {}

    def list_by_price(self) -> list[_Combination]:
        """All combinations but the present one, the cheapest first."""
        priced: list[tuple[_Price, _Combination]] = []
        for order, combination in enumerate(self._list_all()):
            changes = waiting = 0
            seconds = 0.0
            for node in self._nodes:
                choice = combination[node.name]
                present = (node.layout.recompute, node.layout.offload)
                changes += sum(a != b for a, b in zip(choice, present, strict=True))
                waiting += choice.offload != "none"
                seconds += self._estimate_node(node.name, choice).estimate.seconds or 0.0
            if changes:
                price = _Price(seconds, changes, waiting, order)
                priced.append((price, combination))
        priced.sort(key=lambda pair: pair[0].key)
        return [combination for _, combination in priced]

    def _list_all(self) -> Iterator[_Combination]:
        if prod(map(len, self._choices.values())) > _MOST_COMBINATIONS:
            yield from self._list_alike()
            return
        for choices in product(*self._choices.values()):
            yield dict(zip(self._choices, choices, strict=True))

    def _list_alike(self) -> Iterator[_Combination]:
        """Those in which all nodes of one kind of work have the same, as far as they can."""
        choices_of_work: dict[str, dict[_Choice, None]] = {}
        for node in self._nodes:
            alike = choices_of_work.setdefault(node.work, {})
            alike |= dict.fromkeys(self._choices[node.name])
        for choices in product(*choices_of_work.values()):
            choice_of_work = dict(zip(choices_of_work, choices, strict=True))
            combination: dict[str, _Choice] = {}
            for node in self._nodes:
                possible, choice = self._choices[node.name], choice_of_work[node.work]
                combination[node.name] = choice if choice in possible else possible[0]
            yield combination

    def make(self, combination: _Combination) -> Draft:
        """What is near in the draft with a combination, as far as bytes go."""
        nodes: list[PlannedNode] = []
        for node in self._near:
            if node.name in combination:
                node = self._estimate_node(node.name, combination[node.name])
            nodes.append(node)
        # What is scattered in a process depends on the peaks of its nodes.
        return estimate_processes(replace(self._draft, nodes=tuple(nodes)))

    def _estimate_node(self, name: str, choice: _Choice) -> PlannedNode:
        if choice not in self._estimated:
            alike = {node: choice for node in self._choices if choice in self._choices[node]}
            self._estimated[choice] = _estimate(self._draft, alike)
        return self._estimated[choice].node(name)


def _estimate(draft: Draft, combination: _Combination) -> Draft:
    """The draft with these choices, estimated anew. What the passes note is noted already."""
    nodes: list[PlannedNode] = []
    for node in draft.nodes:
        if node.name in combination:
            layout = combination[node.name].apply(node.layout)
            node = replace(node, layout=layout)
        nodes.append(node)
    changed_draft = replace(draft, nodes=tuple(nodes))
    if draft.profile is None and not draft.margins:
        return estimate_processes(estimate_nodes(changed_draft, combination))
    # A correction by what was measured counts for all nodes of a Worker together.
    for run in (estimate_costs, correct_peaks, estimate_processes):
        changed_draft = run(changed_draft)
    return replace(changed_draft, notes=draft.notes)


def _describe(
    draft: Draft, chosen: Draft, combination: _Combination, rooms: Sequence[MemoryRoom]
) -> Iterator[str]:
    """Say what was chosen for each node, and how much was missing."""
    for name, choice in combination.items():
        before = draft.node(name)
        changes: list[str] = []
        if choice.recompute != before.layout.recompute:
            changes.append(f"recompute: {choice.recompute}")
        if choice.offload != before.layout.offload:
            changes.append(f"offload: {choice.offload}")
        if not changes:
            continue
        room = next(room for room in rooms if name in room.node_names)
        why = f"{shown_bytes(room.need)} do not fit in the {shown_bytes(room.bytes)}"
        yield f"{name}: {', '.join(changes)}, since otherwise {why} of {room.where}"
