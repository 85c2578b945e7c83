"""The sides of a comparison: their protocol, our side, and the peer's.

Owns: the protocol of a side, the measures of a run, and TRL as one. Does not own: the settings
(settings.py), the pairing (against_trl.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Protocol

from benchmarks.settings import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of one side, over the Steps after the warm-up; times are per Step."""

    samples_per_second: float
    """Rows trained per second of wall time, including everything between Steps."""
    tokens_per_second: float
    """Completion tokens per second of wall time."""
    step_ms: float
    """Median."""
    generation_ms: float
    rollout_ms: float
    """Generation, decoding to text and scoring."""
    train_ms: float
    """The rest of the Step."""
    prompt_tokens: float
    """Mean length, like completion_tokens."""
    completion_tokens: float
    slot_waste: float
    """1 - completion tokens / (rows in flight * decode steps), summed over decode steps."""
    reward: float
    """Mean over the measured Steps."""
    reward_last: float
    steps: int


class ComparedSide(Protocol):
    """One of the systems compared."""

    @property
    def name(self) -> str: ...

    def run(self, run: Run) -> Measured:
        """Train as told, in fresh processes. Exits if that fails."""
        ...


class OurSide:
    """This engine with graphs/grpo.py, in this environment. layout: a name of our_side.LAYOUTS."""

    def __init__(self, name: str = "ours", layout: str = "one") -> None:
        self.name, self._layout = name, layout

    def run(self, run: Run) -> Measured:
        """In its own process, like the peer."""
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "run.json"
            told.write_text(json.dumps(asdict(run)))
            return measured(
                last_line(
                    [sys.executable, "-m", "benchmarks.our_side", str(told), self._layout],
                    run.threads,
                )
            )


class TrlSide:
    """TRL's GRPOTrainer in .venv-trl; `options` go to benchmarks.trl_side."""

    name = "trl"

    def __init__(self, *options: str) -> None:
        self._options = options

    def run(self, run: Run) -> Measured:
        """Creates the environment on first use."""
        subprocess.run(["benchmarks/trl_env.sh"], check=True)
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "run.json"
            told.write_text(json.dumps(asdict(run)))
            command = [
                ".venv-trl/bin/python",
                "-m",
                "benchmarks.trl_side",
                str(told),
                *self._options,
            ]
            return measured(last_line(command, run.threads))


def last_line(command: list[str], threads: int) -> dict[str, float]:
    """Run a side's command with this many threads; returns the JSON object in its last output line.

    Waiting threads spin briefly and then sleep, unless the caller's environment says otherwise: on
    a busy machine, threads that keep spinning made the same run up to ten times slower.
    """
    environment = {"GOMP_SPINCOUNT": "10000"} | os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-20:])
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{tail}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(numbers: dict[str, float]) -> Measured:
    """From a side's JSON; extra keys are ignored, a missing one is a KeyError."""
    return Measured(**{field.name: numbers[field.name] for field in fields(Measured)})  # type: ignore[arg-type]
