"""Strategies of rows: groups, their answers' masks, and the columns of each port.

Owns: how many rows and tokens there are, and which columns depend on each other. Does not own: a
single value (values.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from dataflow.limits import Limit
from dataflow.schema import Column, Preference
from dataflow.testing import ContractError
from operators.contracts.cases import MASK, Generated, GeneratedColumn
from operators.contracts.subject import Accepts, InputPort
from operators.contracts.values import Size, value_of

Draw = Callable[[st.SearchStrategy[Any]], Any]

_EQUAL = ("sampler_logprobs", "logprobs", "values", "returns")
"""Columns that are equal, token by token, where numbers coincide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
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
class Plan:
    """What rows are made of: ports, columns given by the user, free parameters, optional ports.

    bounded: rows of a loss: extreme numbers are no advantages above 1, token ids play no part.
    """

    ports: tuple[InputPort, ...]
    given: Mapping[str, Any]
    free: Mapping[str, Limit]
    defaults: Mapping[str, Any]
    accepts: Accepts
    optional: tuple[str, ...] = ()
    bounded: bool = False

    @property
    def pairs(self) -> bool:
        """Whether groups are pairs."""
        return any(issubclass(port.schema, Preference) for port in self.ports)


@st.composite
def rows_of(draw: Draw, plan: Plan, kind: Kind) -> Generated:
    """Rows of this kind for these ports."""
    sizes = st.just(2) if plan.pairs else st.integers(1, 3)
    groups = draw(st.lists(sizes, min_size=kind.groups, max_size=max(kind.groups, 3)))
    position = [p for p, size in enumerate(groups) for _ in range(size)]
    sample = [s for size in groups for s in range(size)]
    masks = [_mask(draw, live=kind.live) for _ in position]
    where = _Places(position, sample, masks)
    ports: dict[str, dict[str, GeneratedColumn]] = {}
    for port in plan.ports:
        ports[port.name] = _columns(draw, plan, port, where, kind)
    if kind.coincide:
        _coincide(ports)
    params = {name: draw(_param(limit, plan.defaults.get(name))) for name, limit in plan.free.items()}
    assume(not params or plan.accepts(params))
    absent = frozenset(name for name in plan.optional if draw(st.booleans()))
    made = Generated(
        position=position,
        sample=sample,
        masks=masks,
        ports=ports,
        schemas={port.name: port.schema for port in plan.ports},
        params=params,
        absent=absent,
        spare=None,
    )
    if kind.spare is None:
        return made
    return _with_spare(made, draw(kind.spare(made.groups)))


def _with_spare(made: Generated, spare: Any) -> Generated:
    return replace(made, spare=spare)


def _mask(draw: Draw, *, live: bool) -> list[int]:
    mask = draw(st.lists(st.sampled_from([1, 0]), min_size=int(live), max_size=4))
    return mask if sum(mask) or not live else [1, *mask[1:]]


@dataclass(frozen=True, slots=True)
class _Places:
    """Where rows are: their keys and masks."""

    position: list[int]
    sample: list[int]
    masks: list[list[int]]

    def __len__(self) -> int:
        return len(self.position)

    def by_group(self, values: Sequence[Any]) -> list[Any]:
        """One of the values for each row, the same for all of a group."""
        return [values[p] for p in self.position]

    @property
    def groups(self) -> int:
        return self.position[-1] + 1


def _columns(
    draw: Draw, plan: Plan, port: InputPort, where: _Places, kind: Kind
) -> dict[str, GeneratedColumn]:
    declared = port.schema.columns
    made = {
        name: GeneratedColumn(values=_values(draw, plan, port, column, where, kind), declared=column)
        for name, column in declared.items()
        if _is_wanted(port, name)
    }
    if "token_reward" in made and "reward" in made:
        rewards = [sum(row) for row in made["token_reward"].values]
        made["reward"] = GeneratedColumn(values=rewards, declared=declared["reward"])
    for name in port.input.ancestors:
        if name not in made:
            values = where.by_group([draw(_dataset(plan, name)) for _ in range(where.groups)])
            made[name] = GeneratedColumn(values=values, declared=None)
    return made


def _is_wanted(port: InputPort, name: str) -> bool:
    """Whether the operator may read it: those that it says it reads, or what it does not know of."""
    columns = port.input.columns
    return columns is None or name in columns or name not in port.input.schema.columns


def _values(
    draw: Draw, plan: Plan, port: InputPort, column: Column, where: _Places, kind: Kind
) -> list[Any]:
    """One value for each row."""
    if column.name == MASK:
        return [list(mask) for mask in where.masks]
    if column.name == "sign" and plan.pairs:
        return [1 if s == 0 else -1 for s in where.sample]
    if column.name == "keep" and plan.pairs:
        return [1] * len(where)
    if plan.bounded and column.name in _UNSEEN:
        return _unseen(column.name, where)
    one = _given(plan, column.name)
    if one is None:
        one = value_of(column, kind.size, bounded=plan.bounded)
    if column.axis == "T":
        return [[draw(one) for _ in mask] for mask in where.masks]
    if column.axis is not None:
        lists = st.lists(one, min_size=1, max_size=2)
        if column.axis == "P":
            return where.by_group([draw(lists) for _ in range(where.groups)])
        return [draw(lists) for _ in range(len(where))]
    if port.input.rows == "parent":
        return where.by_group([draw(one) for _ in range(where.groups)])
    values = [draw(one) for _ in range(len(where))]
    if kind.distinct and all(isinstance(v, float) for v in values):
        return [v + s / 64 for v, s in zip(values, where.sample, strict=True)]
    return values


_UNSEEN = ("prompt_ids", "completion_ids", "version")
"""Columns that no loss sees as numbers of its own rows: not worth a draw."""


def _unseen(name: str, where: _Places) -> list[Any]:
    """Prompts that begin alike, and answers that begin alike."""
    if name == "prompt_ids":
        return [[1, 2 + p] for p in where.position]
    return [[0] * len(mask) for mask in where.masks]


def _given(plan: Plan, name: str) -> st.SearchStrategy[Any] | None:
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


def _dataset(plan: Plan, name: str) -> st.SearchStrategy[Any]:
    return _given(plan, name) or st.text(alphabet="ab1 ", max_size=4)


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
