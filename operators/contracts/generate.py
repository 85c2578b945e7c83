"""Strategies of rows: groups, their answers' masks, and the columns of each port.

Owns: how many rows and tokens there are, and which columns depend on each other. Does not own: a
single value (values.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from dataflow.limits import Limit
from dataflow.schema import Column, Preference
from dataflow.testing import ContractError
from operators.contracts.cases import MASK, Generated, GeneratedColumn
from operators.contracts.subject import InputPort, Settled
from operators.contracts.values import Size, value_of

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
    """What rows are made of: ports, columns given by the user, free parameters, optional ports.

    bounded: rows of a loss: extreme numbers are no advantages above 1, token ids play no part.
    """

    ports: tuple[InputPort, ...]
    given: Mapping[str, Any]
    free: Mapping[str, Limit]
    defaults: Mapping[str, Any]
    settled: Settled
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
def rows_of(draw: Draw, plan: RowPlan, kind: RowKind) -> Generated:
    """Rows of this kind for these ports."""
    cells = list(_cells(plan, kind))
    most = max(kind.groups, 3)
    group = _groups(cells, pairs=plan.pairs, live=kind.live)
    found = draw(st.lists(group, min_size=kind.groups, max_size=most))
    params = {
        name: draw(_param(limit, plan.defaults.get(name))) for name, limit in plan.free.items()
    }
    settled = plan.settled(params) if params else {}
    assume(settled is not None)
    absent = frozenset(name for name in plan.optional if draw(st.booleans()))
    made = Generated(
        position=[p for p, rows in enumerate(found) for _ in rows],
        sample=[s for rows in found for s in range(len(rows))],
        masks=[mask for rows in found for mask, _ in rows],
        ports={port.name: {} for port in plan.ports},
        schemas={port.name: port.schema for port in plan.ports},
        params=settled or {},
        absent=absent,
    )
    made = replace(
        made, ports=_ports(made, cells, [row for rows in found for _, row in rows], kind)
    )
    if kind.spare is None:
        return made
    return replace(made, spare=draw(kind.spare(made.groups)))


def _cells(plan: RowPlan, kind: RowKind) -> Iterator[_Cell]:
    for port in plan.ports:
        for name, column in port.schema.columns.items():
            if _is_wanted(port, name):
                at_prompt = column.axis == "P" or (
                    port.input.rows == "parent" and column.axis is None
                )
                one = None if _follows(plan, name) else _strategy(plan, column, kind)
                yield _Cell(port=port.name, name=name, declared=column, one=one, shared=at_prompt)
        for name in port.input.ancestors:
            if name not in port.schema.columns:
                one = _dataset(plan, name)
                yield _Cell(port=port.name, name=name, declared=None, one=one, shared=True)


def _is_wanted(port: InputPort, name: str) -> bool:
    """Whether the operator may read it: what it says it reads, or what it does not know of."""
    columns = port.input.columns
    return columns is None or name in columns or name not in port.input.schema.columns


def _follows(plan: RowPlan, name: str) -> bool:
    """Whether a column follows from the rows' places. No loss sees token ids of its rows."""
    by_pair = plan.pairs and name in ("sign", "keep")
    unseen = plan.bounded and name in ("prompt_ids", "completion_ids", "version")
    return name == MASK or by_pair or unseen


def _strategy(plan: RowPlan, column: Column, kind: RowKind) -> st.SearchStrategy[Any]:
    given = _given(plan, column.name)
    return value_of(column, kind.size, bounded=plan.bounded) if given is None else given


Row = tuple[list[int], dict[int, Any]]
"""A row's mask, and its value in each cell."""


@st.composite
def _groups(draw: Draw, cells: Sequence[_Cell], *, pairs: bool, live: bool) -> list[Row]:
    """One group. All that belongs to a row is drawn together, so that it shrinks away together."""
    shared = _values(draw, cells, shared=True, tokens=0)
    low, high = (2, 2) if pairs else (1, 3)
    rows = draw(st.lists(_rows(cells, live=live), min_size=low, max_size=high))
    return [(mask, shared | own) for mask, own in rows]


@st.composite
def _rows(draw: Draw, cells: Sequence[_Cell], *, live: bool) -> Row:
    mask = draw(st.lists(st.sampled_from([1, 0]), min_size=int(live), max_size=4))
    mask = mask if sum(mask) or not live else [1, *mask[1:]]
    return mask, _values(draw, cells, shared=False, tokens=len(mask))


