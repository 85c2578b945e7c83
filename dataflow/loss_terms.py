"""What a train node minimises: a sum of weighted terms, each a loss function on its ports.

Owns: the values LossFunction, LossTerm and Loss, their algebra, and which rows each term stands on.
Does not own: what a loss function sees (loss_inputs.py) and how a user declares one (loss.py, which
hands all of this on), the reduction of terms to a number (the train kernel).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dataflow.calls import call_error, call_site, require
from dataflow.convention import Convention
from dataflow.errors import Origin
from dataflow.limits import Limit
from dataflow.model import Number
from dataflow.node import Node, Port
from dataflow.operator import Input
from dataflow.schema import Completion

LossScope = Literal["token", "sequence", "group"]

ROWS = "rows"
"""The input of a train node with the rows of every term that has none of its own; and the last part
of the name of an input with a term's own rows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFunction:
    """A declared loss; `fn` returns Terms (loss_inputs.py). zero: port -> parameter; the port is
    not read if the parameter is a constant 0. only_with: port -> parameter; the port is not read if
    the parameter is None.
    """

    path: str
    name: str
    scope: LossScope
    head: Literal["lm", "scalar"]
    entropy: bool
    ports: tuple[Input, ...]
    parameters: tuple[str, ...]
    zero: tuple[tuple[str, str], ...] = ()
    only_with: tuple[tuple[str, str], ...] = ()
    limits: tuple[tuple[str, Limit], ...] = ()
    """Parameter -> the values it takes; the check refuses others."""
    recorded: bool = True
    """Whether it falls back on the sampler's recorded log-probs, so that rows must be a Rollout."""
    supervised: bool = False
    """Whether it imitates its rows, whatever made them: it is then trained at temperature 1."""
    on_policy: bool = False
    """Whether its gradient is right only for rows from the weights that an update starts from."""
    conventions: tuple[tuple[str, Convention], ...] = field(default=(), compare=False)
    """For a loss with a parameter `dialect`: what it does in each."""
    correction: str = ""
    """The parameter that, unless None, weighs tokens by how far they are from their sampler: then
    rows must be a Rollout, and may be of older weights.
    """
    scores: bool = False
    """Whether it reads `now.scores`, the scalar head at each row's last token."""
    ids: tuple[str, ...] = ()
    """A port and its column of token ids, [tokens, k], at which it reads `now.at_ids`; or none."""
    fn: Callable[..., Any] = field(repr=False)

    def takes_number(self, name: str) -> bool:
        """Whether a parameter is a number, and so may be a schedule, which train evaluates before
        the call.
        """
        annotation = inspect.signature(self.fn).parameters[name].annotation
        return any(word in str(annotation) for word in ("float", "Number"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """One weighted use of a loss function.

    ports: port name -> Port; empty in a train node, which has the ports as inputs `label.port`.
    rows: rows of its own, where it has some; empty in a train node, where `on` is the input that
    has its rows: the node's `rows`, or `label.rows` of the first term with these rows. now: ports
    for which the plan uses the current log-probs, detached (`old` in a Step of one update).
    """

    function: LossFunction
    weight: Number = 1.0
    params: tuple[tuple[str, Any], ...] = ()
    ports: tuple[tuple[str, Port[Any]], ...] = ()
    rows: Port[Any] | None = None
    on: str = ROWS
    label: str = ""
    now: tuple[str, ...] = ()
    origin: Origin | None = field(default=None, compare=False)

    @property
    def is_corrected(self) -> bool:
        """Whether it weighs tokens by how far they are from their sampler."""
        return dict(self.params).get(self.function.correction) is not None

    def reads_recorded(self, inputs: Collection[str]) -> bool:
        """Whether it reads what the sampler recorded. inputs: the names of its train node's."""
        # With `old` as an input, a loss does not fall back on the recorded log-probs.
        falls_back = self.function.recorded and f"{self.label}.old" not in inputs
        return falls_back or self.is_corrected


@dataclass(frozen=True, slots=True)
class Loss:
    """A sum of weighted terms: `a + 0.01 * b`."""

    terms: tuple[LossTerm, ...]

    def __add__(self, other: Loss) -> Loss:
        if not isinstance(other, Loss):
            problem = f"expected a Loss on both sides, found {type(other).__name__} {other!r:.60}"
            fix = "clipped_policy_loss(advantage) + 0.01 * entropy_loss()"
            raise call_error("loss + ...", problem, fix)
        return Loss(self.terms + other.terms)

    def __mul__(self, factor: float) -> Loss:
        require(
            "... * loss",
            "the factor",
            factor,
            fits=isinstance(factor, (int, float)) and not isinstance(factor, bool),
            expected="a number",
            fix="0.01 * entropy_loss()",
        )
        terms = [_scale_term(term, factor) for term in self.terms]
        return Loss(tuple(terms))

    __radd__ = __add__
    __rmul__ = __mul__

    @property
    def supervised(self) -> bool:
        """Whether rows are only imitated: all terms are supervised or read the model alone."""
        functions = [term.function for term in self.terms]
        others = [function for function in functions if not function.supervised]
        if len(others) == len(functions):
            return False
        return not any(function.ports or function.recorded for function in others)

    @property
    def row_sets(self) -> tuple[str, ...]:
        """Of a bound loss: the inputs with rows, the node's own first."""
        return tuple(dict.fromkeys((ROWS, *(term.on for term in self.terms))))

    def on(self, row_set: str) -> Loss:
        """Of a bound loss: the terms on the rows of this input."""
        return Loss(tuple(term for term in self.terms if term.on == row_set))

    def rows_of(self, key: str) -> str:
        """Of a bound loss: the input that has the rows on which an input of the node stands."""
        label = key.partition(".")[0]
        return next((term.on for term in self.terms if term.label == label), ROWS)

    def bound(self) -> tuple[Loss, dict[str, Port[Any]]]:
        """Separate the loss from its ports: returns the loss without them, and the ports by input
        name `label.port`; labels become unique. A term's own rows are the input `label.rows`, one
        for all terms with these rows.
        """
        terms: list[LossTerm] = []
        inputs: dict[str, Port[Any]] = {}
        counts: dict[str, int] = {}
        row_sets: dict[Port[Any], str] = {}
        for term in self.terms:
            name = term.function.name
            counts[name] = counts.get(name, 0) + 1
            label = name if counts[name] == 1 else f"{name}_{counts[name]}"
            row_set = ROWS
            if term.rows is not None:
                row_set = row_sets.setdefault(term.rows, f"{label}.{ROWS}")
                inputs[row_set] = term.rows
            terms.append(replace(term, label=label, ports=(), rows=None, on=row_set))
            for port_name, port in term.ports:
                inputs[f"{label}.{port_name}"] = port
        return Loss(tuple(terms)), inputs


def unbind_loss(node: Node) -> Loss:
    """Return the loss of a train node as it was given to it: each term with its ports and rows."""
    bound: Loss = node.params["loss"]
    terms = [_unbind_term(term, node) for term in bound.terms]
    return Loss(tuple(terms))


def _unbind_term(term: LossTerm, node: Node) -> LossTerm:
    ports: list[tuple[str, Port[Any]]] = []
    for key, port in node.inputs.items():
        label, _, name = key.partition(".")
        # An input without a label is the node's own; `label.rows` is no port of the loss.
        if label == term.label and name not in ("", ROWS):
            ports.append((name, port))
    rows = None if term.on == ROWS else node.inputs[term.on]
    return replace(term, label="", on=ROWS, ports=tuple(ports), rows=rows)


def row_sets(node: Node) -> dict[str, Port[Any]]:
    """The rows of a train node by the input that has them, its own first; none of other nodes."""
    loss = node.params.get("loss")
    if not isinstance(loss, Loss):
        return {}
    return {name: node.inputs[name] for name in loss.row_sets if name in node.inputs}


def input_of(node: Node, key: str) -> tuple[Input, LossTerm | None]:
    """What an input of a node is declared as, and the term of its loss that reads it, if any."""
    label, _, name = key.partition(".")
    term = _find_term(node, label)
    if term is None or not name:
        return node.operator.input(key), None
    ports = node.operator.inputs if name == ROWS else term.function.ports
    return next(port for port in ports if port.name == name), term


def _find_term(node: Node, label: str) -> LossTerm | None:
    loss = node.params.get("loss")
    if not isinstance(loss, Loss):
        return None
    return next((term for term in loss.terms if term.label == label), None)


def _scale_term(term: LossTerm, factor: float) -> LossTerm:
    weight = term.weight
    if isinstance(weight, (int, float)):
        return replace(term, weight=weight * factor)
    # A schedule: it is linear in its ends, so that scaling these scales every value.
    scaled = replace(weight, start=weight.start * factor, stop=weight.stop * factor)
    return replace(term, weight=scaled)


def make_loss(
    function: LossFunction,
    ports: Mapping[str, Port[Any] | None],
    params: Mapping[str, Any],
    *,
    rows: Port[Completion] | None = None,
) -> Loss:
    """Make a loss of one term of weight 1; ports that are None are left out. rows: those of the
    term, if they are not the train node's. Raises GraphError for a port that is none.
    """
    connected_ports = {name: port for name, port in ports.items() if port is not None}
    for name, port in connected_ports.items():
        _require_port(function, name, port)
    if rows is not None:
        _require_port(function, ROWS, rows)
    term = LossTerm(
        function=function,
        params=tuple(params.items()),
        ports=tuple(connected_ports.items()),
        rows=rows,
        origin=call_site(),
    )
    return Loss((term,))


def _require_port(function: LossFunction, name: str, port: object) -> None:
    if isinstance(port, Port):
        return
    schemas = {declared.name: declared.schema.__name__ for declared in function.ports}
    # `rows` is in no declaration: every loss takes it.
    expected = f"Port[{schemas.get(name, 'Completion')}], the output of an operator"
    problem = f"expected {expected}, found {type(port).__name__} {port!r:.60}"
    fix = f"pass what an operator returned as {name}"
    raise call_error(f"{function.name}.{name}", problem, fix)
