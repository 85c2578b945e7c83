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

from dataflow.dialect import find_dialect_uses, with_dialects
from dataflow.display import Displayed
from dataflow.errors import Fault, GraphError, GraphWarning
from dataflow.graph import Graph, Phase
from dataflow.loss_terms import ROWS, row_sets
from dataflow.model import Model
from dataflow.model_dtype import find_dtype
from dataflow.node import Node, Port
from dataflow.program import AnyGraph, Program, beginnings, numbered_phases, phase_label
from dataflow.regions import Regions
from dataflow.rows import Domain, Domains
from dataflow.rules import RULES, WARNINGS, unused_settings
from dataflow.rules.context import ColumnReader, Context, context_of, describe_count
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
        if self.row_set == ROWS:
            return self.train
        return f"{self.train}, {self.row_set}"


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
        prompts = describe_count(self.prompts, "prompt")
        if not self.trains:
            return f"{prompts} a Step"
        return "; ".join(_describe_train(size, prompts) for size in self.trains)


def _describe_train(size: TrainSize, prompts: str) -> str:
    rows = describe_count(size.rows, "row")
    if size.group > 1:
        rows = f"{prompts} x {size.group} = {describe_count(size.rows, 'completion')}"
    limit = "" if size.full else "at most "
    updates = describe_count(size.updates, "update")
    return f"{limit}{rows} a Step, {updates} of {size.rows_an_update:,} ({size.name})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckedGraph(Displayed):
    """A Graph that passed every rule; the planner accepts nothing else. Made by `check` only.

    lag: for nodes that read a trained Model, how many versions they may lag. bound: for train
    nodes, the greatest lag of any row that they train. policies: for train nodes, whose rows they
    train and how old, in words. sizes: by source. columns: (node, output) -> name -> type of one
    row's value, including dataset columns of ancestors. dialects: by node, or `node.label` for a
    term of a loss, the peer whose conventions it follows; the graph has them written out. dtypes:
    by Model, that it computes in, of those whose base is on this machine. warnings: what looks
    wrong. notes: what is not read.
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
    dtypes: Mapping[str, str]
    warnings: tuple[GraphWarning, ...]
    notes: tuple[str, ...] = ()
    _page = "dataflow.draw.pages:checked_page"

    def __repr__(self) -> str:
        return f"CheckedGraph({self.graph.name!r}, {describe_count(len(self.warnings), 'warning')})"

    @property
    def source(self) -> Graph:
        """What was checked, as a CheckedProgram has it too."""
        return self.graph

    def describe(self) -> str:
        """A few lines for a person: sizes, staleness, where streaming ends, dialects, notes,
        warnings.
        """
        return "\n".join(_graph_lines(self))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckedProgram(Displayed):
    """A Program that passed every rule, each phase alone and all of them together. Made by `check`
    only. own: warnings about how the phases follow each other.
    """

    program: Program
    phases: tuple[CheckedGraph, ...]
    own: tuple[GraphWarning, ...]
    _page = "dataflow.draw.pages:checked_page"

    def __repr__(self) -> str:
        warnings = describe_count(len(self.warnings), "warning")
        return f"CheckedProgram({self.program.name!r}, {warnings})"

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
            warnings += [add_phase_label(number, phase, warning) for warning in checked.warnings]
        return (*warnings, *self.own)

    def describe(self) -> str:
        """Each phase's heading and few lines, then the warnings."""
        return "\n".join(_program_lines(self))


AnyChecked = CheckedGraph | CheckedProgram
"""What `check` returns for a Graph or a Program."""


@overload
def check(graph: Graph, columns_of: ColumnReader | None = None) -> CheckedGraph: ...
@overload
def check(graph: Program, columns_of: ColumnReader | None = None) -> CheckedProgram: ...
def check(graph: AnyGraph, columns_of: ColumnReader | None = None) -> AnyChecked:
    """Apply every rule to a Graph, or to each phase of a Program. Reads only headers of data files,
    no weights, no torch.

    columns_of: returns the columns of a source's data, instead of the reader that its operator
    names. Raises GraphError with every fault, ordered by source line; of a Program, by phase first.
    """
    if isinstance(graph, Graph):
        return _check_phases(graph, columns_of)[0]
    phases = _check_phases(graph, columns_of, program_faults(graph))
    between_phases = tuple(program_warnings(graph))
    return CheckedProgram(program=graph, phases=phases, own=between_phases)


def _check_phases(
    graph: AnyGraph, columns_of: ColumnReader | None, known_faults: Iterable[Fault] = ()
) -> tuple[CheckedGraph, ...]:
    """Apply every rule to every phase. Raises GraphError with the known faults and all others."""
    faults = list(known_faults)
    phases: list[CheckedGraph] = []
    for (number, phase), carried in zip(numbered_phases(graph), graph.begins, strict=True):
        context = context_of(with_dialects(phase.graph), columns_of, carried)
        faults += [add_phase_label(number, phase, fault) for fault in _find_faults(context)]
        # The facts of a graph that broke a rule may not be computable.
        if not faults:
            phases.append(_make_checked(context))
    if faults:
        raise GraphError(faults)
    return tuple(phases)


def _find_faults(context: Context) -> list[Fault]:
    faults: list[Fault] = []
    for rule in RULES:
        faults += rule(context)
    return sorted(dict.fromkeys(faults), key=_source_line)


