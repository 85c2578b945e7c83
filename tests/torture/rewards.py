"""Bad rewards: every kind in one kernel of `reward`, one row each; some on the command line.

What has to hold: one message that names function and row, no traceback of ours, no process left,
no hang. The whole form has more of the command line. Rows beside a bad one, and both policies:
tests/processes/test_scoring.py.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dataflow.batch import Keys
from operators.kernels.scoring import HostReward
from tests.kit import processes
from tests.kit.scoring import answers, scoring
from tests.torture import bad_rewards
from tests.torture.bad_rewards import BAD
from tests.torture.outcome import CaseResult, timed

OURS = re.compile(r'File "[^"]*/(operators|engine|dataflow)/')
CONTROL = re.compile(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]")
SECONDS = 1.5
"""For a call of a function that does not come back."""
LATE = 120.0
"""For a command."""
SHORT_RUNS = ("raises", "leaves_helpers_and_kills_its_keeper")
SHORT_FILES = ("a syntax error", "an exit while it is imported")
RUNS = 16
"""Kinds that the whole form gives to the command line."""
FILES = {
    "a syntax error": ("def f(completions:\n", "SyntaxError"),
    "a module that is not there": ("import no_such_library\nf = 5\n", "no_such_library"),
    "an exit while it is imported": ("import sys\nsys.exit(0)\n", r"sys.exit\(0\)"),
    "no such function": ("def g(completions): ...\n", "no function 'f'"),
    "no function": ("f = 5\n", "no function 'f'"),
    "a column that is not there": ("def f(completions, solution): ...\n", "'solution'"),
    "positional parameters": ("def f(completions, /): ...\n", "positional-only"),
    "another trainer's state": ("def f(completions, trainer_state): ...\n", "trainer_state"),
}
"""Files of rewards that cannot be: their text, and what is said of them."""


def torture(short: bool, seed: int) -> list[CaseResult]:
    """Every kind; the seed chooses which of them the command line is given."""
    with tempfile.TemporaryDirectory(prefix="rewards-") as place, ThreadPoolExecutor(2) as pool:
        commands = Commands(Path(place), pool)
        kinds = SHORT_RUNS if short else random.Random(seed).sample(sorted(BAD), RUNS)
        files = SHORT_FILES if short else tuple(FILES)
        asked = [commands.file(name) for name in files] + [commands.run(kind) for kind in kinds]
        return [*in_one_kernel(), *(each.result() for each in asked)]


def is_scored(kernel: HostReward, prompt: str) -> bool:
    """Whether the row of this prompt has a reward."""
    chunk = answers(["abc"], Keys.of([0]), prompt=[prompt])
    return any(len(batch.keys) for batch in kernel.run(chunk))


def in_one_kernel() -> list[CaseResult]:
    """Each kind as one row, in one function; after it a row that is right."""
    results = []
    how = {"timeout": SECONDS, "on_error": "drop_group"}
    with all_marked() as mark, scoring(bad_rewards.any_kind, **how) as (kernel, session):

        def as_one_row(kind: str) -> tuple[str, str]:
            session.tombstones.clear()
            kept, said = is_scored(kernel, f"{kind}!"), BAD[kind][0]
            told = session.failed.get((0, 0, 0), "")
            problem = judged(told, said, "any_kind", "row 0/0") if said else ""
            if not said and not kept:
                problem = f"lost: {told}"
            if not problem and not is_scored(kernel, "right"):
                problem = f"the next row was lost: {session.failed}"
            return problem, first_line(told)

        for kind in BAD:
            results.append(timed("rewards", f"row: {kind}", partial(as_one_row, kind)))
    return [*results, timed("rewards", "nothing is left", lambda: (left_of(mark), ""))]


def judged(told: str, said: str, function: str, row: str) -> str:
    """What is wrong with a message; empty where nothing is."""
    if not re.search(said, told):
        return f"expected {said!r}, found {told[:300]!r}"
    missing = [part for part in (function, row, "Fix: ") if part not in told]
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


def first_line(text: str) -> str:
    """The line that says what it was."""
    lines = [line for line in text.splitlines() if " printed" not in line]
    return next((line for line in lines if "Fix: " in line), lines[-1] if lines else "")


class Commands:
    """Runs of the real command line, two at a time, on a model of random weights."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        self._folder, self._pool = folder, pool
        rows = [{"prompt": text, "answer": "a"} for text in ("ab", "cd", "ef!", "gh")]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._model = pool.submit(self._make_model)

    def _make_model(self) -> None:
        done = processes.call_python(processes.ROOT / "examples" / "tiny.py", cwd=self._folder)
        assert done.returncode == 0, done.stderr

    def run(self, kind: str) -> Future[CaseResult]:
        """Train on rows of which one is bad."""
        return self._pool.submit(timed, "rewards", f"command: {kind}", partial(self._run, kind))

    def file(self, name: str) -> Future[CaseResult]:
        """Check a graph whose reward is in a file that cannot be."""
        return self._pool.submit(timed, "rewards", f"file: {name}", partial(self._file, name))

    def _run(self, kind: str) -> tuple[str, str]:
        said = BAD[kind][0]
        how = f"--steps 2 --name run_{kind} --threads 1 --no-progress"
        done, left = self._called("run", f"{bad_rewards.__file__}:{kind}", how)
        wanted, problem = 3 if said else 0, left
        if done.returncode != wanted:
            found = f"exit code {done.returncode}, expected {wanted}"
            problem = f"{found}: {done.stderr[-300:]!r}"
        if said and not problem:
            problem = judged(done.stderr, said, kind, "row ")
        shown = shown_wrongly(done.stdout + done.stderr)
        return problem or shown, first_line(done.stderr or done.stdout)

    def _file(self, name: str) -> tuple[str, str]:
        text, said = FILES[name]
        file = self._folder / f"file_{uuid.uuid4().hex}.py"
        file.write_text(text)
        done, left = self._called("check", f"{file}:f")
        problem = shown_wrongly(done.stdout + done.stderr) or left
        if done.returncode not in (1, 2):
            problem = f"exit code {done.returncode}"
        if not re.search(said, done.stderr):
            problem = f"expected {said!r}, found {done.stderr[-300:]!r}"
        return problem, first_line(done.stderr)

    def _called(
        self, command: str, function: str, more: str = ""
    ) -> tuple[subprocess.CompletedProcess[str], str]:
        """The command at its end, and which processes are left of it."""
        self._model.result()
        base = "--base runs/tiny/model --data rows.jsonl --n 2 --batch 2 --max-tokens 3"
        words = [command, "graphs.grpo:grpo", "--reward-fn", function, *f"{base} {more}".split()]
        mark = processes.new_mark()
        own = {"cwd": self._folder, "env": {processes.MARK: mark}, "timeout": LATE}
        done = processes.call_python("-c", processes.COMMAND_LINE, *words, **own)
        left = left_of(mark)
        processes.kill(processes.marked(mark))
        return done, left


@contextmanager
def all_marked() -> Iterator[str]:
    """Marks the environment of what this thread starts; what still has the mark is killed after."""
    mark = os.environ[processes.MARK] = processes.new_mark()
    try:
        yield mark
    finally:
        del os.environ[processes.MARK]
        processes.kill(processes.marked(mark))


def left_of(mark: str) -> str:
    left = processes.marked(mark)
    return f"processes are left: {left}" if left else ""
