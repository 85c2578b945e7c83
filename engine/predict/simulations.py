"""Simulate a graph's plan, or compare several, as Python calls and for the command line.

Owns: the calls, what `--what-if` may change, and which plans that makes. Does not own: planning
(engine/session/planning.py), what happens in simulated time
(engine/simulation/prediction_run.py), tables and pictures of it.

    rows = SimulatedRows(steps=5, seconds={"score": 2e-3})
    prediction = simulate(my_graph("path/to/model", "prompts.parquet"), rows=rows)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path

from dataflow.check import check
from dataflow.errors import GraphError, PlanError, nearest_or_all
from dataflow.graph import Graph
from dataflow.program import AnyGraph, Program
from dataflow.set_expressions import edited
from engine.plan import options as run_options
from engine.plan.cluster import Cluster
from engine.plan.cluster_file import read_cluster
from engine.plan.cost.profile import read_profile
from engine.plan.option_texts import CHANGEABLE, set_option
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.predict.cluster_scaling import scale_cluster
from engine.predict.option_scaling import list_scalable, scale_devices, scale_workers
from engine.predict.row_statistics import SeenRows
from engine.session.planning import plan as make_plan
from engine.simulation.plan_comparison import ComparedPlan
from engine.simulation.prediction import Prediction
from engine.simulation.prediction_run import predict
from engine.simulation.selections import (
    describe_selections,
    list_selections,
    require_shares,
)
from engine.simulation.summary import summary_of

MOST = 64
"""Plans that are compared at once."""
STEPS = 5
DEVICES = "devices"
"""The key of `--what-if` that is no name of the graph or of an option."""

GraphMaker = Callable[[Mapping[str, str]], Graph]
"""The graph with parameters of its function, or of its nodes, as these texts say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRows:
    """What is simulated, whatever the plan. lengths: of answers, and of prompts. seconds: a row of
    nodes that are users' functions; cpu: the share of these in which they compute. kept: the share
    of rows that a selection keeps, before what a run did (lengths).
    """

    lengths: SeenRows = field(default_factory=SeenRows)
    steps: int = STEPS
    seconds: Mapping[str, float] = field(default_factory=dict)
    cpu: Mapping[str, float] = field(default_factory=dict)
    kept: Mapping[str, float] = field(default_factory=dict)


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
    graph = require_graph(graph)
    variant = Variant(graph=graph, options=options or RunOptions(), devices=devices)
    rows = rows or SimulatedRows()
    _refuse_unknown(graph, rows)
    return _simulate(plan_variant(variant), rows, variant.options, spans=spans)


def _refuse_unknown(graph: Graph, rows: SimulatedRows) -> None:
    """Refuse seconds of a node that the graph does not have, and a share of what is no selection of
    it. Raises PlanError.
    """
    require_shares(graph, rows.kept)
    _refuse_unknown_nodes(graph, "seconds", rows.seconds)
    _refuse_unknown_nodes(graph, "cpu", rows.cpu)


def _refuse_unknown_nodes(graph: Graph, what: str, nodes: Iterable[str]) -> None:
    names = [node.name for node in graph.nodes]
    for node in nodes:
        if node not in names:
            problem = f"expected a node of the graph, found {node!r}"
            raise PlanError(f"{what}: {problem}. Fix: {nearest_or_all(node, names)}.")


def require_graph(graph: AnyGraph) -> Graph:
    """Refuse a Program, whose phases have a plan each. Raises PlanError."""
    if isinstance(graph, Program):
        problem = f"expected a graph, found a Program of {len(graph.phases)} phases"
        raise PlanError(f"simulate: {problem}. Fix: simulate the graph of each phase.")
    return graph


def plan_variant(variant: Variant) -> Plan:
    """Plan one variant. Raises GraphError, PlanError."""
    if variant.devices is None:
        return make_plan(variant.graph, variant.options, simulated=True)
    before = _require_cluster(variant.options)
    after = scale_cluster(before, variant.devices)
    options = scale_devices(variant.graph, variant.options, before, after)
    return make_plan(variant.graph, options, cluster=after, simulated=True)


