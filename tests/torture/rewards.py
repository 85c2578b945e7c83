"""Bad rewards: every kind by the kernel of `reward` under both policies, some through the real
command line.

Owns: how each kind is run, and what is held against it: one message that names function and row, no
traceback of ours, no process left, no hang. Does not own: the kinds (bad_rewards.py).

The short form gives each kind one row and one policy, in one kernel; the whole one has a kernel for
each kind, rows around the bad one, and more of the command line.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import DataflowError
from dataflow.kernel import Chunk, KernelNode, Layout
from dataflow.schema import Completion
from operators.kernels.scoring import Reward
from tests.torture import bad_rewards
from tests.torture.bad_rewards import BAD
from tests.torture.outcome import Outcome

ROOT = Path(__file__).resolve().parents[2]
OURS = re.compile(r'File "[^"]*/(operators|engine|dataflow)/')
CONTROL = re.compile(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]")
SECONDS = 1.5
"""For a call of a function that does not come back."""
LATE = 120.0
"""For a command."""
COMMAND = [sys.executable, "-c", "import sys; from engine.cli import main; sys.exit(main())"]
SHORT_RUNS = ("raises", "leaves_helpers_and_kills_its_keeper")
SHORT_FILES = ("a syntax error", "an exit while it is imported")
RUNS = 16
"""Kinds that the whole form gives to the command line."""
FILES = {
    "a syntax error": ("def f(completions:\n", "SyntaxError"),
    "a module that is not there": (
        "import no_such_library\ndef f(completions): ...\n",
        "no_such_library",
    ),
    "an exit while it is imported": ("import sys\nsys.exit(0)\n", r"sys.exit\(0\)"),
    "no such function": ("def g(completions): ...\n", "no function 'f'"),
    "no function": ("f = 5\n", "no function 'f'"),
    "a column that is not there": ("def f(completions, solution): ...\n", "'solution'"),
    "positional parameters": ("def f(completions, /): ...\n", "positional-only"),
    "another trainer's state": ("def f(completions, trainer_state): ...\n", "trainer_state"),
}
"""Files of rewards that cannot be: their text, and what is said of them."""


def torture(short: bool, seed: int) -> list[Outcome]:
    """Every kind; the seed chooses which of them the command line is given."""
    with tempfile.TemporaryDirectory(prefix="rewards-") as made, ThreadPoolExecutor(2) as pool:
        commands = Commands(Path(made), pool)
        kinds = SHORT_RUNS if short else random.Random(seed).sample(sorted(BAD), RUNS)
        files = SHORT_FILES if short else tuple(FILES)
        asked = [commands.file(name) for name in files] + [commands.run(kind) for kind in kinds]
        found = in_one_kernel() if short else [in_its_own_kernel(kind) for kind in BAD]
        return [*found, *(each.result() for each in asked)]


# --- the kernel -----------------------------------------------------------------------------------


class Session:
    """As much of the engine as the kernel needs."""

    seed, rank, world, group = 0, 0, 1, None

    def __init__(self) -> None:
        self.tombstones: dict[int, str] = {}

    def metric(self, name: str, value: float, count: float = 1.0) -> None:
        """Not kept."""

    def tombstone(self, key: tuple[int, int, int], error: str) -> None:
        """By position."""
        self.tombstones[key[0]] = error

    def row_seeds(self, keys: Keys) -> np.ndarray:
        """Nothing is drawn."""
        return np.zeros(len(keys), np.uint64)

    def module(self, model: Any, make: Callable[[], Any]) -> Any:
        """No model."""
        return make()

    def allocate(self, count: int, dtype: Any) -> np.ndarray:
        """Ordinary memory."""
        return np.empty(count, dtype)


@contextmanager
def hosted(fn: Callable[..., Any], policy: str) -> Iterator[tuple[Reward, Session]]:
    kernel, session = Reward(), Session()
    params = {"fns": (fn,), "timeout": SECONDS, "on_error": policy}
    try:
        kernel.open(KernelNode(name="score", operator="reward", params=params), Layout(), session)
        yield kernel, session
    finally:
        kernel.close()


def chunk(prompts: list[str]) -> Chunk:
    rows = len(prompts)
    ids = Ragged(np.arange(rows, dtype=np.int32), np.arange(rows + 1))
    columns = {"prompt": prompts, "completion": ["abc"] * rows, "completion_ids": ids}
    return Chunk(
        id=1,
        step=3,
        keys=Keys.of(range(rows)),
        inputs={"rows": Batch.make(Keys.of(range(rows)), columns, Completion)},
    )


def scored(kernel: Reward, prompts: list[str]) -> list[int]:
    """Positions of the rows that have a reward."""
    return [int(at) for batch in kernel.run(chunk(prompts)) for at in batch.keys.position]


def in_one_kernel() -> list[Outcome]:
    """Each kind as one row, in one function; after it a row that is right."""
    found = []
    with marked() as mark, hosted(bad_rewards.any_kind, "drop_group") as (kernel, session):
        for kind, (said, _) in BAD.items():
            begun = time.monotonic()
            session.tombstones.clear()
            kept = scored(kernel, [f"{kind}!"])
            told = session.tombstones.get(0, "")
            problem = (
                judged(told, said, "any_kind", "row 0/0")
                if said
                else ("" if kept == [0] else f"lost: {told}")
            )
            if not problem and scored(kernel, ["right"]) != [0]:
                problem = f"the next row was lost: {session.tombstones}"
            found.append(outcome(f"row: {kind}", problem, told, begun))
    left = processes(mark)
    return [
        *found,
        outcome(
            "nothing is left", f"processes are left: {left}" if left else "", "", time.monotonic()
        ),
    ]


def in_its_own_kernel(kind: str) -> Outcome:
    """One bad row between two others: it alone is given up; and where the policy is to stop, that
    names it, too.
    """
    begun, said = time.monotonic(), BAD[kind][0]
    prompts = ["right", "wrong!", "right"]
    told = ""
    with marked() as mark:
        with hosted(getattr(bad_rewards, kind), "drop_group") as (kernel, session):
            kept = scored(kernel, prompts)
            told = session.tombstones.get(1, "")
            problem = judged(told, said, kind, "row 1/0") if said else ""
            wanted = [0, 2] if said else [0, 1, 2]
            problem = problem or ("" if kept == wanted else f"rows {kept} are there, of {wanted}")
        if said and not problem:
            with hosted(getattr(bad_rewards, kind), "stop") as (kernel, _):
                try:
                    problem = f"it went on with rows {scored(kernel, prompts)}"
                except DataflowError as error:
                    problem = judged(str(error), said, kind, "row 1/0")
        left = processes(mark)
    return outcome(
        f"kernel: {kind}", problem or (f"processes are left: {left}" if left else ""), told, begun
    )


def judged(told: str, said: str, function: str, row: str) -> str:
    """What is wrong with a message; empty where nothing is."""
    if not re.search(said, told):
        return f"expected {said!r}, found {told[:300]!r}"
    missing = [part for part in (f"{function}", row, "Fix: ") if part not in told]
    if missing:
        return f"{missing} is not in {told[:300]!r}"
    if len(told) > 100_000:
        return f"{len(told)} characters"
    return shown_wrongly(told)


def shown_wrongly(told: str) -> str:
    if (ours := OURS.search(told)) is not None:
        return f"a traceback of ours: {told[ours.start() : ours.start() + 300]!r}"
    if (control := CONTROL.search(told)) is not None:
        return f"the control character {control.group()!r}"
    return ""


# --- the command line -----------------------------------------------------------------------------


class Commands:
    """Runs of the real command line, two at a time, on a model of random weights."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        self._folder, self._pool = folder, pool
        rows = [{"prompt": text, "answer": "a"} for text in ("ab", "cd", "ef!", "gh")]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._model = pool.submit(self._make_model)

    def run(self, kind: str) -> Future[Outcome]:
        """Train on rows of which one is bad."""
        return self._pool.submit(self._run, kind)

    def file(self, name: str) -> Future[Outcome]:
        """Check a graph whose reward is in a file that cannot be."""
        return self._pool.submit(self._file, name)

    def _run(self, kind: str) -> Outcome:
        self._model.result()
        begun, said = time.monotonic(), BAD[kind][0]
        code, out, err, left = self._called("run", f"{bad_rewards.__file__}:{kind}", f"run_{kind}")
        problem = self._ended(code, 3 if said else 0, err, left)
        if said and not problem:
            problem = judged(err, said, kind, "row ")
        return outcome(
            f"command: {kind}", problem or shown_wrongly(out + err), _first(err or out), begun
        )

    def _file(self, name: str) -> Outcome:
        self._model.result()
        begun, (text, said) = time.monotonic(), FILES[name]
        file = self._folder / f"file_{uuid.uuid4().hex}.py"
        file.write_text(text)
        code, out, err, left = self._called("check", f"{file}:f", "")
        problem = "" if re.search(said, err) else f"expected {said!r}, found {err[-300:]!r}"
        problem = (
            problem or ("" if code in (1, 2) else f"exit code {code}") or shown_wrongly(out + err)
        )
        return outcome(
            f"file: {name}", problem or (f"left: {left}" if left else ""), _first(err), begun
        )

    def _called(self, command: str, function: str, run: str) -> tuple[int, str, str, list[int]]:
        flags = [
            "--base",
            "runs/tiny/model",
            "--data",
            "rows.jsonl",
            "--reward-fn",
            function,
            "--n",
            "2",
        ]
        flags += ["--batch", "2", "--max-tokens", "3"]
        flags += (
            ["--steps", "2", "--name", run, "--threads", "1", "--no-progress"]
            if command == "run"
            else []
        )
        mark = uuid.uuid4().hex
        made = subprocess.Popen(
            [*COMMAND, command, "graphs.grpo:grpo", *flags],
            cwd=self._folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        try:
            out, err = made.communicate(timeout=LATE)
        except subprocess.TimeoutExpired:
            made.kill()
            return -1, "", f"it had not ended after {LATE:g} s", processes(mark)
        finally:
            left = processes(mark)
            end(mark)
        return made.returncode, out, err, left

    @staticmethod
    def _ended(code: int, wanted: int, err: str, left: Sequence[int]) -> str:
        if code != wanted:
            return f"exit code {code}, expected {wanted}: {err[-300:]!r}"
        return f"processes are left: {left}" if left else ""

    def _make_model(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, str(ROOT / "examples" / "tiny.py")],
            cwd=self._folder,
            env=environment,
            check=True,
            capture_output=True,
        )


def _first(text: str) -> str:
    """The line that says what it was."""
    lines = [line for line in text.splitlines() if " printed" not in line]
    return next((line for line in lines if "Fix: " in line), lines[-1] if lines else "")


def outcome(case: str, problem: str, told: str, begun: float) -> Outcome:
    return Outcome(
        part="rewards",
        case=case,
        fault=problem,
        said=_first(told)[:300],
        seconds=time.monotonic() - begun,
    )


# --- what is left ---------------------------------------------------------------------------------

MARK = "DATAFLOW_TORTURE"


@contextmanager
def marked() -> Iterator[str]:
    """A mark in the environment of what this thread starts by the kernel; what has it still is
    killed afterwards.
    """
    mark = os.environ[MARK] = uuid.uuid4().hex
    try:
        yield mark
    finally:
        del os.environ[MARK]
        end(mark)


def end(mark: str) -> None:
    for pid in processes(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes(mark: str) -> list[int]:
    """Processes with this mark in their environment, this one excepted, the dead excepted."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return [pid for pid in found if pid != os.getpid()]
