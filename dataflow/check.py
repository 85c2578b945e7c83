"""The check: from a Graph to a CheckedGraph, from a Program to a CheckedProgram, or to every fault
at once.

Owns: running all rules, and the facts of a checked graph (sizes, lags, columns). Does not own: any
rule (rules/), any decision about devices (the planner).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar, overload

import pyarrow as pa

from dataflow.dialect import spoken, with_dialects
from dataflow.display import Displayed
from dataflow.errors import Fault, GraphError, GraphWarning
from dataflow.graph import Graph, Phase
from dataflow.loss_terms import ROWS, row_sets
from dataflow.node import Node, Port
from dataflow.program import AnyGraph, Program, beginnings, numbered_phases, phase_label
from dataflow.regions import Regions
from dataflow.rows import Domain, Domains
from dataflow.rules import RULES, WARNINGS, unused_settings
from dataflow.rules.context import ColumnReader, Context, context_of, counted
from dataflow.rules.off_policy import policies
from dataflow.rules.programs import program_faults, program_warnings
from dataflow.rules.versions import bounds, lags

Columns = Mapping[str, pa.DataType]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSize:
    """What one train node sees of a Step: `rows` in groups of `group`, in `updates` updates of
    `rows_an_update`.

    row_set: the input that has the rows: the node's own, or those of a term of its loss. full: the
    Step always has that many; False if a selection without refill may leave fewer.
    """

    train: str
    row_set: str
    group: int
    rows: int
    updates: int
    rows_an_update: int
    full: bool

    @property
    def name(self) -> str:
        """The train node, and the term of its loss whose own rows these are."""
        return self.train if self.row_set == ROWS else f"{self.train}, {self.row_set}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSize:
    """What a Step takes from a source. prompts: None if it is finite and runs to its end
    (evaluation).
    """

    source: str
    prompts: int | None
    trains: tuple[TrainSize, ...]

    def describe(self) -> str:
        """`64 prompts x 8 = 512 completions a Step, 4 updates of 128`."""
        if self.prompts is None:
            return "to the end, for evaluation"
        return (
            "; ".join(self._line(t) for t in self.trains)
            or f"{counted(self.prompts, 'prompt')} a Step"
        )

    def _line(self, size: TrainSize) -> str:
        prompts, rows = counted(self.prompts or 0, "prompt"), counted(size.rows, "completion")
        grouped = (
            f"{prompts} x {size.group} = {rows}" if size.group > 1 else counted(size.rows, "row")
        )
        limit = "" if size.full else "at most "
        return (
            f"{limit}{grouped} a Step, {counted(size.updates, 'update')} of {size.rows_an_update:,}"
            f" ({size.name})"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckedGraph(Displayed):
    """A Graph that passed every rule; the planner accepts nothing else. Made by `check` only.

    lag: for nodes that read a trained Model, how many versions they may lag. bound: for train
    nodes, the greatest lag of any row that they train. policies: for train nodes, whose rows they
    train and how old, in words. sizes: by source. columns: (node, output) ->
    name -> type of one row's value, including dataset columns of ancestors. dialects: the peer
    whose conventions a node, or `node.label` for a term of a loss, follows; the graph has them
    written out. warnings: what looks wrong. notes: what is not read.
    """

    graph: Graph
    domains: Domains
    regions: Regions
    lag: Mapping[str, int]
    bound: Mapping[str, int]
    policies: Mapping[str, str]
    sizes: Mapping[str, SourceSize]
    columns: Mapping[tuple[str, int], Columns]
    dialects: Mapping[str, str]
    warnings: tuple[GraphWarning, ...]
    notes: tuple[str, ...] = ()
    _page = "dataflow.draw.pages:checked_page"

    def __repr__(self) -> str:
        return f"CheckedGraph({self.graph.name!r}, {counted(len(self.warnings), 'warning')})"

    @property
    def source(self) -> Graph:
        """What was checked, as a CheckedProgram has it too."""
        return self.graph

    def describe(self) -> str:
        """A few lines for a person: sizes, staleness, where streaming ends, dialects, notes,
        warnings.
        """
        return "\n".join(_described(self))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckedProgram(Displayed):
    """A Program of which every phase passed every rule, and all of them together. Made by `check`
    only. own: warnings of what the phases are to each other.
    """

    program: Program
    phases: tuple[CheckedGraph, ...]
    own: tuple[GraphWarning, ...]
    _page = "dataflow.draw.pages:checked_page"

    def __repr__(self) -> str:
        return f"CheckedProgram({self.program.name!r}, {counted(len(self.warnings), 'warning')})"

    @property
    def source(self) -> Program:
        """What was checked, as a CheckedGraph has it too."""
        return self.program

    @property
    def warnings(self) -> tuple[GraphWarning, ...]:
        """Those of each phase, with its name, and its own."""
        warnings: list[GraphWarning] = []
        pairs = zip(numbered_phases(self.program), self.phases, strict=True)
        for (number, phase), checked in pairs:
            warnings += [of_phase(number, phase, warning) for warning in checked.warnings]
        return (*warnings, *self.own)

    def describe(self) -> str:
        """Each phase's heading and few lines, then the warnings."""
        return "\n".join(_described_program(self))


AnyChecked = CheckedGraph | CheckedProgram
"""What `check` makes of either."""


