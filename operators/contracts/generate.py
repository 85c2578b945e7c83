"""Strategies of rows: groups, their answers' masks, and the columns of each port.

Owns: how many rows and tokens there are, and which columns depend on each other. Does not own: a
single value (values.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from dataflow.limits import Limit
from dataflow.schema import Column, Preference
from dataflow.testing import ContractError
from operators.contracts.cases import MASK, Generated, GeneratedColumn
from operators.contracts.subject import InputPort, SettleParams
from operators.contracts.values import Size, make_strategy

Draw = Callable[[st.SearchStrategy[Any]], Any]

_EQUAL = ("sampler_logprobs", "logprobs", "values", "returns")
"""Columns that are equal, token by token, where numbers coincide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKind:
    """How rows are to be. size: of their numbers. groups: at least so many. live: each row has a
    trained token. distinct: no two rows of a group have the same number. coincide: all models say
    the same, which is where losses have their kinks. spare: what a test draws besides, by the
    number of groups and of rows.
    """

    size: Size = "ordinary"
    groups: int = 1
    live: bool = False
    distinct: bool = False
    coincide: bool = False
    spare: Callable[[list[list[int]]], st.SearchStrategy[Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """What rows are made of: ports, free parameters, optional ports. values_by_column: the user's
    own, a strategy or a list of examples.

    bounded: rows of a loss: extreme numbers are no advantages above 1, token ids play no part.
    """

    ports: tuple[InputPort, ...]
    values_by_column: Mapping[str, Any]
    free: Mapping[str, Limit]
    defaults: Mapping[str, Any]
    settle: SettleParams
    optional: tuple[str, ...] = ()
    bounded: bool = False

    @property
    def pairs(self) -> bool:
        """Whether groups are pairs."""
        return any(issubclass(port.schema, Preference) for port in self.ports)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """A column of a port. one: values to draw, None for what follows from a row's place. shared:
    whether all rows of a group have the same.
    """

    port: str
    name: str
    declared: Column | None
    one: st.SearchStrategy[Any] | None
    shared: bool = False

    @property
    def axis(self) -> str | None:
        return None if self.declared is None else self.declared.axis


@st.composite
def generated_rows(draw: Draw, plan: RowPlan, kind: RowKind) -> Generated:
    """Rows of this kind for these ports."""
    # The order of the draws decides which rows a seed gives.
    cells = list(_make_cells(plan, kind))
    most = max(kind.groups, 3)
    group_strategy = _groups(cells, pairs=plan.pairs, live=kind.live)
    groups = draw(st.lists(group_strategy, min_size=kind.groups, max_size=most))
    params: dict[str, Any] = {}
    for name, limit in plan.free.items():
        params[name] = draw(_param(limit, plan.defaults.get(name)))
    settled = plan.settle(params) if params else {}
    assume(settled is not None)
    absent = {name for name in plan.optional if draw(st.booleans())}
    rows = list(chain.from_iterable(groups))
    position: list[int] = []
    sample: list[int] = []
    for number, rows_of_group in enumerate(groups):
        position += [number] * len(rows_of_group)
        sample += range(len(rows_of_group))
    generated = Generated(
        position=position,
        sample=sample,
        masks=[mask for mask, _ in rows],
        ports={port.name: {} for port in plan.ports},
        schemas={port.name: port.schema for port in plan.ports},
        params=settled or {},
        absent=frozenset(absent),
    )
    ports = _make_ports(generated, cells, [values for _, values in rows], kind)
    generated = replace(generated, ports=ports)
    if kind.spare is None:
        return generated
    return replace(generated, spare=draw(kind.spare(generated.groups)))


def _make_cells(plan: RowPlan, kind: RowKind) -> Iterator[_Cell]:
    for port in plan.ports:
        for name, column in port.schema.columns.items():
            if _may_read(port, name):
                one = None if _follows(plan, name) else _strategy(plan, column, kind)
                shared = _is_of_group(port, column)
                yield _Cell(port=port.name, name=name, declared=column, one=one, shared=shared)
        for name in port.input.ancestors:
            if name not in port.schema.columns:
                one = _dataset_strategy(plan, name)
                yield _Cell(port=port.name, name=name, declared=None, one=one, shared=True)


def _is_of_group(port: InputPort, column: Column) -> bool:
    """Whether all rows of a group have the same: what is of their prompt, or of their parent."""
    return column.axis == "P" or (port.input.rows == "parent" and column.axis is None)


def _may_read(port: InputPort, name: str) -> bool:
    """Whether the operator may read it: what it says it reads, or what it does not know of."""
    columns = port.input.columns
    return columns is None or name in columns or name not in port.input.schema.columns


def _follows(plan: RowPlan, name: str) -> bool:
    """Whether a column follows from the rows' places. No loss sees token ids of its rows."""
    by_pair = plan.pairs and name in ("sign", "keep")
    unseen = plan.bounded and name in ("prompt_ids", "completion_ids", "version")
    return name == MASK or by_pair or unseen


def _strategy(plan: RowPlan, column: Column, kind: RowKind) -> st.SearchStrategy[Any]:
    users_strategy = _users_strategy(plan, column.name)
    if users_strategy is not None:
        return users_strategy
    return make_strategy(column, kind.size, bounded=plan.bounded)


Row = tuple[list[int], dict[int, Any]]
"""A row's mask, and its value in each cell."""


@st.composite
def _groups(draw: Draw, cells: Sequence[_Cell], *, pairs: bool, live: bool) -> list[Row]:
    """One group. All that belongs to a row is drawn together, so that it shrinks away together."""
    shared = _draw_values(draw, cells, shared=True, tokens=0)
    low, high = (2, 2) if pairs else (1, 3)
    rows = draw(st.lists(_rows(cells, live=live), min_size=low, max_size=high))
    return [(mask, shared | row_values) for mask, row_values in rows]


@st.composite
def _rows(draw: Draw, cells: Sequence[_Cell], *, live: bool) -> Row:
    bit = st.sampled_from([1, 0])
    mask = draw(st.lists(bit, min_size=int(live), max_size=4))
    if live and not sum(mask):
        mask = [1, *mask[1:]]
    return mask, _draw_values(draw, cells, shared=False, tokens=len(mask))


def _draw_values(
    draw: Draw, cells: Sequence[_Cell], *, shared: bool, tokens: int
) -> dict[int, Any]:
    """Draw a row's value in each cell; with `shared` those of a group, else a row's own."""
    values: dict[int, Any] = {}
    for number, cell in enumerate(cells):
        if cell.one is not None and cell.shared is shared:
            if cell.axis is None:
                values[number] = draw(cell.one)
            elif cell.axis == "T":
                values[number] = [draw(cell.one) for _ in range(tokens)]
            else:
                values[number] = draw(st.lists(cell.one, min_size=1, max_size=2))
    return values


def _make_ports(
    generated: Generated, cells: Sequence[_Cell], rows: Sequence[dict[int, Any]], kind: RowKind
) -> dict[str, dict[str, GeneratedColumn]]:
    """Make columns of the drawn cells, and those that follow from the rows' places."""
    ports: dict[str, dict[str, GeneratedColumn]] = {port: {} for port in generated.ports}
    for number, cell in enumerate(cells):
        if cell.one is None:
            values = _values_by_place(generated, cell.name)
        else:
            values = [row[number] for row in rows]
        if kind.distinct and not cell.shared and all(isinstance(v, float) for v in values):
            # Drawn numbers are multiples of a quarter, and a group has few rows: none meet.
            values = [v + s / 64 for v, s in zip(values, generated.sample, strict=True)]
        ports[cell.port][cell.name] = GeneratedColumn(values=values, declared=cell.declared)
    for columns in ports.values():
        if "token_reward" in columns and "reward" in columns:
            total = [float(sum(row)) for row in columns["token_reward"].values]
            columns["reward"] = replace(columns["reward"], values=total)
        if "turn_end" in columns:
            _settle_turns(columns, generated.masks)
    if kind.coincide:
        _make_equal(ports)
    return ports


def _settle_turns(columns: dict[str, GeneratedColumn], masks: Sequence[Sequence[int]]) -> None:
    """Make a turn of each run of trained tokens, as an episode has them."""
    ends = [_ends_of_runs(mask) for mask in masks]
    columns["turn_end"] = replace(columns["turn_end"], values=ends)
    if "turn_reward" in columns:
        drawn = columns["turn_reward"].values
        rewards = [_repeat_to(row, len(end)) for row, end in zip(drawn, ends, strict=True)]
        columns["turn_reward"] = replace(columns["turn_reward"], values=rewards)
    if "turn" in columns:
        turns = [_number_turns(mask) for mask in masks]
        columns["turn"] = replace(columns["turn"], values=turns)


def _ends_of_runs(mask: Sequence[int]) -> list[int]:
    """How many tokens there are up to the end of each run of ones."""
    ends: list[int] = []
    for count, bit in enumerate(mask, start=1):
        is_followed = count < len(mask) and mask[count]
        if bit and not is_followed:
            ends.append(count)
    return ends


def _number_turns(mask: Sequence[int]) -> list[int]:
    """The number of each token's turn: what follows a turn belongs to it until the next begins."""
    turn = -1
    before = 0
    turns: list[int] = []
    for bit in mask:
        if bit and not before:
            turn += 1
        turns.append(max(turn, 0))
        before = bit
    return turns


def _repeat_to(values: Sequence[Any], count: int) -> list[Any]:
    """So many values: these, over and over."""
    return [values[index % len(values)] for index in range(count)]


def _values_by_place(generated: Generated, name: str) -> list[Any]:
    """Masks; of a pair's rows one chosen and one rejected; prompts and answers that begin alike."""
    if name == MASK:
        return [list(mask) for mask in generated.masks]
    if name == "sign":
        return [1 if s == 0 else -1 for s in generated.sample]
    if name == "keep":
        return [1] * len(generated)
    if name == "prompt_ids":
        return [[1, 2 + p] for p in generated.position]
    return [[0] * len(mask) for mask in generated.masks]


def _users_strategy(plan: RowPlan, name: str) -> st.SearchStrategy[Any] | None:
    """The user's own values of a column: a strategy, or examples."""
    values = plan.values_by_column.get(name)
    if values is None or isinstance(values, st.SearchStrategy):
        return values
    if isinstance(values, Sequence) and not isinstance(values, str) and len(values):
        return st.sampled_from(list(values))
    raise ContractError(
        f"columns[{name!r}]: expected a hypothesis strategy or a list of examples, found"
        f" {values!r:.60}. Fix: columns={{{name!r}: st.text()}}."
    )


def _dataset_strategy(plan: RowPlan, name: str) -> st.SearchStrategy[Any]:
    users_strategy = _users_strategy(plan, name)
    if users_strategy is not None:
        return users_strategy
    return st.text(alphabet="ab1 ", max_size=4)


def _make_equal(ports: dict[str, dict[str, GeneratedColumn]]) -> None:
    """Give all columns of log-probs the numbers of the first of them, and so with values."""
    first: dict[bool, GeneratedColumn] = {}
    for columns in ports.values():
        for name, column in columns.items():
            if name in _EQUAL:
                alike = first.setdefault("logprobs" in name, column)
                columns[name] = GeneratedColumn(values=alike.values, declared=column.declared)


def _param(limit: Limit, default: Any) -> st.SearchStrategy[Any]:
    """The default first, then other values within the limit."""
    candidates = [default, limit.like, *limit.choices, *_numbers_near(limit)]
    if limit.kind == "flag":
        candidates += [False, True]
    if limit.optional:
        candidates.append(None)
    # Each once, by its text: 1 and True are equal.
    settings_by_text = {repr(c): c for c in candidates if limit.accepts(c)}
    return st.sampled_from(list(settings_by_text.values()) or [default])


def _numbers_near(limit: Limit) -> list[Any]:
    """Numbers at the ends of a limit and between; pairs of them where it takes pairs."""
    if limit.kind not in ("whole", "number") or not isinstance(limit.like, (int, float)):
        return []
    if limit.kind == "whole":
        low = int(limit.low or 0)
        return [low, low + 1]
    high = limit.high
    if high is None:
        high = 2 * limit.like
    numbers: list[Any] = [limit.low, high, (limit.like + high) / 2]
    if limit.pair:
        numbers.append((limit.like / 2, limit.like))
    return numbers
