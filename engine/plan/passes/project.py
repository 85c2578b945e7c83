"""Which columns travel on each edge: only those that somebody downstream reads.

Owns: projection, and where a column is (behind a select, in an ancestor). Does not own: bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from dataflow.loss_terms import ROWS, input_of
from dataflow.node import Node, Port
from dataflow.operator import DATA_ROW, EVERY_COLUMN, Input, list_columns
from dataflow.prompt_types import is_token_ids
from dataflow.rows import Domain, Domains, generations, nearest_prompt, physical_port
from dataflow.schema import (
    Advantage,
    Episode,
    Logprobs,
    Prompt,
    Reward,
    Rollout,
    Schema,
    Segment,
    TokenPrompt,
    TokenReward,
)
from engine.plan.draft import Draft
from engine.plan.passes.shape import WEIGHT
from engine.plan.plan import PlannedNode
from engine.plan.planned_input import Fetch, PlannedInput, list_fetches


def project_columns(draft: Draft) -> Draft:
    """Set the fetches of each input, the columns each node returns, and what a Step records; and
    which nodes tell the weights of their rows, which is no column that travels.
    """
    finder = _Finder(draft)
    recorded = tuple(finder.record_rows(draft.nodes))
    handed_on = _find_handed_on(draft, finder, recorded)
    inputs_by_node: dict[str, tuple[PlannedInput, ...]] = {}
    readings: list[PlannedInput] = []
    for node in draft.nodes:
        inputs = tuple(finder.find_inputs(node, handed_on.get(node.name)))
        inputs_by_node[node.name] = inputs
        readings += inputs
    columns_read = fetched_columns([*readings, *recorded])
    weighing = _find_weighing(draft.nodes)
    nodes: list[PlannedNode] = []
    for node in draft.nodes:
        returns = tuple(columns_read.get(node.name, ()))
        weight = ""
        if node.name in weighing:
            weight = WEIGHT
        inputs = inputs_by_node[node.name]
        nodes.append(replace(node, inputs=inputs, returns=returns, weight=weight))
    return replace(draft, nodes=tuple(nodes), recorded=recorded)


Names = dict[str, None]


def fetched_columns(inputs: Iterable[PlannedInput]) -> dict[str, Names]:
    """The columns that are fetched from each producer, in the order of the readers."""
    columns: dict[str, Names] = {}
    for fetch in list_fetches(inputs):
        columns.setdefault(fetch.producer, {}).update(dict.fromkeys(fetch.columns))
    return columns


def _find_weighing(nodes: Iterable[PlannedNode]) -> set[str]:
    """The nodes that weigh the rows of a generation."""
    weighing: set[str] = set()
    for node in nodes:
        if node.traits.generates:
            weighing.update(i.gate for i in node.inputs if i.name == WEIGHT)
    return weighing


def _find_handed_on(
    draft: Draft, finder: _Finder, recorded: Iterable[PlannedInput]
) -> dict[str, Names]:
    """The columns of each concat that somebody reads, the last ones first: it fetches no others."""
    if not any(n.relation == "concat" for n in draft.nodes):
        return {}
    columns_read = fetched_columns(recorded)
    handed_on: dict[str, Names] = {}
    # Readers come before what they read, so that all that a concat is asked for is known at it.
    for node in reversed(draft.nodes):
        if node.relation == "concat":
            handed_on[node.name] = columns_read.get(node.name, {})
        inputs = finder.find_inputs(node, handed_on.get(node.name))
        for producer, columns in fetched_columns(inputs).items():
            columns_read.setdefault(producer, {}).update(columns)
    return handed_on


class _Finder:
    """Finds the columns that inputs read, and the nodes that have them."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._domains = Domains(draft.graph)
        self._nodes = {n.name: n for n in draft.graph.nodes}
        self._rows = {n.name: n.rows for n in draft.nodes}

    def find_inputs(self, planned: PlannedNode, handed_on: Names | None) -> Iterator[PlannedInput]:
        """Each input with its fetches. handed_on: the columns that a node passes from its inputs to
        its readers, if it does.
        """
        node = self._nodes[planned.name]
        for i in planned.inputs:
            port = node.inputs[i.name]
            if handed_on is not None:
                columns = _columns_to_join(node, port, handed_on)
            else:
                declaration, _ = input_of(node, i.name)
                columns = self._columns_read(node, port, declaration)
            fetches = self._make_fetches(port, columns, self._rows[i.gate] * i.ratio)
            if planned.work == "evaluate":
                fetches = self._add_reward_parts(port, fetches)
            yield replace(i, fetches=fetches)

    def _add_reward_parts(self, score: Port[Any], fetches: tuple[Fetch, ...]) -> tuple[Fetch, ...]:
        """Add each reward function's own column to the reward that an evaluation reads."""
        rows = self._rows_before_selection(self._domains.of(score))
        parts: dict[str, tuple[str, ...]] = {}
        for node in _nodes_with_parts(score):
            if self._rows_before_selection(self._domains.of_node(node)) is rows:
                parts[node.name] = (node.operator.parts,)
        merged_fetches: list[Fetch] = []
        for fetch in fetches:
            more_columns = parts.pop(fetch.producer, ())
            merged_fetches.append(replace(fetch, columns=(*fetch.columns, *more_columns)))
        others = (Fetch(producer=name, columns=columns) for name, columns in parts.items())
        return (*merged_fetches, *others)

    def record_rows(self, nodes: Iterable[PlannedNode]) -> Iterator[PlannedInput]:
        """The rows to record of each train node on rows that some generation wrote, under its
        name.
        """
        for planned in nodes:
            node = self._nodes[planned.name]
            if planned.work != "train" or not generations(node.inputs["rows"]):
                continue
            rows = node.inputs["rows"]
            prompt = self._readable(rows, Prompt.shown)
            names = self._rollout_columns(rows.schema)
            answer = [name for name in names if name in rows.schema.columns]
            fetches = self._make_fetches(rows, [*prompt, *answer], planned.inner)
            yield PlannedInput(
                name=planned.name,
                gate=rows.node.name,
                fetches=(*fetches, *self._fetch_numbers(node), *self._fetch_weight(rows, planned)),
            )

    def _rollout_columns(self, schema: type[Schema]) -> tuple[str, ...]:
        kinds = (Segment, Episode)
        kind = next((each for each in kinds if issubclass(schema, each)), Rollout)
        if self._draft.placing.samples == "full":
            return (*kind.shown, *kind.inside)
        return kind.shown

    def _fetch_numbers(self, train: Node) -> Iterator[Fetch]:
        """The last reward of its rows, each reward function's own, and the advantage it reads."""
        rewards = self._rewards_of(train)
        row_rewards = [n for n in rewards if not issubclass(n.schemas[0], TokenReward)]
        last = (row_rewards or rewards)[-1:]
        columns_by_reward = {node.name: Reward.shown for node in last}
        for node in rewards:
            if node.operator.parts:
                columns = columns_by_reward.get(node.name, ())
                columns_by_reward[node.name] = (*columns, node.operator.parts)
        for name, columns in columns_by_reward.items():
            yield Fetch(producer=name, columns=columns)
        advantage = _find_argument(train, "advantage", Advantage)
        if advantage is not None:
            yield Fetch(producer=physical_port(advantage).node.name, columns=Advantage.shown)
        old = _find_argument(train, "old", Logprobs)
        if old is not None and self._draft.placing.samples == "full":
            yield Fetch(producer=physical_port(old).node.name, columns=Logprobs.inside)

    def _fetch_weight(self, rows: Port[Any], train: PlannedNode) -> Iterator[Fetch]:
        """What its rows were expected to take, where the one generation that wrote them knew."""
        makers = generations(rows)
        if len(makers) == 1 and WEIGHT in makers[0].inputs:
            yield from self._make_fetches(makers[0].inputs[WEIGHT], [WEIGHT], train.inner)

    def _rewards_of(self, train: Node) -> list[Node]:
        """The nodes that make rewards of its rows, in running order."""
        rows = self._rows_before_selection(self._domains.of_node(train))
        upstream_names = {node.name for node in _find_upstream(train)}
        rewards: list[Node] = []
        for planned in self._draft.nodes:
            node = self._nodes[planned.name]
            if planned.name not in upstream_names or not _makes_rewards(node):
                continue
            if self._rows_before_selection(self._domains.of_node(node)) is rows:
                rewards.append(node)
        return rewards

    @staticmethod
    def _rows_before_selection(domain: Domain | None) -> Domain | None:
        """The rows before any selection, where their columns are."""
        return domain.rows_before_selection if domain else None

    def _columns_read(self, node: Node, port: Port[Any], declaration: Input) -> list[str]:
        # A loss sees what it declares; a column function may hand on whatever else its port has.
        schema = declaration.schema if _is_of_loss(node, declaration) else port.schema
        columns = list(schema.columns)
        if declaration.columns is not None:
            columns = [name for name in declaration.columns if name in schema.columns]
        # Device columns go only to readers that declare them: others could not tell them apart.
        readable = (
            name
            for name in columns
            if name in declaration.schema.columns or not _is_on_device(port, name)
        )
        return list(dict.fromkeys([*readable, *self._ancestor_columns(node, port, declaration)]))

    def _ancestor_columns(self, node: Node, port: Port[Any], declaration: Input) -> list[str]:
        names = [*declaration.ancestors, *list_columns(node.params, declaration.ancestors_from)]
        columns = [column for column in names if column != EVERY_COLUMN]
        if EVERY_COLUMN in names:
            columns += self._dataset_columns(port)
        if declaration.entries_of in port.schema.columns and self._lacks_some(port, columns):
            columns.append(declaration.entries_of)
        return self._readable(port, columns) if declaration.readable else columns

    def _lacks_some(self, port: Port[Any], columns: Iterable[str]) -> bool:
        """Whether no node above has one of these columns."""
        return any(self._find_holder(port, column) is None for column in columns)

    def _readable(self, port: Port[Any], columns: Iterable[str]) -> list[str]:
        """The columns, a prompt that is token ids by its text."""
        readable = list(columns)
        if "prompt" in readable and self._has_prompt_ids(port):
            readable = ["prompt_text" if name == "prompt" else name for name in readable]
        return readable

    def _has_prompt_ids(self, port: Port[Any]) -> bool:
        """Whether the nearest prompt is token ids, by its schema or in the data."""
        node = nearest_prompt(port, self._domains)
        if node is None:
            return False
        kind = self._draft.dataset.get(node.name, {}).get("prompt")
        in_data = kind is not None and is_token_ids(kind)
        return in_data or issubclass(node.schemas[0], TokenPrompt)

    def _dataset_columns(self, port: Port[Any]) -> list[str]:
        domain = self._domains.of(port)
        return list(self._draft.dataset.get(domain.source.name, ())) if domain else []

    def _make_fetches(
        self, port: Port[Any], columns: Iterable[str], rows: int
    ) -> tuple[Fetch, ...]:
        """Columns by the node that has them; optional ones that no node has are left out."""
        columns_by_holder: dict[str, list[str]] = {}
        for column in columns:
            holder = self._find_holder(port, column)
            if holder is not None:
                columns_by_holder.setdefault(holder.name, []).append(column)
        fetches: list[Fetch] = []
        for name, names in columns_by_holder.items():
            ratio = max(1, rows // self._rows[name])
            fetches.append(Fetch(producer=name, columns=tuple(names), ratio=ratio))
        return tuple(fetches)

    def _find_holder(self, port: Port[Any], column: str) -> Node | None:
        real = physical_port(port)
        if column in real.schema.columns:
            return real.node
        if column in TokenPrompt.columns:
            return nearest_prompt(port, self._domains)
        domain = self._domains.of(port)
        if domain is None:
            return None
        if column == DATA_ROW:
            return domain.source
        source_columns = (*self._dataset_columns(port), *domain.source.schemas[0].columns)
        return domain.source if column in source_columns else None


def _columns_to_join(node: Node, port: Port[Any], columns: Iterable[str]) -> list[str]:
    """Choose what a concat takes from one of its parts: those of the columns that the part has, and
    for each axis of the others a column that says how long the part's rows are.
    """
    part_columns, joined_columns = port.schema.columns, node.schemas[0].columns
    names: list[str] = []
    missing_axes: Names = {}
    for name in columns:
        if name in part_columns:
            names.append(name)
        elif (axis := joined_columns[name].axis) is not None:
            missing_axes[axis] = None
    for axis in missing_axes:
        along_axis = [name for name, column in part_columns.items() if column.axis == axis]
        if not any(name in along_axis for name in names):
            names.append(along_axis[0])
    return names


def _find_argument(train: Node, name: str, kind: type[Schema]) -> Port[Any] | None:
    """This argument of the first loss on its own rows that has one of this kind."""
    loss = train.params["loss"]
    for key, port in train.inputs.items():
        is_argument = key.endswith(f".{name}") and loss.rows_of(key) == ROWS
        if is_argument and issubclass(port.schema, kind):
            return port
    return None


def _makes_rewards(node: Node) -> bool:
    """Whether a node makes rewards, and does not only pass them on."""
    has_rewards = bool(node.schemas) and issubclass(node.schemas[0], Reward)
    return has_rewards and node.operator.traits.moves_rows


def _is_on_device(port: Port[Any], column: str) -> bool:
    return column in port.schema.columns and port.schema.columns[column].device


def _is_of_loss(node: Node, declaration: Input) -> bool:
    return node.operator.work == "train" and declaration not in node.operator.inputs


def _nodes_with_parts(score: Port[Any]) -> list[Node]:
    """The nodes of users' functions that a score is made of, by name."""
    nodes = (node for node in _find_upstream(score.node) if node.operator.parts)
    return sorted(nodes, key=lambda node: node.name)


def _find_upstream(node: Node) -> list[Node]:
    """The node and all that it depends on."""
    upstream: dict[int, Node] = {}
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if id(current) not in upstream:
            upstream[id(current)] = current
            waiting.extend(port.node for port in current.inputs.values())
    return list(upstream.values())
