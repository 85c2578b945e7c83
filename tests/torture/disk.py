"""Full and failing disks: every system call of every writer of a run, file limits, a small tmpfs.

    a fault at call k   exit 3 (or 0, where nothing depends on the file, and that was said), one
                        last line: what could not be written, where, what is safe; no traceback
    SIGKILL at call k   nothing of that
    then                `dataflow resume` ends the run with metrics, samples and weights of an
                        undisturbed one, to the bit; nothing half-written is left

faults.py injects the faults; victim.py is the run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.runs import column, require_same_runs, steps_stored
from tests.kit.tiny_runs import save_tiny_inputs
from tests.torture.faults import KINDS
from tests.torture.faulty_command import CommandEnd, called
from tests.torture.outcome import CaseResult, timed

STEPS = 4
SAFE = re.compile(r"Safe: the checkpoint of step (\d+), from which `dataflow resume .*` goes on\.$")


def torture(short: bool, seed: int) -> list[CaseResult]:
    """All cases, two at a time."""
    draw = random.Random(seed)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dataflow-torture-")))
        save_tiny_inputs(folder)
        bench = Bench(folder)
        cases = [*_at_calls(bench, draw, short), *_limited(bench, draw, short)]
        cases += _on_small_disks(bench, draw, short, stack)
        return bench.all(cases)


@dataclass(frozen=True, kw_only=True)
class DiskCase:
    """One run with a fault. expected: the folder of an undisturbed one. limit: see `called`."""

    name: str
    runs: Path
    options: tuple[str, ...]
    target: str = "evaluated"
    faults: dict[str, Any] | None = None
    limit: int = 0
    expected: Path | None = None
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None

    @property
    def run(self) -> Path:
        return self.runs / "v"

    def log(self) -> str:
        """Of the process of the run."""
        logs = self.run / "logs"
        main = logs / "main.log"
        return (main if main.exists() else logs / "coordinator.log").read_text()


class Bench:
    """Runs cases, two at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = itertools.count()
        self._known: dict[tuple[str, ...], tuple[Path, CommandEnd]] = {}

    def place(self) -> Path:
        """A new folder for runs."""
        return self.folder / f"runs-{next(self._count)}"

    def command(self, case: DiskCase, *more: str) -> list[str]:
        """Arguments of its `dataflow run`."""
        target = f"run tests.torture.victim:{case.target}"
        where = f"--folder {self.folder} --name v --runs {case.runs}"
        how = f"--steps {STEPS} --checkpoint-every 2 --threads 1 --no-progress"
        return [*f"{target} {where} {how}".split(), *case.options, *more]

    def undisturbed(self, target: str, options: Sequence[str]) -> tuple[Path, CommandEnd]:
        """The folder of such a run, and its calls; made once."""
        if (known := self._known.get((target, *options))) is not None:
            return known
        case = DiskCase(name="", runs=self.place(), options=tuple(options), target=target)
        output = self.place().with_suffix(".out")
        end = called(self.command(case), output, {"folder": str(case.run)})
        assert end.code == 0, end.text
        self._known[target, *options] = case.run, end
        return case.run, end

    def all(self, cases: Sequence[DiskCase]) -> list[CaseResult]:
        """Their results."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda c: timed("disk", c.name, lambda: self._one(c)), cases))

    def _one(self, case: DiskCase) -> tuple[str, str]:
        """What did not hold (empty where all did), and the last line."""
        output = self.place().with_suffix(".out")  # not on a disk that is full
        try:
            case.before()
            end = called(self.command(case), output, case.faults, case.limit)
            case.after()
            if fault := _of_ending(case, end):
                return f"{fault}\n{end.text[-3000:]}", end.last
            return self._of_going_on(case, end, output) or _of_run(case), end.last
        finally:
            shutil.rmtree(case.runs, ignore_errors=True)

    def _of_going_on(self, case: DiskCase, end: CommandEnd, output: Path) -> str:
        """What is wrong with going on from where it ended."""
        if end.code == 0:
            return ""
        again = called(["resume", str(case.run), "--no-progress"], output)
        if again.code != 0 and not steps_stored(case.run):  # it had not begun
            again = called(self.command(case, "--overwrite"), output)
        if again.code != 0:
            return f"going on: exit {again.code}\n{again.text[-3000:]}"
        safe = SAFE.search(end.last)
        # Where the end of the run alone could not be written, that Step was the last.
        done = safe and f"nothing to do, as all {safe[1]} steps are done" in again.text
        if safe and not done and f"begins after step {safe[1]}" not in case.log():
            return f"it did not go on from step {safe[1]}, which was said to be safe"
        return ""


def _of_run(case: DiskCase) -> str:
    """What is wrong with what the run left once it was complete."""
    left = [str(p.relative_to(case.run)) for p in case.run.rglob("*") if _is_leftover(p.name)]
    if left:
        return f"left: {left}"
    steps = column(case.run, "step")
    if steps != list(range(1, STEPS + 1)):
        return f"Steps {steps}"
    try:
        if case.expected is not None:
            require_same_runs(case.run, case.expected)
    except AssertionError as error:
        return f"it is not an undisturbed run: {error}"
    return ""


def _is_leftover(name: str) -> bool:
    return name.startswith((".tmp", ".replaced")) or name.endswith(".tmp")


def _of_ending(case: DiskCase, end: CommandEnd) -> str:
    """What is wrong with how it ended."""
    if "Traceback" in end.text:
        return "a traceback"
    if end.left:
        return f"{end.left} processes left"
    kind = case.faults["kind"] if case.faults else "full"
    if kind in ("kill", "torn"):
        return "" if end.code == -signal.SIGKILL else f"exit {end.code}, not a kill"
    if end.code == 3:
        told = "could not be written" in end.last or "expected room" in end.last
        right = told and "Safe: " in end.last
        return "" if right else "the last line does not say what could not be written"
    return "" if end.code == 0 and _may_succeed(case, end) else f"exit {end.code}"


def _may_succeed(case: DiskCase, end: CommandEnd) -> bool:
    """There was room enough, it could be done another way, or it did not matter, which was said; or
    the run made fewer calls than the undisturbed one, as some are made by the clock.
    """
    if not case.faults or case.name.split()[1] in ("delete", "mkdir", "truncate"):
        return True
    was_over = len(json.loads(end.calls.read_text())) < case.faults["at"]
    return was_over or "The run goes on without" in end.text


_INPROC = ("--inproc", "--workers", "one")


def _at_calls(bench: Bench, draw: random.Random, short: bool) -> Iterator[DiskCase]:
    """Each fault at one occurrence of each kind of call on each kind of file; fewer when short."""
    expected, end = bench.undisturbed("evaluated", _INPROC)
    places: dict[tuple[str, str], list[int]] = {}
    for number, (call, path) in enumerate(json.loads(end.calls.read_text()), 1):
        places.setdefault((call, re.sub(r"\d+", "N", path)), []).append(number)
    wanted = [(*place, kind) for place in places for kind in KINDS]
    wanted = [each for each in wanted if each[2] != "torn" or each[0] == "write"]
    if short:
        wanted = draw.sample(wanted, 10)
    for call, path, kind in wanted:
        at, runs = draw.choice(places[call, path]), bench.place()
        name, faults = f"{kind} {call} {path} (call {at})", {"at": at, "kind": kind}
        faults["folder"] = str(runs / "v")
        yield DiskCase(name=name, runs=runs, options=_INPROC, faults=faults, expected=expected)


def _limited(bench: Bench, draw: random.Random, short: bool) -> Iterator[DiskCase]:
    expected, _ = bench.undisturbed("evaluated", _INPROC)
    for _ in range(1 if short else 10):
        limit = int(2 ** draw.uniform(6, 18))
        name, usual = f"ulimit of {limit} bytes", {"options": _INPROC, "expected": expected}
        yield DiskCase(name=name, runs=bench.place(), limit=limit, **usual)


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A tmpfs of its own, filled up to some room."""

    where: Path
    free: int

    def fill(self) -> None:
        """Leave that much room."""
        room = shutil.disk_usage(self.where).free
        with open(self.where / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, room - self.free))

    def empty(self) -> None:
        """Make room again."""
        (self.where / "ballast").unlink()


