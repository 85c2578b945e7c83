"""The parts of scripts/gpu: what each runs, its share of the minutes, and its end.

Owns: the list of parts, their time, their processes and their logs. Does not own: what they measure
(benchmarks/gpu_*.py), the command line (gpu_command.py). Imports the standard library alone.

A part has its share of the time that is left when it begins, so that what others did not need is
its; at its limit it is killed with all that it started. The next part is started meanwhile, so that
it has imported torch when its turn comes (benchmarks/gpu_part.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KILLING = 2.0
"""Seconds between SIGTERM and SIGKILL."""
LAST = 3.0
"""Seconds that are kept for the table."""
LEAST = 1.0
"""Seconds below which a part is not begun."""
_START = ("-m", "benchmarks.gpu_part")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPart:
    """words: after the interpreter's name; what it writes is added as `--json FILE`. share: of the
    time, beside the other parts' shares. short: more words for the short form.
    """

    name: str
    words: tuple[str, ...]
    share: float
    short: tuple[str, ...] = ("--quick",)


def _module(name: str, *words: str) -> tuple[str, ...]:
    return (*_START, f"benchmarks.{name}", *words)


RATES = ("--rates", "{results}/gpu_rates.json")
BASE = ("--base", "{base}")
PARTS = (
    # Begins as it is started: no part before it gives it time to import more than it needs.
    GpuPart(name="rates", words=("-m", "benchmarks.gpu_rates"), share=25),
    # FlexAttention is compiled in some ten forms.
    GpuPart(name="tests", words=_module("gpu_tests"), share=85),
    GpuPart(name="train", words=_module("gpu_train", *RATES, *BASE), share=75),
    GpuPart(name="generate", words=_module("gpu_generate", *RATES, *BASE), share=40),
    GpuPart(name="adapters", words=_module("gpu_adapters", *BASE), share=40),
    GpuPart(name="grpo", words=_module("gpu_grpo", *BASE), share=65),
    GpuPart(name="weights", words=_module("gpu_weights", *RATES, *BASE), share=30),
    GpuPart(
        name="predicted",
        words=_module("predicted", "--quick", "--nodes", "--steps", "0"),
        share=110,
        # A profile on a CPU takes a minute: nothing is measured.
        short=("--steps", "--cases"),
    ),
    GpuPart(
        name="steps",
        words=_module("gpu_steps"),
        share=40,
        short=("--quick", "--only", "profile", "kernels"),
    ),
)
"""By worth, the rates first: what others measure is a share of them. `{results}` and `{base}` stand
for folders. A share is about as many seconds as a part may need.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFolders:
    """Where results and logs go, and what parts keep for others: the directory of the Model."""

    results: Path
    logs: Path
    base: Path

    def output(self, part: GpuPart) -> Path:
        """The file of a part's results."""
        return self.results / f"gpu_{part.name}.json"

    def log(self, part: GpuPart) -> Path:
        """The file of a part's output."""
        return self.logs / f"gpu_{part.name}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEnd:
    """How a part ended. code: None for one that was killed, or not begun. limit: its seconds."""

    part: GpuPart
    code: int | None
    seconds: float
    limit: float

    @property
    def failed(self) -> bool:
        """Whether it did not come to its end."""
        return self.code != 0

    def __str__(self) -> str:
        if self.code == 0:
            return "done"
        if self.code is not None:
            return f"FAILED, exit code {self.code}"
        if self.limit < LEAST:
            return "NOT BEGUN, no time was left"
        return f"KILLED at its limit of {self.limit:.0f} s"


def find_limit(parts: Sequence[GpuPart], seconds: float) -> float:
    """Seconds of the first of these parts, of all that are left: its share of them, or all if it is
    the last. Together with those of the parts after it they are never more than `seconds`.
    """
    all_shares = sum(part.share for part in parts)
    return max(0.0, seconds - len(parts) * KILLING) * parts[0].share / all_shares


@dataclass(slots=True, kw_only=True)
class PartRuns:
    """Runs parts one after another. seconds: of all. environment: of their processes. popen: what
    starts them.
    """

    parts: Sequence[GpuPart]
    folders: PartFolders
    seconds: float
    environment: Mapping[str, str]
    quick: bool = False
    popen: Any = subprocess.Popen
    ends: list[PartEnd] = field(default_factory=list)
    """In the order of the parts; those that were not begun, too."""
    _started: list[Any] = field(default_factory=list)

    def run(self) -> None:
        """Run all of them. Whatever happens, none is left."""
        deadline = time.monotonic() + self.seconds
        for folder in (self.folders.results, self.folders.logs, self.folders.base):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            process = self._start(self.parts[0])
            for number, part in enumerate(self.parts):
                current = process
                rest = self.parts[number + 1 :]
                if rest:
                    process = self._start(rest[0])
                limit = find_limit(self.parts[number:], deadline - time.monotonic())
                self.ends.append(_carry_out(part, current, limit))
        finally:
            for process in self._started:
                end_group(process)

    def _start(self, part: GpuPart) -> Any:
        words: list[str] = []
        for word in (*part.words, *(part.short if self.quick else ())):
            word = word.replace("{results}", str(self.folders.results))
            words.append(word.replace("{base}", str(self.folders.base)))
        output = self.folders.output(part)
        output.unlink(missing_ok=True)  # of an earlier call
        with self.folders.log(part).open("wb") as log:
            process = self.popen(
                [sys.executable, *words, "--json", str(output)],
                cwd=ROOT,
                env=dict(self.environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process


def _carry_out(part: GpuPart, process: Any, limit: float) -> PartEnd:
    """Tell it to begin, and wait until it ends or its time is over."""
    begun = time.monotonic()
    code = None
    if limit >= LEAST:
        print(f"gpu: {part.name}, at most {limit:.0f} s", flush=True)
        # It may have ended as it was importing.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"begin\n")
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit)
    end_group(process)
    return PartEnd(part=part, code=code, seconds=time.monotonic() - begun, limit=limit)


def end_group(process: Any) -> None:
    """End a part and all that it started: asked first, then killed. Nothing if all have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLING)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