def _require_cluster(options: RunOptions) -> Cluster:
    """Read the cluster file. Raises PlanError without one."""
    if options.cluster in (None, run_options.HERE) or run_options.is_on_ray(options):
        problem = f"expected a cluster file, found {options.cluster or 'this machine'}"
        raise PlanError(f"devices: {problem}. Fix: --cluster hosts.toml.")
    return read_cluster(Path(options.cluster))


def _simulate(plan: Plan, rows: SimulatedRows, options: RunOptions, *, spans: bool) -> Prediction:
    assert plan.program is not None
    # The profile may be of another machine: of the one that the plan is for.
    path = options.profile
    profile = None if path is None else read_profile(path, here=False)
    names = list_selections(plan.program)
    # The run that was measured may have had selections that this graph does not have.
    measured = {name: share for name, share in rows.lengths.kept.items() if name in names}
    shares = measured | dict(rows.kept)
    prediction = predict(
        plan,
        steps=rows.steps,
        lengths=rows.lengths,
        seed=plan.seed,
        profile=profile,
        seconds=rows.seconds,
        cpu=rows.cpu,
        kept=shares,
        spans=spans,
        scaling=options.scaling,
        grace=options.grace,
        measures_loads=options.loads == "measured",
    )
    selections = describe_selections(plan.program, shares, rows.kept)
    return replace(prediction, rows={**prediction.rows, **selections})


# --- what if --------------------------------------------------------------------------------------


