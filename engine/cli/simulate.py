"""`dataflow simulate TARGET`: a plan's Steps in simulated time; of several plans, a table.

Owns: the flags, what is printed and written. Does not own: planning and simulating
(engine/predict/simulations.py), what is said of it (engine/simulation).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dataflow.graph import Graph
from dataflow.storage import writing
from dataflow.width import screen_width
from engine.cli.flag_values import Spreads
from engine.cli.flags import graph_and, without_own_flags
from engine.cli.screen import say
from engine.cli.target import UsageError, is_received, load_target
from engine.plan.options import RunOptions

if TYPE_CHECKING:
    from engine.predict.simulations import SimulatedRows, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(RunOptions):
    """Options of run, which a plan may depend on, and what is simulated."""

    steps: int | None = 5
    """Steps that are simulated."""
    devices: int | None = None
    """As many devices as that, of the cluster file's kinds, and Workers in proportion."""
    lengths: str = ""
    """Tokens of answers: 512, lognormal:3000,0.9,20000, a run folder or a trace; else the most."""
    prompts: str = ""
    """Tokens of prompts: 200 or lognormal:200,0.5,1000; else as --lengths or the data says."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds a row of rewards and functions of your own (score=0.002)."""
    cpu: Mapping[str, float] = field(default_factory=dict)
    """The share of these in which one computes and does not wait (judge=0.01); else as measured."""
    kept: Mapping[str, float] = field(default_factory=dict)
    """The share of rows that a selection keeps (mixed=0.6); else as a run of --lengths, or all."""
    what_if: Spreads = ()
    """Compare plans: rollout=1..8 (Workers), devices=8..64, threads=2,4, rollout.max_lag=0,1."""
    json: Path | None = None
    """A file for all figures."""
    timeline: Path | None = None
    """A file with who did what when, which Perfetto opens."""
    picture: Path | None = None
    """With --what-if: an SVG file of the comparison."""


def main(arguments: Sequence[str]) -> int:
    """Plan, simulate, print; 1 where no plan that was asked for fits."""
    graph, options = graph_and(SimulateOptions, "simulate", arguments)
    _refuse_absurd(options)
    # Here: it imports what runs kernels.
    from engine.predict.simulations import Variant, require_graph

    base = Variant(
        graph=require_graph(graph),
        options=without_own_flags(options),
        devices=options.devices,
    )
    node_names = {node.name for node in base.graph.nodes}
    rows = _simulated_rows(options, node_names)
    if not options.what_if:
        return _simulate_one(base, rows, options)
    return _compare_several(base, rows, options, arguments)


def _simulate_one(base: Variant, rows: SimulatedRows, options: SimulateOptions) -> int:
    from engine.predict.simulations import simulate
    from engine.simulation.report import WIDTH, report
    from engine.simulation.summary import as_data, summary_of, write_json
    from engine.simulation.timeline import write_timeline

    prediction = simulate(base.graph, base.options, rows, devices=base.devices)
    figures = summary_of(prediction)
    origins = _origins(rows, options)
    if options.json is not None:
        write_json(options.json, as_data(figures, origins))
    if options.timeline is not None:
        write_timeline(options.timeline, prediction)
    say(report(figures, seconds_origins=origins, width=screen_width(WIDTH)), end="")
    return 0


def _compare_several(
    base: Variant, rows: SimulatedRows, options: SimulateOptions, arguments: Sequence[str]
) -> int:
    from engine.predict.simulations import what_if
    from engine.simulation.plan_comparison import (
        WIDTH,
        draw_comparison,
        export_comparison,
        format_plan_table,
    )
    from engine.simulation.summary import write_json

    def tell(text: str) -> None:
        if options.progress:
            say(f"simulating {text}")

    plans = what_if(
        base,
        options.what_if,
        rows,
        make=_graph_maker(arguments),
        parameters=_function_parameters(arguments[0]),
        tell=tell,
    )
    fits = any(plan.summary for plan in plans)
    if options.json is not None:
        write_json(options.json, export_comparison(plans, _origins(rows, options)))
    if options.picture is not None and fits:
        with writing("the picture", options.picture):
            options.picture.write_text(draw_comparison(plans), encoding="utf-8")
    say(format_plan_table(plans, width=screen_width(WIDTH)), end="")
    return 0 if fits else 1


def _function_parameters(target: str) -> list[str]:
    """List those of the graph's function; a run folder has none."""
    if is_received(target):
        return []
    return list(inspect.signature(load_target(target).function).parameters)


def _graph_maker(arguments: Sequence[str]) -> Callable[[Mapping[str, str]], Graph]:
    """Return what makes the graph as this command line does, with further flags and settings."""

    def make(texts: Mapping[str, str]) -> Graph:
        from engine.predict.simulations import require_graph

        words = list(arguments)
        settings: list[str] = []
        for key, text in texts.items():
            if "." in key:
                settings.append(f"{key}={text}")
            else:
                words += [f"--{key}", text]
        if settings:
            words += ["--set", *settings]
        graph, _ = graph_and(SimulateOptions, "simulate", words)
        return require_graph(graph)

    return make


def _refuse_absurd(options: SimulateOptions) -> None:
    """Raise UsageError for an option that makes no sense, before anything is planned."""
    steps = options.steps
    if steps is None or steps < 1:
        raise _absurd("--steps", "1 Step or more", steps, "--steps 5")
    for name, seconds in options.seconds.items():
        if not 0 <= seconds < math.inf:
            fix = f"--seconds {name}=0.002"
            raise _absurd("--seconds", "some seconds a row", f"{name}={seconds}", fix)
    for name, share in options.cpu.items():
        if not 0 <= share <= 1:
            fix = f"--cpu {name}=0.01"
            raise _absurd("--cpu", "a share from 0 to 1", f"{name}={share}", fix)
    if options.what_if and options.timeline is not None:
        raise _absurd("--timeline", "one plan", "--what-if", "leave --timeline out")
    if not options.what_if and options.picture is not None:
        raise _absurd("--picture", "--what-if", "one plan", "leave --picture out")
    for flag in ("json", "timeline", "picture"):
        path: Path | None = getattr(options, flag)
        if path is not None and path.is_dir():
            problem = f"--{flag}: expected the name of a file, found {path}"
            raise UsageError("dataflow simulate", problem, f"--{flag} simulated.{flag}")


def _absurd(flag: str, expected: str, argument: object, fix: str) -> UsageError:
    problem = f"{flag}: expected {expected}, found {argument}"
    return UsageError("dataflow simulate", problem, fix)


def _simulated_rows(options: SimulateOptions, nodes: Collection[str]) -> SimulatedRows:
    """Say what is simulated, whatever the plan. nodes: of the graph; those of the run whose lengths
    are taken may be others.
    """
    from engine.predict.row_statistics import seen_rows
    from engine.predict.simulations import SimulatedRows

    measured = seen_rows(options.lengths, options.prompts)
    measured_seconds = {name: s for name, s in measured.seconds.items() if name in nodes}
    measured_cpu = {name: share for name, share in measured.cpu.items() if name in nodes}
    return SimulatedRows(
        lengths=measured,
        steps=options.steps or 0,
        seconds=measured_seconds | dict(options.seconds),
        cpu=measured_cpu | dict(options.cpu),
        kept=options.kept,
    )


def _origins(rows: SimulatedRows, options: SimulateOptions) -> dict[str, str]:
    """Say where each node's seconds come from, of the nodes that no plan has seconds of."""
    origins = dict.fromkeys(rows.seconds, "measured")
    for name in options.seconds:
        origins[name] = "given"
    return origins
