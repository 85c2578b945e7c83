"""`dataflow profile TARGET`: measure a plan's Models on this machine, and write what was fitted.

Owns: the flags and the table. Does not own: measuring (engine/predict/profile), the file
(engine/plan/cost).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dataflow.safe_text import one_line
from dataflow.storage import writing
from engine.cli.flags import graph_and, without_own_flags
from engine.cli.screen import say
from engine.cli.target import UsageError
from engine.plan.cost.machine_load import QUIET
from engine.plan.options import RunOptions

if TYPE_CHECKING:
    from engine.plan.cost.process_memory import ImportedMemory
    from engine.plan.cost.profile import ProfileCell, ProfiledNode
    from engine.predict.profile.profiler import MadeProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(RunOptions):
    """Options of run, which a plan may depend on, and how much is measured."""

    out: Path = Path("profile.json")
    """The file that is written, for --profile."""
    quick: bool = False
    """Measure fewer sizes, and each less often: in seconds, for a first look."""
    longest: float = 5.0
    """Seconds of one call of a kernel; sizes that should take longer are left out."""
    function_steps: int = 3
    """Steps of a short run, which times functions, and all nodes as a run has them; 0: no run."""
    busy: Literal["refuse", "accept"] = "refuse"
    """Where others use this machine so much that seconds say nothing of it: end with an error, or
    keep them, and say so in the file."""


def main(arguments: Sequence[str]) -> int:
    """Plan, measure, write; prints what was fitted, and how well."""
    graph, options = graph_and(ProfileOptions, "profile", arguments)
    _refuse_absurd(options)
    from engine.plan.cost.profile import write_profile
    from engine.predict.profile.profiler import ProfileRequest, measure_profile
    from engine.session.planning import plan  # here: not every command plans

    # Each kernel is measured alone, whatever layouts there will be.
    plans = plan(graph, replace(options, search="off", profile=None)).phases
    request = ProfileRequest(
        quick=options.quick,
        repeats=3 if options.quick else 5,
        longest=options.longest,
        steps=options.function_steps,
        accept_busy=options.busy == "accept",
    )

    def tell(text: str) -> None:
        if options.progress:
            say(f"measuring {text}")

    measured = measure_profile(graph, plans, without_own_flags(options), request, tell)
    with writing("the profile", options.out):
        write_profile(options.out, measured.profile)
    say("\n".join(describe_profile(measured, options.out)))
    return 0


def _refuse_absurd(options: ProfileOptions) -> None:
    """Raise UsageError for an option that makes no sense, before anything is measured."""
    checks = [
        ("--out", options.out, options.out.is_dir(), "the name of a file", "here.json"),
        ("--longest", options.longest, not 0 < options.longest < inf, "some seconds", "5"),
        ("--function-steps", options.function_steps, options.function_steps < 0, "0 or more", "3"),
    ]
    for flag, argument, is_wrong, expected, fix in checks:
        if is_wrong:
            problem = f"{flag}: expected {expected}, found {argument}"
            raise UsageError("dataflow profile", problem, f"{flag} {fix}")


def describe_profile(measured: MadeProfile, path: Path) -> Iterator[str]:
    """Say what was measured of the machine, then of each kind of pass, then of functions."""
    profile = measured.profile
    operations = sorted(profile.device.operations.items())
    rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s {dtype}" for dtype, rate in operations)
    yield f"profile of {profile.machine.words}"
    yield f"a core or GPU: {rates}; memory {profile.device.memory_rate / 1e9:.1f} GB/s"
    yield f"meanwhile {profile.load.words}"
    if not measured.compared:
        yield "others disturbed the short run: it is not compared with what is predicted of it"
    for entry in profile.nodes:
        if entry.cells:
            yield from _node(entry)
    for skipped in measured.skipped:
        yield f"{one_line(skipped.node)}: not measured: {one_line(skipped.why)}"
    for name, seconds in profile.functions.items():
        line = f"{one_line(name)}: {1e6 * seconds:.1f} us a row"
        share = 100 * profile.cpu.get(name, 1.0)
        if share < 99.5:  # else it would read "100 %"
            line += f", of which it computes {share:.0f} %"
        yield line
    plain = _mebibytes(profile.process.plain)
    torch = _mebibytes(profile.process.torch)
    yield f"a Worker's process without a node: {plain}, with torch kernels {torch}"
    yield f"a message, until what follows begins: {1e3 * profile.message:.1f} ms"
    yield f"written to {path}: --profile {path}"


def _mebibytes(memory: ImportedMemory) -> str:
    size = memory.anonymous + memory.files
    return f"{size / 2**20:.0f} MiB"


def _node(entry: ProfiledNode) -> Iterator[str]:
    threads = f"{entry.cores} thread{'s' * (entry.cores != 1)}"
    line = f"{one_line(entry.node)} ({entry.kind}, {threads}): "
    line += f"the fit is off by {100 * entry.worst:.0f} % at most"
    if entry.beside > 1.0:
        line += f"; beside busy cores {entry.beside:.2f} times as long"
    if entry.in_run != 1.0:
        line += f"; in a run {entry.in_run:.2f} times as long"
    yield line
    for cell in entry.cells:
        yield f"  {_cell(cell)}"


def _cell(cell: ProfileCell) -> str:
    size = f"{cell.rows:>4} rows of {cell.prompt} + {cell.answer} tokens"
    if cell.seconds is None:
        return f"{size}: out of memory"
    figures = f"{1e3 * cell.seconds:.1f} ms"
    if cell.fitted is not None:
        figures += f", fitted {1e3 * cell.fitted:.1f}"
    figures += f"; peak {cell.peak / 2**20:.0f} MiB"
    if cell.others > QUIET:
        figures += f"; others had {100 * cell.others:.0f} % of its cores"
        if cell.by_cpu:
            figures += ", so CPU seconds count"
    return f"{size}: {figures}"
