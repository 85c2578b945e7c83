"""Full and failing disks: at every system call of every writer of a run, by limits on files, and on
a small tmpfs.

Owns: the cases, and what must hold after each. Does not own: how a fault is injected (faults.py),
nor the run (victim.py).

    a fault at call k      exit 3 (or 0, where nothing depends on the file, and that was said), one last line that says
                           what could not be written, where and what is safe; no traceback
    SIGKILL at call k      nothing of that
    then                   `dataflow resume` ends the run with metrics, samples and weights of an undisturbed one, to
                           the bit; nothing half-written is left
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
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.torture.faults import KINDS
from tests.torture.outcome import Outcome
from tests.torture.zygote import Ended, Zygote

STEPS = 4
SAFE = re.compile(r"Safe: the checkpoint of step (\d+), from which `dataflow resume .*` goes on\.$")
_PLACED = ("time/", "throughput/", "worker/", "edge/", "coordinator/")


def torture(short: bool, seed: int) -> list[Outcome]:
    """All cases, two at a time."""
    draw = random.Random(seed)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dataflow-torture-")))
        _inputs(folder)
        zygotes = [stack.enter_context(Zygote()) for _ in range(2)]
        bench = Bench(folder, zygotes)
        cases = [*_at_calls(bench, draw, short), *_limited(bench, draw, short)]
        cases += _on_small_disks(bench, draw, short, stack)
        return bench.all(cases)


def _inputs(folder: Path) -> None:
    from tests.kit.models import save_tiny

    save_tiny(folder / "model", layers=1)
    asked = [a + b for a in "abcdefgh" for b in "xyz"]
    pq.write_table(
        pa.table({"prompt": asked, "answer": [a[0] for a in asked]}), folder / "train.parquet"
    )
    pq.write_table(
        pa.table({"prompt": ["q", "rr", "sss"], "answer": ["q", "r", "s"]}), folder / "test.parquet"
    )


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a run leaves that must not depend on what happened to it."""

    metrics: list[dict[str, Any]]
    weights: dict[str, bytes]
    samples: dict[str, pa.Table]

    @staticmethod
    def of(run: Path) -> Kept:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        last = max(
            (run / "checkpoints").glob("step_*"), key=lambda p: int(p.name.removeprefix("step_"))
        )
        best = sorted((run / "checkpoints").glob("best_*/step_*/*.safetensors"))
        files = [*sorted(last.rglob("*.safetensors")), *best]
        return Kept(
            metrics=[{k: v for k, v in row.items() if not k.startswith(_PLACED)} for row in rows],
            weights={str(p.relative_to(run)): p.read_bytes() for p in files},
            samples={
                p.name: pq.ParquetFile(p).read()
                for p in sorted((run / "samples").glob("*.parquet"))
            },
        )

    def differs(self, other: Kept) -> str:
        """What differs first; empty where nothing does."""
        if len(self.metrics) != len(other.metrics):
            return f"{len(self.metrics)} Steps, not {len(other.metrics)}"
        for mine, theirs in zip(self.metrics, other.metrics, strict=True):
            if mine != theirs:
                return f"the metrics of step {theirs['step']} differ"
        if self.weights.keys() != other.weights.keys():
            return f"the weights are {sorted(self.weights)}, not {sorted(other.weights)}"
        wrong = [name for name in self.weights if self.weights[name] != other.weights[name]]
        wrong += [name for name in other.samples if self.samples.get(name) != other.samples[name]]
        return f"{wrong[0]} differs" if wrong else ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run with a fault. expected: of an undisturbed one; None: only its Steps count. limit: see
    Zygote.run.
    """

    name: str
    runs: Path
    options: tuple[str, ...]
    target: str = "evaluated"
    faults: dict[str, Any] | None = None
    limit: int = 0
    expected: Kept | None = None
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None

    @property
    def run(self) -> Path:
        return self.runs / "v"


class Bench:
    """Runs cases in zygotes, one in each at a time."""

    def __init__(self, folder: Path, zygotes: Sequence[Zygote]) -> None:
        self.folder = folder
        self._free = list(zygotes)
        self._count = itertools.count()
        self._known: dict[tuple[str, ...], tuple[Kept, Ended]] = {}

    def place(self) -> Path:
        """A new folder for runs."""
        return self.folder / f"runs-{next(self._count)}"

    def command(self, case: Case, *more: str) -> list[str]:
        """Arguments of its `dataflow run`."""
        target = f"tests.torture.victim:{case.target}"
        where = ["--folder", str(self.folder), "--name", "v", "--runs", str(case.runs)]
        how = ["--steps", str(STEPS), "--checkpoint-every", "2", "--threads", "1", "--no-progress"]
        return ["run", target, *where, *how, *case.options, *more]

    def undisturbed(self, target: str, options: Sequence[str]) -> tuple[Kept, Ended]:
        """What such a run leaves, and its calls; made once."""
        if (known := self._known.get((target, *options))) is not None:
            return known
        case = Case(name="", runs=self.place(), options=tuple(options), target=target)
        output = self.place().with_suffix(".out")
        ended = self._free[0].run(self.command(case), output, {"folder": str(case.run)})
        assert ended.code == 0, ended.text
        self._known[target, *options] = Kept.of(case.run), ended
        return self._known[target, *options]

    def all(self, cases: Sequence[Case]) -> list[Outcome]:
        """As many at a time as there are zygotes."""
        with ThreadPoolExecutor(len(self._free)) as pool:
            return list(pool.map(self._one, cases))

    def _one(self, case: Case) -> Outcome:
        zygote = self._free.pop()
        start = time.monotonic()
        said = [""]
        try:
            fault = self._fault(case, zygote, said)
        finally:
            self._free.append(zygote)
        shutil.rmtree(case.runs, ignore_errors=True)
        seconds = time.monotonic() - start
        return Outcome(part="disk", case=case.name, fault=fault, said=said[0], seconds=seconds)

    def _fault(self, case: Case, zygote: Zygote, said: list[str]) -> str:
        """What did not hold; empty where all did."""
        output = self.place().with_suffix(".out")  # not on a disk that is full
        case.before()
        try:
            ended = zygote.run(self.command(case), output, case.faults, case.limit)
        finally:
            case.after()
        said[0] = ended.last
        fault = _of_ending(case, ended)
        if fault:
            return f"{fault}\n{ended.text[-3000:]}"
        return self._of_going_on(case, ended, zygote, output)

    def _of_going_on(self, case: Case, ended: Ended, zygote: Zygote, output: Path) -> str:
        if ended.code != 0:
            again = zygote.run(["resume", str(case.run), "--no-progress"], output)
            if again.code != 0 and not list(
                case.run.glob("checkpoints/step_*")
            ):  # it had not begun
                again = zygote.run(self.command(case, "--overwrite"), output)
            if again.code != 0:
                return f"going on: exit {again.code}\n{again.text[-3000:]}"
            safe = SAFE.search(ended.last)
            if (
                safe
                and f"begins after step {safe[1]}"
                not in (case.run / "logs").joinpath(_log_of(case)).read_text()
            ):
                return f"it did not go on from step {safe[1]}, which was said to be safe"
        left = [str(p.relative_to(case.run)) for p in case.run.rglob("*") if _is_leftover(p.name)]
        if left:
            return f"left: {left}"
        found = Kept.of(case.run)
        if case.expected is not None:
            return found.differs(case.expected)
        steps = [row["step"] for row in found.metrics]
        return "" if steps == list(range(1, STEPS + 1)) else f"Steps {steps}"


def _log_of(case: Case) -> str:
    return "main.log" if (case.run / "logs" / "main.log").exists() else "coordinator.log"


def _is_leftover(name: str) -> bool:
    return name.startswith((".tmp", ".replaced")) or name.endswith(".tmp")


def _of_ending(case: Case, ended: Ended) -> str:
    """What is wrong with how it ended."""
    if "Traceback" in ended.text:
        return "a traceback"
    if ended.left:
        return f"{ended.left} processes left"
    kind = case.faults["kind"] if case.faults else "full"
    if kind in ("kill", "torn"):
        return "" if ended.code == -signal.SIGKILL else f"exit {ended.code}, not a kill"
    if ended.code == 3:
        told = "could not be written" in ended.last or "expected room" in ended.last
        return (
            ""
            if told and "Safe: " in ended.last
            else "the last line does not say what could not be written"
        )
    if ended.code == 0 and case.faults and case.name.split()[1] in ("delete", "mkdir", "truncate"):
        return ""  # it could be done another way, or did not matter
    if ended.code == 0 and not case.faults:
        return ""  # there was room enough
    return (
        "" if ended.code == 0 and "The run goes on without" in ended.text else f"exit {ended.code}"
    )


# --- a fault at every call ------------------------------------------------------------------------

_INPROC = ("--inproc", "--workers", "one")


def _at_calls(bench: Bench, draw: random.Random, short: bool) -> Iterator[Case]:
    """For each kind of call on each kind of file one of its occurrences, with each fault; in the
    short form some.
    """
    expected, ended = bench.undisturbed("evaluated", _INPROC)
    places: dict[tuple[str, str], list[int]] = {}
    for number, (call, path) in enumerate(ended.calls, 1):
        places.setdefault((call, re.sub(r"\d+", "N", path)), []).append(number)
    wanted = [
        (call, path, kind)
        for call, path in places
        for kind in KINDS
        if kind != "torn" or call == "write"
    ]
    if short:
        wanted = draw.sample(wanted, 10)
    for call, path, kind in wanted:
        at, runs = draw.choice(places[call, path]), bench.place()
        yield Case(
            name=f"{kind} {call} {path} (call {at})",
            runs=runs,
            options=_INPROC,
            faults={"folder": str(runs / "v"), "at": at, "kind": kind},
            expected=expected,
        )


# --- a limit on the size of files (ulimit -f) -----------------------------------------------------


def _limited(bench: Bench, draw: random.Random, short: bool) -> Iterator[Case]:
    expected, _ = bench.undisturbed("evaluated", _INPROC)
    for _ in range(1 if short else 10):
        limit = int(2 ** draw.uniform(6, 18))
        yield Case(
            name=f"ulimit of {limit} bytes",
            runs=bench.place(),
            options=_INPROC,
            limit=limit,
            expected=expected,
        )


# --- a file system that is full -------------------------------------------------------------------


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
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "tmpfs", where], capture_output=True, text=True, check=False
        )
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
) -> list[Case]:
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
            cases.append(
                Case(
                    name=f"{name} with {disk.free >> 10} KiB left",
                    runs=where / "runs",
                    options=options,
                    target=target,
                    expected=expected if exact else None,
                    before=disk.fill,
                    after=disk.empty,
                )
            )
    return cases
