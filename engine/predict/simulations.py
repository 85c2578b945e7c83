"""Simulate a graph's plan, or compare several, as Python calls and for the command line.

Owns: the calls, what `--what-if` may change, and which plans that makes. Does not own: planning
(engine/session/planning.py), what happens in simulated time
(engine/predict/simulation/prediction_run.py), tables and pictures of it.

    found = simulate(my_graph("path/to/model", "prompts.parquet"), steps=5, seconds={"score": 2e-3})
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from dataflow.check import check
from dataflow.errors import GraphError, PlanError, nearest_or_all
from dataflow.graph import Graph
from dataflow.program import AnyGraph, Program
from dataflow.set_expressions import edited
from engine.plan import options as run_options
from engine.plan.cluster import Cluster
from engine.plan.cluster_file import read_cluster
from engine.plan.cost.profile import read_profile
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.predict.cluster_scaling import scaled
from engine.predict.option_scaling import countable, with_devices, with_workers
from engine.predict.row_statistics import SeenRows
from engine.predict.simulation.plan_comparison import ComparedPlan
from engine.predict.simulation.prediction import Prediction
from engine.predict.simulation.prediction_run import predict
from engine.predict.simulation.selections import require_shares, selections, told
from engine.predict.simulation.summary import summary_of
from engine.session.planning import plan as make_plan

MOST = 64
"""Plans that are compared at once."""
STEPS = 5
DEVICES = "devices"
"""The key of `--what-if` that is no name of the graph or of an option."""

_GROUPS = ("together", "turns")
CHANGEABLE = tuple(name for name in run_options.PLANNED if name not in _GROUPS)
"""Options that one value of a text gives."""

Make = Callable[[Mapping[str, str]], Graph]
"""The graph with parameters of its function, or of its nodes, as these texts say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRows:
    """What is simulated, whatever the plan. lengths: of answers, and of prompts. seconds: a row of
    nodes that are users' functions; cpu: the share of these in which they compute. kept: the share
    of rows that a selection keeps, before what a run did (lengths). profile: a file of `dataflow
    profile`.
    """

    lengths: SeenRows = field(default_factory=SeenRows)
    steps: int = STEPS
    seconds: Mapping[str, float] = field(default_factory=dict)
    cpu: Mapping[str, float] = field(default_factory=dict)
    kept: Mapping[str, float] = field(default_factory=dict)
    profile: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What a plan is made of. devices: of the cluster file, scaled; None as they are there."""

    graph: Graph
    options: RunOptions
    devices: int | None = None


def simulate(
    graph: AnyGraph,
    options: RunOptions | None = None,
    rows: SimulatedRows | None = None,
    *,
    devices: int | None = None,
    spans: bool = True,
) -> Prediction:
    """Plan a graph and simulate its Steps. devices: as many as that, of the cluster file's kinds,
    and Workers in proportion. spans: keep who did what when. Raises GraphError, PlanError.
    """
    variant = Variant(graph=one_graph(graph), options=options or RunOptions(), devices=devices)
    rows = rows or SimulatedRows()
    _refuse_unknown(variant.graph, rows)
    return _simulated(planned(variant, rows), rows, variant.options, spans=spans)


def _refuse_unknown(graph: Graph, rows: SimulatedRows) -> None:
    """Raises PlanError for seconds of a node that the graph does not have, and for a share of what
    is no selection of it.
    """
    require_shares(graph, rows.kept)
    _refuse_unknown_nodes(graph, "seconds", rows.seconds)
    _refuse_unknown_nodes(graph, "cpu", rows.cpu)


def _refuse_unknown_nodes(graph: Graph, what: str, values: Mapping[str, float]) -> None:
    names = [node.name for node in graph.nodes]
    for node in values:
        if node not in names:
            problem = f"expected a node of the graph, found {node!r}"
            raise PlanError(f"{what}: {problem}. Fix: {nearest_or_all(node, names)}.")


def one_graph(graph: AnyGraph) -> Graph:
    """Raises PlanError for a Program."""
    if isinstance(graph, Program):
        problem = f"expected a graph, found a Program of {len(graph.phases)} phases"
        raise PlanError(f"simulate: {problem}. Fix: simulate the graph of each phase.")
    return graph


def planned(variant: Variant, rows: SimulatedRows) -> Plan:
    """The plan of one variant. Raises GraphError, PlanError."""
    if variant.devices is None:
        return make_plan(variant.graph, variant.options, profile=rows.profile, simulated=True)
    before = cluster_of(variant.options)
    after = scaled(before, variant.devices)
    options = with_devices(variant.graph, variant.options, before, after)
    return make_plan(variant.graph, options, profile=rows.profile, cluster=after, simulated=True)


def cluster_of(options: RunOptions) -> Cluster:
    """That of a cluster file. Raises PlanError without one."""
    if options.cluster in (None, run_options.HERE) or run_options.is_on_ray(options):
        problem = f"expected a cluster file, found {options.cluster or 'this machine'}"
        raise PlanError(f"devices: {problem}. Fix: --cluster hosts.toml.")
    return read_cluster(Path(options.cluster))


def _simulated(plan: Plan, rows: SimulatedRows, options: RunOptions, *, spans: bool) -> Prediction:
    assert plan.program is not None
    profile = None if rows.profile is None else read_profile(rows.profile, here=False)
    names = selections(plan.program)  # a run that was measured may have had others
    measured = {name: share for name, share in rows.lengths.kept.items() if name in names}
    kept = measured | dict(rows.kept)
    prediction = predict(
        plan,
        steps=rows.steps,
        lengths=rows.lengths,
        seed=plan.seed,
        profile=profile,
        seconds=rows.seconds,
        cpu=rows.cpu,
        kept=kept,
        spans=spans,
        scaling=options.scaling,
        grace=options.grace,
    )
    return replace(prediction, rows={**prediction.rows, **told(plan.program, kept, rows.kept)})


# --- what if --------------------------------------------------------------------------------------


def what_if(
    base: Variant,
    asked: Sequence[str],
    rows: SimulatedRows | None = None,
    *,
    make: Make | None = None,
    parameters: Sequence[str] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> list[ComparedPlan]:
    """Simulate the plans of all combinations of values, each with the same rows. asked: texts
    `KEY=2..16` or `KEY=a,b,c`; what a KEY may be: see docs/cost.md. make, parameters: how to make
    the graph with other values of these, and of parameters of its nodes. tell: of each plan before
    it is simulated. Raises GraphError for a graph that is wrong as it is, PlanError for a KEY or
    value that means nothing, and where no plan could be simulated, though some fit.
    """
    values = _values(asked)
    rows = rows or SimulatedRows()
    _refuse_unknown(base.graph, rows)
    if DEVICES in values:
        cluster_of(base.options)
    check(base.graph)
    make = make or (lambda texts: edited(base.graph, [f"{k}={v}" for k, v in texts.items()]))
    chosen = [dict(zip(values, each, strict=True)) for each in product(*values.values())]
    variants = [changed(base, texts, make, parameters) for texts in chosen]
    found: list[ComparedPlan] = []
    failed: list[PlanError] = []
    for texts, variant in zip(chosen, variants, strict=True):
        tell(", ".join(f"{key}={value}" for key, value in texts.items()))
        try:
            plan = planned(variant, rows)
        except (PlanError, GraphError) as error:
            found.append(ComparedPlan(values=texts, why=_first_line(error)))
            continue
        try:
            figures = summary_of(_simulated(plan, rows, variant.options, spans=True))
            found.append(ComparedPlan(values=texts, found=figures))
        except PlanError as error:
            failed.append(error)
            found.append(ComparedPlan(values=texts, why=_first_line(error)))
    if failed and not any(plan.found for plan in found):
        raise failed[0]
    return found


def _first_line(error: Exception) -> str:
    """The first cause; further ones are those of `dataflow explain`."""
    return str(error).splitlines()[0]


def _values(asked: Sequence[str]) -> dict[str, list[str]]:
    """By KEY, in the order in which they were asked for."""
    found: dict[str, list[str]] = {}
    for text in asked:
        key, equals, values = text.partition("=")
        key = key.strip().removeprefix("--")
        if not (key and equals and values.strip()):
            problem = f"expected KEY=2..16 or KEY=a,b,c, found {text!r}"
            raise PlanError(f"what-if: {problem}. Fix: rollout=1..8.")
        if key in found:
            raise PlanError(f"what-if: {key} is given twice. Fix: {key}=1,2,4.")
        found[key] = list(dict.fromkeys(spread(values, key)))
    count = prod(map(len, found.values()))
    if count > MOST:
        told = " x ".join(str(len(values)) for values in found.values())
        problem = f"expected at most {MOST} plans, found {told} = {count}"
        raise PlanError(f"what-if: {problem}. Fix: fewer values.")
    return found


_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_COMMA = re.compile(r",(?![^(\[]*[)\]])")
"""One that is in no brackets: `cosine(1e-6, 100)` is one value."""


def spread(text: str, key: str = "KEY") -> Iterator[str]:
    """`2..16` is 2, 4, 8, 16: doubled until the last, which is always there. `a,b` is each."""
    for part in map(str.strip, _COMMA.split(text)):
        found = _RANGE.fullmatch(part)
        if found is None:
            if not part or ".." in part:
                problem = f"expected a value or a range such as 2..16, found {part!r}"
                raise PlanError(f"what-if: {key}: {problem}. Fix: {key}=2..16.")
            yield part
            continue
        first, last = int(found[1]), int(found[2])
        if not 1 <= first <= last:
            problem = f"expected a range from 1 up, found {part}"
            raise PlanError(f"what-if: {key}: {problem}. Fix: {key}=1..{max(1, last)}.")
        while first < last:
            yield str(first)
            first *= 2
        yield str(last)


def changed(
    base: Variant, texts: Mapping[str, str], make: Make, parameters: Sequence[str] = ()
) -> Variant:
    """The base with other values. Raises PlanError, or what `make` raises, for a KEY or a value
    that means nothing.
    """
    counted = countable(base.graph, base.options)
    graph, options, devices = base.graph, base.options, base.devices
    of_graph = {k: v for k, v in texts.items() if _is_of_graph(k, base, parameters)}
    if of_graph:
        graph = make(of_graph)
    for key, value in texts.items():
        if key == DEVICES:
            devices = _whole(key, value)
        elif key in counted:
            options = with_workers(graph, options, key, _whole(key, value))
        elif key not in of_graph:
            options = _with_option(options, key, value)
    return Variant(graph=graph, options=options, devices=devices)


def _is_of_graph(key: str, base: Variant, parameters: Sequence[str]) -> bool:
    """Whether a KEY is a parameter of the graph or of a node. Raises PlanError for one that is
    nothing at all.
    """
    head, dot, node = key.partition(".")
    counted = countable(base.graph, base.options)
    if key == DEVICES or key in counted or key.replace("-", "_") in CHANGEABLE:
        return False
    if key.replace("-", "_") in parameters:
        return True
    nodes = [each.name for each in base.graph.nodes]
    if dot and head in nodes:
        return True
    if dot and head in CHANGEABLE and node in nodes:
        return False
    known = [DEVICES, *counted, *parameters, *CHANGEABLE]
    near = nearest_or_all(key, known) if not dot else nearest_or_all(head, nodes)
    problem = "expected devices, a node, a Worker, a flag or NODE.PARAM"
    raise PlanError(f"what-if: {problem}, found {key!r}. Fix: {near}.")


def _whole(key: str, value: str) -> int:
    if not value.isdecimal():
        problem = f"{key}: expected a whole number, found {value!r}"
        raise PlanError(f"what-if: {problem}. Fix: {key}=1..8.")
    return int(value)


def _with_option(options: RunOptions, key: str, value: str) -> RunOptions:
    """An option of the run, `threads`, or a node's of one that is a table, `tensor.rollout`."""
    name, dot, node = key.partition(".")
    name = name.replace("-", "_")
    hint = get_type_hints(RunOptions)[name]
    table = get_origin(hint) is not None and issubclass(_class(hint), Mapping)
    if table != bool(dot):
        like = f"{name}.NODE" if table else name
        problem = f"{key}: expected {like}"
        raise PlanError(f"what-if: {problem}, found {key}={value}. Fix: {like}={value}.")
    said: Any = {**getattr(options, name), node: value} if table else value
    try:
        found = msgspec.convert(said, hint, strict=False)
    except msgspec.ValidationError as error:
        expected, fix = _expected(hint)
        problem = f"{key}: expected {expected}, found {value!r}"
        raise PlanError(f"what-if: {problem}. Fix: {key}={fix}.") from error
    return replace(options, **{name: found})


def _expected(hint: Any) -> tuple[str, str]:
    """What an option takes, and values of it."""
    literals = [value for value in get_args(hint) if isinstance(value, str)]
    if literals:
        return f"one of {', '.join(literals)}", ",".join(literals[:2])
    return ("true or false", "true,false") if hint is bool else ("a whole number", "1,2,4")


def _class(hint: Any) -> type:
    found = get_origin(hint)
    return found if isinstance(found, type) else object