def what_if(
    base: Variant,
    spreads: Sequence[str],
    rows: SimulatedRows | None = None,
    *,
    make: GraphMaker | None = None,
    parameters: Sequence[str] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> list[ComparedPlan]:
    """Simulate the plans of all combinations of values, each with the same rows. spreads: texts
    `KEY=2..16` or `KEY=a,b,c`; what a KEY may be: see docs/cost.md. make, parameters: how to make
    the graph with other values of these, and of parameters of its nodes. tell: of each plan before
    it is simulated. Raises GraphError for a graph that is wrong as it is, PlanError for a KEY or
    value that means nothing, and where no plan could be simulated, though some fit.
    """
    values_by_key = _read_spreads(spreads)
    rows = rows or SimulatedRows()
    # What is wrong whatever the values are is an error, and not that of each plan.
    _refuse_unknown(base.graph, rows)
    if DEVICES in values_by_key:
        _require_cluster(base.options)
    check(base.graph)
    make = make or (lambda texts: edited(base.graph, _join(texts)))
    combinations = list(product(*values_by_key.values()))
    choices = [dict(zip(values_by_key, values, strict=True)) for values in combinations]
    # All of them before the first is simulated: a value that means nothing is known at once.
    variants = [change_variant(base, texts, make, parameters) for texts in choices]
    plans: list[ComparedPlan] = []
    failures: list[PlanError] = []
    for texts, variant in zip(choices, variants, strict=True):
        tell(", ".join(_join(texts)))
        try:
            plan = plan_variant(variant)
        except (PlanError, GraphError) as error:
            plans.append(ComparedPlan(values=texts, why=_first_line(error)))
            continue
        try:
            summary = summary_of(_simulate(plan, rows, variant.options, spans=True))
            plans.append(ComparedPlan(values=texts, summary=summary))
        except PlanError as error:
            failures.append(error)
            plans.append(ComparedPlan(values=texts, why=_first_line(error)))
    if failures and not any(plan.summary for plan in plans):
        raise failures[0]
    return plans


def _join(texts: Mapping[str, str]) -> list[str]:
    """`KEY=VALUE` of each."""
    return [f"{key}={text}" for key, text in texts.items()]


def _first_line(error: Exception) -> str:
    """The first cause; further ones are those of `dataflow explain`."""
    return str(error).splitlines()[0]


def _read_spreads(spreads: Sequence[str]) -> dict[str, list[str]]:
    """The values of each KEY, in the order of the texts. Raises PlanError for too many plans."""
    values_by_key: dict[str, list[str]] = {}
    for text in spreads:
        key, equals, values = text.partition("=")
        key = key.strip().removeprefix("--")
        if not (key and equals and values.strip()):
            problem = f"expected KEY=2..16 or KEY=a,b,c, found {text!r}"
            raise PlanError(f"what-if: {problem}. Fix: rollout=1..8.")
        if key in values_by_key:
            raise PlanError(f"what-if: {key} is given twice. Fix: {key}=1,2,4.")
        values_by_key[key] = list(dict.fromkeys(expand_values(values, key)))
    counts = [len(values) for values in values_by_key.values()]
    count = prod(counts)
    if count > MOST:
        factors = " x ".join(map(str, counts))
        problem = f"expected at most {MOST} plans, found {factors} = {count}"
        raise PlanError(f"what-if: {problem}. Fix: fewer values.")
    return values_by_key


_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_COMMA = re.compile(r",(?![^(\[]*[)\]])")
"""One that is in no brackets: `cosine(1e-6, 100)` is one value."""


def expand_values(text: str, key: str = "KEY") -> Iterator[str]:
    """List the values of a text: `2..16` is 2, 4, 8, 16, doubled until the last, which is always
    there; `a,b` is each. Raises PlanError.
    """
    for part in map(str.strip, _COMMA.split(text)):
        bounds = _RANGE.fullmatch(part)
        if bounds is None:
            if not part or ".." in part:
                problem = f"expected a value or a range such as 2..16, found {part!r}"
                raise PlanError(f"what-if: {key}: {problem}. Fix: {key}=2..16.")
            yield part
            continue
        first, last = int(bounds[1]), int(bounds[2])
        if not 1 <= first <= last:
            problem = f"expected a range from 1 up, found {part}"
            raise PlanError(f"what-if: {key}: {problem}. Fix: {key}=1..{max(1, last)}.")
        while first < last:
            yield str(first)
            first *= 2
        yield str(last)


def change_variant(
    base: Variant, texts: Mapping[str, str], make: GraphMaker, parameters: Sequence[str] = ()
) -> Variant:
    """Give the base other values. Raises PlanError, or what `make` raises, for a KEY or a value
    that means nothing.
    """
    scalable = list_scalable(base.graph, base.options)
    graph, options, devices = base.graph, base.options, base.devices
    graph_keys = [key for key in texts if _is_of_graph(key, base, parameters)]
    # The graph first: Workers are those of the new one's nodes.
    if graph_keys:
        graph = make({key: texts[key] for key in graph_keys})
    for key, text in texts.items():
        if key == DEVICES:
            devices = _parse_number(key, text)
        elif key in scalable:
            options = scale_workers(graph, options, key, _parse_number(key, text))
        elif key not in graph_keys:
            options = set_option(options, key, text, where="what-if")
    return Variant(graph=graph, options=options, devices=devices)


def _is_of_graph(key: str, base: Variant, parameters: Sequence[str]) -> bool:
    """Whether a KEY is a parameter of the graph or of a node. Raises PlanError for one that is
    nothing at all.
    """
    head, dot, node = key.partition(".")
    scalable = list_scalable(base.graph, base.options)
    if key == DEVICES or key in scalable or key.replace("-", "_") in CHANGEABLE:
        return False
    if key.replace("-", "_") in parameters:
        return True
    nodes = [graph_node.name for graph_node in base.graph.nodes]
    if dot and head in nodes:
        return True
    if dot and head in CHANGEABLE and node in nodes:
        return False
    if dot:
        fix = nearest_or_all(head, nodes)
    else:
        fix = nearest_or_all(key, [DEVICES, *scalable, *parameters, *CHANGEABLE])
    problem = "expected devices, a node, a Worker, a flag or NODE.PARAM"
    raise PlanError(f"what-if: {problem}, found {key!r}. Fix: {fix}.")


def _parse_number(key: str, text: str) -> int:
    if not text.isdecimal():
        problem = f"{key}: expected a whole number, found {text!r}"
        raise PlanError(f"what-if: {problem}. Fix: {key}=1..8.")
    return int(text)