def _find_warnings(context: Context) -> list[GraphWarning]:
    warnings: list[GraphWarning] = []
    for rule in WARNINGS:
        warnings += rule(context)
    return sorted(warnings, key=_source_line)


F1 = TypeVar("F1", bound=Fault)


def add_phase_label(number: int, phase: Phase, fault: F1) -> F1:
    """Return the fault with its phase before its place: two phases may be made by one line. The
    fault of a graph alone (number 0) stays as it is.
    """
    if number == 0:
        return fault
    return replace(fault, where=f"{phase_label(number, phase)}, {fault.where}")


def _program_lines(checked: CheckedProgram) -> Iterator[str]:
    program = checked.program
    for number, phase in enumerate(checked.phases, start=1):
        yield program.title(number)
        # Warnings of all phases come last.
        yield from (f"  {line}" for line in _graph_lines(replace(phase, warnings=())))
        yield from (f"  {line}" for line in beginnings(program, number))
    yield from (f"warning: {warning}" for warning in checked.warnings)


def _make_checked(context: Context) -> CheckedGraph:
    graph = context.graph
    columns: dict[tuple[str, int], Columns] = {}
    for node in graph.nodes:
        for port in node.ports:
            columns[node.name, port.index] = _find_columns(context, port)
    return CheckedGraph(
        graph=graph,
        domains=context.domains,
        regions=context.regions,
        lag=lags(context),
        bound=bounds(context),
        policies=policies(context),
        sizes={source.name: _size_source(context, source) for source in context.sources},
        columns=columns,
        dialects={use.where: use.dialect for use in find_dialect_uses(graph)},
        dtypes=_find_dtypes(graph),
        warnings=tuple(_find_warnings(context)),
        notes=tuple(unused_settings.notes(context)),
    )


def _find_dtypes(graph: Graph) -> dict[str, str]:
    """The dtype that each Model computes in, of those whose base is on this machine."""
    dtypes: dict[str, str] = {}
    for state in graph.states:
        if not isinstance(state, Model):
            continue
        dtype = find_dtype(state)
        if dtype is not None:
            dtypes[state.name] = dtype
    return dtypes


def _source_line(fault: Fault) -> tuple[bool, str, int]:
    """The key by which faults are sorted; those without a line come last."""
    if fault.origin is None:
        return (True, "", 0)
    return (False, fault.origin.file, fault.origin.line)


def _find_columns(context: Context, port: Port) -> Columns:
    declared = port.schema.columns
    columns = {column.name: column.whole.type for column in declared.values()}
    is_source = port.node.operator.work == "source"
    for name, file_type in context.dataset(port).items():
        if name not in declared:
            columns[name] = file_type
        elif is_source and not declared[name].axis:
            columns[name] = file_type  # a prompt may be text or messages: the file says which
    return columns


def _size_source(context: Context, source: Node) -> SourceSize:
    prompts = source.params.get("batch")
    sizes: list[TrainSize] = []
    if prompts is not None:
        trains = [n for n in context.fed[id(source)] if n.operator.work == "train"]
        for train in trains:
            sizes += _size_row_sets(context, source, train, prompts)
    return SourceSize(source=source.name, prompts=prompts, trains=tuple(sizes))


def _size_row_sets(
    context: Context, source: Node, train: Node, prompts: int
) -> Iterator[TrainSize]:
    """The sizes of those row sets of a train node that come from this source."""
    for row_set, port in row_sets(train).items():
        domain = context.domains.of(port)
        if domain is not None and domain.source is source:
            yield _size_train(train, domain, prompts, row_set)


def _size_train(train: Node, domain: Domain, prompts: int, row_set: str) -> TrainSize:
    rows = prompts * domain.group_size
    minibatches = train.params["minibatches"]
    return TrainSize(
        train=train.name,
        row_set=row_set,
        group=domain.group_size,
        rows=rows,
        updates=train.params["epochs"] * minibatches,
        rows_an_update=rows // minibatches,
        full=_is_full(domain),
    )


def _is_full(domain: Domain) -> bool:
    """Whether no selection leaves a Step with fewer rows. With `refill` another prompt takes the
    place of a removed one; nothing takes that of a single row.
    """
    selections = domain.selections()
    return all(d.node.params.get("refill") and d.keeps != "rows" for d in selections)


def _graph_lines(checked: CheckedGraph) -> Iterator[str]:
    graph = checked.graph
    yield f"{graph.name}: {describe_count(len(graph.nodes), 'node')}, every rule holds"
    for name, size in checked.sizes.items():
        yield f"  {name}: {size.describe()}"
    for name, policy in checked.policies.items():
        yield f"  {name}: {policy}"
    for dtype in sorted(set(checked.dtypes.values())):
        names = [name for name, computed in checked.dtypes.items() if computed == dtype]
        yield f"  {', '.join(names)}: in {dtype}"
    yield from _streaming_end_lines(checked)
    for use in find_dialect_uses(graph):
        yield f"  {use.where}: as {use.dialect} does it"
        yield from (f"    {text}" for text in use.describe_gaps())
    for note in checked.notes:
        yield f"  {note}"
    for warning in checked.warnings:
        yield f"  warning: {warning}"


def _streaming_end_lines(checked: CheckedGraph) -> Iterator[str]:
    """The nodes that are below the cut for a reason of their own, with that reason."""
    for node in checked.graph.nodes:
        reason = checked.regions.why.get(node.name, "")
        if node.operator.work != "train" and ("batch scope" in reason or "at lag 0" in reason):
            yield f"  {node.name}: after the cut, {reason}"