def _values(draw: Draw, cells: Sequence[_Cell], *, shared: bool, tokens: int) -> dict[int, Any]:
    found = {}
    for number, cell in enumerate(cells):
        if cell.one is not None and cell.shared is shared:
            if cell.axis is None:
                found[number] = draw(cell.one)
            elif cell.axis == "T":
                found[number] = [draw(cell.one) for _ in range(tokens)]
            else:
                found[number] = draw(st.lists(cell.one, min_size=1, max_size=2))
    return found


def _ports(
    made: Generated, cells: Sequence[_Cell], rows: Sequence[dict[int, Any]], kind: RowKind
) -> dict[str, dict[str, GeneratedColumn]]:
    """The drawn cells as columns, and those that follow."""
    ports: dict[str, dict[str, GeneratedColumn]] = {port: {} for port in made.ports}
    for number, cell in enumerate(cells):
        drawn = cell.one is not None
        values = [row[number] for row in rows] if drawn else _following(made, cell.name)
        if kind.distinct and not cell.shared and all(isinstance(v, float) for v in values):
            values = [v + s / 64 for v, s in zip(values, made.sample, strict=True)]
        ports[cell.port][cell.name] = GeneratedColumn(values=values, declared=cell.declared)
    for columns in ports.values():
        if "token_reward" in columns and "reward" in columns:
            total = [float(sum(row)) for row in columns["token_reward"].values]
            columns["reward"] = replace(columns["reward"], values=total)
    if kind.coincide:
        _coincide(ports)
    return ports


def _following(made: Generated, name: str) -> list[Any]:
    """Masks; of a pair's rows one chosen and one rejected; prompts and answers that begin alike."""
    if name == MASK:
        return [list(mask) for mask in made.masks]
    if name == "sign":
        return [1 if s == 0 else -1 for s in made.sample]
    if name == "keep":
        return [1] * len(made)
    if name == "prompt_ids":
        return [[1, 2 + p] for p in made.position]
    return [[0] * len(mask) for mask in made.masks]


def _given(plan: RowPlan, name: str) -> st.SearchStrategy[Any] | None:
    """The user's own values of a column: a strategy, or examples."""
    found = plan.given.get(name)
    if found is None or isinstance(found, st.SearchStrategy):
        return found
    if isinstance(found, Sequence) and not isinstance(found, str) and len(found):
        return st.sampled_from(list(found))
    raise ContractError(
        f"columns[{name!r}]: expected a hypothesis strategy or a list of examples, found"
        f" {found!r:.60}. Fix: columns={{{name!r}: st.text()}}."
    )


def _dataset(plan: RowPlan, name: str) -> st.SearchStrategy[Any]:
    found = _given(plan, name)
    return st.text(alphabet="ab1 ", max_size=4) if found is None else found


def _coincide(ports: dict[str, dict[str, GeneratedColumn]]) -> None:
    """Give all columns of log-probs the numbers of the first of them, and so with values."""
    first: dict[bool, GeneratedColumn] = {}
    for columns in ports.values():
        for name, column in columns.items():
            if name in _EQUAL:
                alike = first.setdefault("logprobs" in name, column)
                columns[name] = GeneratedColumn(values=alike.values, declared=column.declared)


def _param(limit: Limit, default: Any) -> st.SearchStrategy[Any]:
    """The default first, then other values within the limit."""
    found = [default, limit.like, *limit.choices, *_numbers(limit)]
    if limit.kind == "flag":
        found += [False, True]
    if limit.optional:
        found.append(None)
    fitting = [value for value in found if limit.accepts(value)]
    return st.sampled_from(list({repr(value): value for value in fitting}.values()) or [default])


def _numbers(limit: Limit) -> list[Any]:
    if limit.kind not in ("whole", "number") or not isinstance(limit.like, (int, float)):
        return []
    if limit.kind == "whole":
        low = int(limit.low or 0)
        return [low, low + 1]
    high = limit.high if limit.high is not None else 2 * limit.like
    pairs = [(limit.like / 2, limit.like)] if limit.pair else []
    return [limit.low, high, (limit.like + high) / 2, *pairs]
