"""Programs: graphs that one run goes through, one after another.

Owns: the value, how the names of a phase's nodes are told from those of other phases, and with
whose weights each Model of a phase begins. Does not own: one phase (graph.py), what is wrong with a
Program (rules/programs.py), running it (engine).

    Program((sft(base, demos), 200), (grpo(base, data, fn), 1000))

A graph alone is a Program of one phase whose number is 0: `AnyGraph` is either, and both have
`name`, `origin`, `phases`, `numbers`, `begins`, `with_graphs` and `in_dialect`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dataflow.calls import call_error, call_site, require
from dataflow.carried_weights import Carried
from dataflow.convention import Dialect
from dataflow.display import Displayed
from dataflow.errors import Origin
from dataflow.graph import Graph, Phase
from dataflow.model import Model
from dataflow.regions import find_trained_models

_PAIR = "Program((sft(...), 200), (grpo(...), 1000))"


class Program(Displayed):
    """Phases, one after another, in one run. Each is a Phase, or a pair of graph and steps.

    name: of its run folder; by default the graphs' names.
    """

    __slots__ = ("begins", "digest", "name", "origin", "phases")
    _page = "dataflow.draw.pages:graph_page"

    def __init__(
        self,
        *phases: Phase | tuple[Graph, int | None],
        name: str | None = None,
        origin: Origin | None = None,
    ) -> None:
        """Raises GraphError for anything but phases."""
        self.origin = origin or call_site()
        if not phases:
            raise call_error("Program", "expected at least one phase, found none", _PAIR)
        self.phases = tuple(map(_require_phase, phases))
        fits = name is None or (isinstance(name, str) and bool(name))
        require("Program", "name", name, fits=fits, expected="text or None", fix='name="demo"')
        self.name = name or "-".join(phase.graph.name for phase in self.phases)
        self.begins: tuple[Mapping[str, Carried], ...] = tuple(_find_beginnings(self.phases))
        """For each phase, the Models that do not begin with their base."""
        self.digest = _digest(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Program({self.name!r}, {len(self.phases)} phases)"

    def in_dialect(self, dialect: Dialect) -> Program:
        """The same Program with another peer's conventions in every phase."""
        return self.with_graphs([phase.graph.in_dialect(dialect) for phase in self.phases])

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of its phases, from 1."""
        return tuple(range(1, len(self.phases) + 1))

    def with_graphs(self, graphs: Sequence[Graph]) -> Program:
        """The same Program with another graph in each phase."""
        pairs = zip(self.phases, graphs, strict=True)
        phases = (replace(phase, graph=graph) for phase, graph in pairs)
        return Program(*phases, name=self.name, origin=self.origin)

    def label(self, number: int) -> str:
        """`phase 2 'grpo'`: a phase, counted from 1, as messages name it."""
        return phase_label(number, self.phases[number - 1])

    def title(self, number: int) -> str:
        """`phase 2 of 2: grpo, 1,000 Steps`: its heading."""
        phase = self.phases[number - 1]
        return f"phase {number} of {len(self.phases)}: {phase.graph.name}, {phase.length}"


AnyGraph = Graph | Program
"""What check, plan, draw, run, diff and snapshots take: one phase, or several."""


def numbered_phases(graph: AnyGraph) -> Iterator[tuple[int, Phase]]:
    """Each phase after its number: from 1 in a Program, 0 for a graph alone."""
    return zip(graph.numbers, graph.phases, strict=True)


def phase_label(number: int, phase: Phase) -> str:
    """`phase 2 'grpo'`: a phase, counted from 1, as messages name it."""
    return f"phase {number} {phase.graph.name!r}"


def numbered_name(number: int, name: str) -> str:
    """`2/rollout`: what a phase has, told from other phases; of a graph alone (0) the name."""
    return f"{number}/{name}" if number else name


def _require_phase(phase: Any) -> Phase:
    """A Phase, or a pair of graph and steps, as a Phase. Raises GraphError."""
    if isinstance(phase, Phase):
        return phase
    if isinstance(phase, tuple) and len(phase) == 2:
        graph, steps = phase
        return Phase(graph, steps)
    argument = f"{type(phase).__name__} {phase!r:.60}"
    problem = f"expected a Phase, or a graph and its steps, found {argument}"
    raise call_error("Program", problem, _PAIR)


class Lineage:
    """Whose weights each Model has, as phases go by."""

    def __init__(self) -> None:
        self._last: dict[str, Carried | None] = {}
        """Model -> the weights that it was left with; None: those of its base."""
        self._began: dict[str, Carried | None] = {}

    def begin(self, graph: Graph) -> dict[str, Carried]:
        """The Models of the next phase that do not begin with their base.

        Each begins as it was left. A frozen copy, and a follower that is new, begin as their leader
        does.
        """
        self._began = {}
        for model in models_of(graph):
            leader = model.copies
            if leader is None and model.name not in self._last:
                leader = model.follows
            # Leaders stand before those that follow them.
            if leader is not None:
                self._began[model.name] = self._began.get(leader.name)
            else:
                self._began[model.name] = self._last.get(model.name)
        return {name: carried for name, carried in self._began.items() if carried is not None}

    def end(self, number: int, graph: Graph) -> dict[str, Carried]:
        """After that phase: what every Model has that is not at its base. graph: what has run of
        it.
        """
        used_names: set[str] = set()
        for node in graph.nodes:
            used_names.update(state.name for state in node.states.values())
        adapted = {model.name for model in models_of(graph) if model.adapter is not None}
        for name in find_trained_models(graph) & used_names:
            is_adapter = name in adapted
            self._began[name] = Carried(phase=number, model=name, is_adapter=is_adapter)
        self._last |= self._began
        return {name: carried for name, carried in self._last.items() if carried is not None}


def models_of(graph: Graph) -> list[Model]:
    """A graph's Models, leaders before those that follow them."""
    return [state for state in graph.states if isinstance(state, Model)]


def beginnings(program: Program, number: int) -> Iterator[str]:
    """A line for each Model of a phase, counted from 1, that does not begin with its base."""
    phase = program.phases[number - 1]
    for name, carried in program.begins[number - 1].items():
        whose = "its weights" if carried.model == name else f"those of {carried.model!r}"
        line = f"{name}: begins with {whose} after phase {carried.phase}"
        if name in phase.optimizers:
            line += ", and its optimizer goes on"
        yield line


def _find_beginnings(phases: tuple[Phase, ...]) -> Iterator[dict[str, Carried]]:
    """For each phase, the Models that do not begin with their base."""
    lineage = Lineage()
    for number, phase in enumerate(phases, start=1):
        yield lineage.begin(phase.graph)
        lineage.end(number, phase.graph)


def _digest(program: Program) -> str:
    digest = hashlib.blake2b(program.name.encode(errors="surrogatepass"), digest_size=16)
    for phase in program.phases:
        parts = (phase.graph.digest, phase.steps, phase.until, phase.optimizers)
        digest.update(repr(parts).encode())
    return digest.hexdigest()