@overload
def check(graph: Graph, columns_of: ColumnReader | None = None) -> CheckedGraph: ...
@overload
def check(graph: Program, columns_of: ColumnReader | None = None) -> CheckedProgram: ...
def check(graph: AnyGraph, columns_of: ColumnReader | None = None) -> AnyChecked:
    """Prove what the design calls a checked graph, or that of each phase of a Program. Reads only
    headers of data files, no weights, no torch.

    columns_of: returns the columns of a source's data, instead of the reader that its operator
    names. Raises GraphError with every fault, ordered by source line; by phase.
    """
    if isinstance(graph, Graph):
        return _check_phases(graph, columns_of)[0]
    phases = _check_phases(graph, columns_of, program_faults(graph))
    between_phases = tuple(program_warnings(graph))
    return CheckedProgram(program=graph, phases=phases, own=between_phases)


def _check_phases(
    graph: AnyGraph, columns_of: ColumnReader | None, known: Iterable[Fault] = ()
) -> tuple[CheckedGraph, ...]:
    """Apply every rule to every phase. Raises GraphError with the known faults and all others."""
    faults = list(known)
    phases: list[CheckedGraph] = []
    for (number, phase), carried in zip(numbered_phases(graph), graph.begins, strict=True):
        context = context_of(with_dialects(phase.graph), columns_of, carried)
        faults += [of_phase(number, phase, fault) for fault in _faults(context)]
        if not faults:
            phases.append(_checked(context))
    if faults:
        raise GraphError(faults)
    return tuple(phases)


def _faults(context: Context) -> list[Fault]:
    faults = [fault for rule in RULES for fault in rule(context)]
    return sorted(dict.fromkeys(faults), key=_line)


F1 = TypeVar("F1", bound=Fault)


def of_phase(number: int, phase: Phase, fault: F1) -> F1:
    """The same, with its phase before its place: two phases may be made by one line. Of a graph
    alone (0) as it is.
    """
    if number == 0:
        return fault
    return replace(fault, where=f"{phase_label(number, phase)}, {fault.where}")


def _described_program(checked: CheckedProgram) -> Iterator[str]:
    program = checked.program
    for number, phase in enumerate(checked.phases, start=1):
        yield program.title(number)
        yield from (f"  {line}" for line in _described(replace(phase, warnings=())))
        yield from (f"  {line}" for line in beginnings(program, number))
    yield from (f"warning: {warning}" for warning in checked.warnings)


def _checked(context: Context) -> CheckedGraph:
    graph = context.graph
    return CheckedGraph(
        graph=graph,
        domains=context.domains,
        regions=context.regions,
        lag=lags(context),
        bound=bounds(context),
        policies=policies(context),
        sizes={s.name: _size(context, s) for s in context.sources},
        columns={(n.name, p.index): _columns(context, p) for n in graph.nodes for p in n.ports},
        dialects={use.where: use.dialect for use in spoken(graph)},
        warnings=tuple(sorted((w for rule in WARNINGS for w in rule(context)), key=_line)),
        notes=tuple(unused_settings.notes(context)),
    )


def _line(fault: Fault) -> tuple[bool, str, int]:
    origin = fault.origin
    return (origin is None, origin.file if origin else "", origin.line if origin else 0)


def _columns(context: Context, port: Port) -> Columns:
    own = {column.name: column.whole.type for column in port.schema.columns.values()}
    data = context.dataset(port)
    if port.node.operator.work == "source":  # a prompt may be text or messages: ask the file
        own |= {
            name: kind
            for name, kind in data.items()
            if name in own and not port.schema.columns[name].axis
        }
    return own | {name: kind for name, kind in data.items() if name not in own}


def _size(context: Context, source: Node) -> SourceSize:
    prompts = source.params.get("batch")
    trains = [n for n in context.fed[id(source)] if n.operator.work == "train"]
    sizes = (
        _train_size(node, domain, prompts, name)
        for node in trains
        for name, port in row_sets(node).items()
        if prompts is not None
        and (domain := context.domains.of(port)) is not None
        and domain.source is source
    )
    return SourceSize(source=source.name, prompts=prompts, trains=tuple(sizes))


def _train_size(node: Node, domain: Domain, prompts: int, row_set: str) -> TrainSize:
    rows, parts = prompts * domain.group_size, node.params["minibatches"]
    return TrainSize(
        train=node.name,
        row_set=row_set,
        group=domain.group_size,
        rows=rows,
        updates=node.params["epochs"] * parts,
        rows_an_update=rows // parts,
        full=_full(domain),
    )


def _full(domain: Domain) -> bool:
    return all(d.node.params.get("refill") and d.keeps != "rows" for d in domain.selections())


def _described(checked: CheckedGraph) -> Iterator[str]:
    graph = checked.graph
    yield f"{graph.name}: {counted(len(graph.nodes), 'node')}, every rule holds"
    for name, size in checked.sizes.items():
        yield f"  {name}: {size.describe()}"
    for name, policy in checked.policies.items():
        yield f"  {name}: {policy}"
    yield from _streaming_ends(checked)
    for use in spoken(graph):
        yield f"  {use.where}: as {use.dialect} does it"
        yield from (f"    {text}" for text in use.unanswered())
    for note in checked.notes:
        yield f"  {note}"
    for warning in checked.warnings:
        yield f"  warning: {warning}"


def _streaming_ends(checked: CheckedGraph) -> Iterator[str]:
    """The nodes that are below the cut for a reason of their own, with that reason."""
    for node in checked.graph.nodes:
        why = checked.regions.why.get(node.name, "")
        if node.operator.work != "train" and ("batch scope" in why or "at lag 0" in why):
            yield f"  {node.name}: after the cut, {why}"