_DISK = 64 << 20
_LAYOUTS: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "apart": ("small", ("--workers", "apart"), True),
    "ranks": ("small", ("--workers", "apart", "--ranks", "train_policy=2"), False),
    "lag": ("lagging", ("--workers", "apart"), False),
}
"""Graph, options, and whether the numbers are those of one process, to the bit."""


def why_no_mount() -> str:
    """Why no tmpfs can be mounted here; empty where it can."""
    if shutil.which("mount") is None or os.geteuid() != 0:
        return "mounting needs root"
    with tempfile.TemporaryDirectory() as where:
        command = ["mount", "-t", "tmpfs", "tmpfs", where]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            subprocess.run(["umount", where], check=True)
        return done.stderr.strip()


def mounted(where: Path, size: int, stack: contextlib.ExitStack) -> Path:
    """A tmpfs there until the stack ends."""
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)], check=True)
    stack.callback(lambda: subprocess.run(["umount", "-l", str(where)], check=True))
    return where


def _on_small_disks(
    bench: Bench, draw: random.Random, short: bool, stack: contextlib.ExitStack
) -> list[DiskCase]:
    if reason := why_no_mount():
        print(f"disk: no small tmpfs: {reason}")
        return []
    expected, _ = bench.undisturbed("small", ("--workers", "one"))
    cases = []
    for name in [draw.choice(list(_LAYOUTS))] if short else _LAYOUTS:
        target, options, exact = _LAYOUTS[name]
        for number in range(1 if short else 6):
            where = mounted(bench.folder / f"disk-{name}-{number}", _DISK, stack)
            disk = Disk(where=where, free=int(2 ** draw.uniform(12, 18.5)))
            entry = DiskCase(
                name=f"{name} with {disk.free >> 10} KiB left",
                runs=where / "runs",
                options=options,
                target=target,
                expected=expected if exact else None,
                before=disk.fill,
                after=disk.empty,
            )
            cases.append(entry)
    return cases
