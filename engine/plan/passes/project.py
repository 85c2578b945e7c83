"""Which columns travel on each edge: only those that somebody downstream reads.

Owns: projection, and where a column is (behind a select, in an ancestor). Does not own: bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from dataflow.loss_terms import ROWS, input_of
from dataflow.node import Node, Port
from dataflow.operator import EVERY_COLUMN, Input, listed
from dataflow.prompt_types import is_token_ids
from dataflow.rows import Domain, Domains, generations, nearest_prompt, physical
from dataflow.schema import (
    Advantage,
    Logprobs,
    Prompt,
    Reward,
    Rollout,
    Schema,
    TokenPrompt,
    TokenReward,
)
from engine.plan.draft import Draft
from engine.plan.plan import Fetch, PlannedInput, PlannedNode


def project(draft: Draft) -> Draft:
    """Set the fetches of each input, the columns each node returns, and what a Step records."""
    finder = _Finder(draft)
    recorded = tuple(finder.recorded(draft.nodes))
    handed_on = _handed_on(draft, finder, recorded)
    inputs = {n.name: tuple(finder.inputs(n, handed_on.get(n.name))) for n in draft.nodes}
    read = _columns([*(i for each in inputs.values() for i in each), *recorded])
    nodes = (
        replace(n, inputs=inputs[n.name], returns=tuple(read.get(n.name, ()))) for n in draft.nodes
    )
    return replace(draft, nodes=tuple(nodes), recorded=recorded)


Names = dict[str, None]


def _columns(inputs: Iterable[PlannedInput]) -> dict[str, Names]:
    """The columns that are fetched from each producer, in the order of the readers."""
    found: dict[str, Names] = {}
    for fetch in (fetch for i in inputs for fetch in i.fetches):
        found.setdefault(fetch.producer, {}).update(dict.fromkeys(fetch.columns))
    return found


def _handed_on(draft: Draft, finder: _Finder, recorded: Iterable[PlannedInput]) -> dict[str, Names]:
    """The columns of each concat that somebody reads, the last ones first: it fetches no others."""
    if not any(n.relation == "concat" for n in draft.nodes):
        return {}
    read = _columns(recorded)
    found: dict[str, Names] = {}
    for node in reversed(draft.nodes):
        if node.relation == "concat":
            found[node.name] = read.get(node.name, {})
        for name, columns in _columns(finder.inputs(node, found.get(node.name))).items():
            read.setdefault(name, {}).update(columns)
    return found


class _Finder:
    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._domains = Domains(draft.graph)
        self._nodes = {n.name: n for n in draft.graph.nodes}
        self._rows = {n.name: n.rows for n in draft.nodes}

    def inputs(self, planned: PlannedNode, handed_on: Names | None) -> Iterator[PlannedInput]:
        """handed_on: the columns that a node passes from its inputs to its readers, if it does."""
        node = self._nodes[planned.name]
        for i in planned.inputs:
            port = node.inputs[i.name]
            declared, _ = input_of(node, i.name)
            wanted = self._wanted(node, port, declared)
            if handed_on is not None:
                wanted = list(_for_joining(node, port, handed_on))
            fetches = self._fetches(port, wanted, self._rows[i.gate] * i.ratio)
            if planned.work == "evaluate":
                fetches = self._with_parts(port, fetches)
            yield replace(i, fetches=fetches)

    def _with_parts(self, score: Port[Any], fetches: tuple[Fetch, ...]) -> tuple[Fetch, ...]:
        """Adds each reward function's own column to the reward that an evaluation reads."""
        rows = self._whole(self._domains.of(score))
        parts = {
            n.name: (n.operator.parts,)
            for n in _with_parts(score)
            if self._whole(self._domains.of_node(n)) is rows
        }
        known = {f.producer for f in fetches}
        merged = [replace(f, columns=(*f.columns, *parts.get(f.producer, ()))) for f in fetches]
        others = [Fetch(producer=n, columns=c) for n, c in parts.items() if n not in known]
        return (*merged, *others)

    def recorded(self, nodes: Iterable[PlannedNode]) -> Iterator[PlannedInput]:
        """The rows to record of each train node on rows that some generation wrote, under its
        name.
        """
        for planned in nodes:
            node = self._nodes[planned.name]
            if planned.work != "train" or not generations(node.inputs["rows"]):
                continue
            rows = node.inputs["rows"]
            prompt = self._readable(rows, Prompt.shown)
            own = [name for name in self._shown() if name in rows.schema.columns]
            shown = self._fetches(rows, [*prompt, *own], planned.inner)
            fetches = (*shown, *self._numbers(node))
            yield PlannedInput(name=planned.name, gate=rows.node.name, fetches=fetches)

    def _shown(self) -> tuple[str, ...]:
        """The columns of rollouts."""
        whole = self._draft.placing.samples == "full"
        return (*Rollout.shown, *Rollout.inside) if whole else Rollout.shown

    def _numbers(self, train: Node) -> Iterator[Fetch]:
        """The last reward of its rows, each reward function's own, and the advantage it reads."""
        rewards = self._rewards_of(train)
        plain = [n for n in rewards if not issubclass(n.schemas[0], TokenReward)]
        columns = {n.name: Reward.shown for n in (plain or rewards)[-1:]}
        for node in (n for n in rewards if n.operator.parts):
            columns[node.name] = (*columns.get(node.name, ()), node.operator.parts)
        for name, wanted in columns.items():
            yield Fetch(producer=name, columns=wanted)
        if advantage := _argument_of(train, "advantage", Advantage):
            yield Fetch(producer=physical(advantage).node.name, columns=Advantage.shown)
        old = _argument_of(train, "old", Logprobs)
        if old is not None and self._draft.placing.samples == "full":
            yield Fetch(producer=physical(old).node.name, columns=Logprobs.inside)

    def _rewards_of(self, train: Node) -> list[Node]:
        """The nodes that make rewards of its rows, in running order."""
        whole = self._whole(self._domains.of_node(train))
        behind = {n.name for n in _upstream(train)}
        above = (self._nodes[n.name] for n in self._draft.nodes if n.name in behind)
        return [n for n in above if _scores(n) and self._whole(self._domains.of_node(n)) is whole]

    @staticmethod
    def _whole(domain: Domain | None) -> Domain | None:
        """The rows before any selection, where their columns are."""
        return domain.unselected if domain else None

    def _wanted(self, node: Node, port: Port[Any], declared: Input) -> list[str]:
        # A loss sees what it declares; a column function may hand on whatever else its port has.
        own = list(declared.schema.columns if _of_loss(node, declared) else port.schema.columns)
        wanted = own if declared.columns is None else [c for c in declared.columns if c in own]
        # Device columns go only to readers that declare them: others could not tell them apart.
        wanted = [c for c in wanted if not _on_device(port, c) or c in declared.schema.columns]
        return list(dict.fromkeys([*wanted, *self._of_ancestors(node, port, declared)]))

    def _of_ancestors(self, node: Node, port: Port[Any], declared: Input) -> list[str]:
        asked = [*declared.ancestors, *listed(node.params, declared.ancestors_from)]
        named = [column for column in asked if column != EVERY_COLUMN]
        every = [*named, *(self._dataset(port) if EVERY_COLUMN in asked else ())]
        return self._readable(port, every) if declared.readable else every

    def _readable(self, port: Port[Any], columns: Iterable[str]) -> list[str]:
        """The columns, a prompt that is token ids by its text."""
        node = nearest_prompt(port, self._domains)
        kind = self._draft.dataset.get(node.name, {}).get("prompt") if node else None
        ids = kind is not None and is_token_ids(kind)
        ids |= node is not None and issubclass(node.schemas[0], TokenPrompt)
        return ["prompt_text" if ids and name == "prompt" else name for name in columns]

    def _dataset(self, port: Port[Any]) -> list[str]:
        domain = self._domains.of(port)
        return list(self._draft.dataset.get(domain.source.name, ())) if domain else []

    def _fetches(self, port: Port[Any], columns: Iterable[str], rows: int) -> tuple[Fetch, ...]:
        """Columns by the node that has them; optional ones that no node has are left out."""
        found: dict[str, list[str]] = {}
        for column in columns:
            holder = self._holder(port, column)
            if holder is not None:
                found.setdefault(holder.name, []).append(column)
        return tuple(
            Fetch(producer=name, columns=tuple(c), ratio=max(1, rows // self._rows[name]))
            for name, c in found.items()
        )

    def _holder(self, port: Port[Any], column: str) -> Node | None:
        real = physical(port)
        if column in real.schema.columns:
            return real.node
        if column in TokenPrompt.columns:
            return nearest_prompt(port, self._domains)
        domain = self._domains.of(port)
        if domain is None:
            return None
        offered = (*self._dataset(port), *domain.source.schemas[0].columns)
        return domain.source if column in offered else None


def _for_joining(node: Node, port: Port[Any], columns: Iterable[str]) -> Iterator[str]:
    """Those of the columns that a part has, and of each axis along which one is to be filled in a
    column that says how long its rows are.
    """
    own, made = port.schema.columns, node.schemas[0].columns
    there = [name for name in columns if name in own]
    for axis in dict.fromkeys(made[name].axis for name in columns if name not in own):
        if axis is not None and all(own[name].axis != axis for name in there):
            there.append(next(name for name, column in own.items() if column.axis == axis))
    yield from there


def _argument_of(train: Node, name: str, kind: type[Schema]) -> Port[Any] | None:
    """This argument of the first loss on its own rows that has one of this kind."""
    loss = train.params["loss"]
    own = (item for item in train.inputs.items() if loss.rows_of(item[0]) == ROWS)
    ports = (port for key, port in own if key.endswith(f".{name}"))
    return next((port for port in ports if issubclass(port.schema, kind)), None)


def _scores(node: Node) -> bool:
    """Whether a node makes rewards, and does not only pass them on."""
    made = bool(node.schemas) and issubclass(node.schemas[0], Reward)
    return made and node.operator.traits.moves_rows


def _on_device(port: Port[Any], column: str) -> bool:
    return column in port.schema.columns and port.schema.columns[column].device


def _of_loss(node: Node, declared: Input) -> bool:
    return node.operator.work == "train" and declared not in node.operator.inputs


def _with_parts(score: Port[Any]) -> list[Node]:
    """The nodes of users' functions that a score is made of, by name."""
    return sorted((n for n in _upstream(score.node) if n.operator.parts), key=lambda n: n.name)


def _upstream(node: Node) -> list[Node]:
    """The node and all that it depends on."""
    seen: dict[int, Node] = {}
    stack = [node]
    while stack:
        at = stack.pop()
        if id(at) not in seen:
            seen[id(at)] = at
            stack.extend(port.node for port in at.inputs.values())
    return list(seen.values())
