"""Random signals at random moments over five kinds of run, then `dataflow resume`.

    kind        what runs
    one         one process, with reward children
    apart       a process for each node, at max_lag 0
    lagging     several processes, at max_lag 1
    ranks       two ranks of a train node
    evaluated   one process, with reward children, evaluations and their best versions

What is sent: INT, TERM, HUP (to the process of the run or to its whole group), KILL, STOP and CONT,
a second one once the first was told of, TERM twice at once. When: as it starts, in a checkpoint, at
a random Step, in a resume.

Owns: drawing and carrying out the cases, what has to hold. Does not own: a run's processes
(tests/chaos/kills.py).

After each exit: the code that the signal is to lead to, one line that says so, no traceback, no
process within 10 s. At the end: all Steps in the metrics, an intact checkpoint of the last, every
row trained once; at max_lag 0 metrics and weights of a run that nobody disturbed, to the bit;
nothing new in /dev/shm or the folder for temporary files.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from engine.keep.checkpoint.store import CheckpointStore
from tests.chaos.kills import REPEATED
from tests.kit.forked import own_interpreters
from tests.kit.nothing_left import left_in_shared_memory, require_gone, shared_memory
from tests.kit.processes import COMMAND_LINE, MARK, ended_within, kill, marked, start_python
from tests.kit.runs import (
    column,
    require_each_row_once,
    require_same_numbers,
    steps_recorded,
    steps_stored,
)
from tests.kit.tiny_runs import save_tiny_inputs
from tests.torture.outcome import CaseResult, timed

STEPS, BATCH, SAMPLES = 8, 4, 2
_SECONDS_OF_RESUME = 150.0
_NAMES_IN_MEMORY = ("dataflow", "torch_", "psm_", "pymp-")
"""How the names begin that a run could leave in shared memory; others are of other programs."""
_REWARD = """def vowels(completions, **columns):
    return [sum(letter in 'aeiouAEIOU' for letter in text) / 6 for text in completions]
"""
_GRAPH = """from operators.data import prompts
from operators.generate import generate
from operators.reward import reward
from operators.train import evaluate
from dataflow.model import Model
from graphs.grpo import grpo
from torture_rewards import vowels


def plain(folder: str, max_lag: int = 0):
    base, data = folder + "/model", folder + "/train.parquet"
    return grpo(base, data, vowels, n=2, batch=4, max_tokens=6, lr=1e-3, max_lag=max_lag)


def evaluated(folder: str):
    policy = Model("policy", folder + "/model", trainable=True)
    held_out = prompts(folder + "/test.parquet", shuffle=False, name="held_out")
    answers = generate(policy, held_out, max_tokens=6, temperature=0.0, name="answers")
    marks = reward(vowels, answers, name="marks")
    return plain(folder).extend(evaluate(policy, marks, every=3, keep_best=1))
"""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A graph and where its nodes are. exact: it equals, to the bit, a run that nobody disturbs."""

    function: str = "plain"
    flags: tuple[str, ...] = ()
    exact: bool = True
    max_lag: int = 0


KINDS: Mapping[str, Kind] = {
    "one": Kind(),
    "apart": Kind(flags=("--workers", "apart")),
    "lagging": Kind(flags=("--max-lag", "1", "--workers", "apart"), exact=False, max_lag=1),
    "ranks": Kind(flags=("--workers", "apart", "--ranks", "train_policy=2")),
    "evaluated": Kind(function="evaluated"),
}
SENT = ("INT", "TERM", "HUP", "KILL", "STOP", "again", "twice")
WHEN = ("start", "begin", "step", "checkpoint", "end", "resume")


@dataclass(frozen=True, kw_only=True)
class SignalCase:
    """sent: what; when: the moment; group: to the process group, as a terminal or batch system."""

    kind: str
    sent: str
    when: str
    group: bool
    seed: int

    def __str__(self) -> str:
        to = "all" if self.group else "its process"
        return f"{self.kind}: {self.sent} to {to}, {self.when} (seed {self.seed})"


@dataclass(kw_only=True)
class SignalledRun:
    """A case as it is carried out. mark: by which its processes are found."""

    case: SignalCase
    folder: Path
    runs: Path
    mark: str
    said: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.runs / self.case.kind

    @property
    def temporary(self) -> Path:
        """The folder for temporary files of its processes."""
        return self.runs / "temporary"


def cases(seed: int, count: int) -> Iterator[SignalCase]:
    """Every kind, every signal and every moment in turn, at random beside each other."""
    draw = random.Random(seed)
    in_turn = [_in_turn(draw, names) for names in (tuple(KINDS), SENT, WHEN)]
    for number in range(count):
        kind, sent, when = (next(names) for names in in_turn)
        drawn = {"kind": kind, "sent": sent, "when": when, "group": draw.random() < 0.5}
        yield SignalCase(seed=seed * 1000 + number, **drawn)


def _in_turn(draw: random.Random, names: tuple[str, ...]) -> Iterator[str]:
    while True:
        yield from draw.sample(names, len(names))


def torture(short: bool, seed: int) -> list[CaseResult]:
    """Short: 2 cases, of two kinds and signals; else 60. Two at a time, after their references."""
    drawn = list(cases(seed, 2 if short else 60))
    with tempfile.TemporaryDirectory(prefix="torture_") as place, ThreadPoolExecutor(2) as pool:
        folder = Path(place)
        _prepare(folder)
        exact = [case.kind for case in drawn if KINDS[case.kind].exact]
        names = list(dict.fromkeys(map(_compared_with, exact)))
        made = pool.map(partial(_reference, folder), names)
        references = dict(zip(names, made, strict=True))
        return list(pool.map(lambda case: _result(case, folder, references), drawn))


def _prepare(folder: Path) -> None:
    save_tiny_inputs(folder)
    (folder / "torture_rewards.py").write_text(_REWARD, encoding="ascii")
    (folder / "torture_graphs.py").write_text(_GRAPH, encoding="ascii")


def _result(case: SignalCase, folder: Path, references: Mapping[str, Path]) -> CaseResult:
    trial = _trial(case, folder, f"{case.seed}")

    def carried_out() -> tuple[str, str]:
        before, fault = shared_memory(), ""
        try:
            _carry_out(trial)
            _prove(trial, references)
            in_memory = sorted(
                name for name in left_in_shared_memory(before) if name.startswith(_NAMES_IN_MEMORY)
            )
            assert not in_memory, f"left in shared memory: {in_memory}"
            left = sorted(path.name for path in trial.temporary.iterdir())
            assert not left, f"temporary files are left: {left}"
        except AssertionError as error:
            fault = str(error)
        finally:
            kill(marked(trial.mark))
        return fault, next((line for line in trial.said if line), "")

    return timed("signals", str(case), carried_out)


def _trial(case: SignalCase, folder: Path, name: str) -> SignalledRun:
    mark = f"signals-{name}-{os.getpid()}"
    trial = SignalledRun(case=case, folder=folder, runs=folder / f"runs_{name}", mark=mark)
    trial.temporary.mkdir(parents=True)
    return trial


def _carry_out(trial: SignalledRun) -> None:
    """Run, disturb, and resume to the end; a resume is disturbed where the case says so."""
    draw = random.Random(trial.case.seed)
    command = _first_command(trial)
    if trial.case.when == "resume":
        _disturbed(trial, command, "step", "KILL", draw)
        command = _next_command(trial)
    code = _disturbed(trial, command, trial.case.when, trial.case.sent, draw)
    for _ in range(3):
        if code == 0 and _complete(trial.run):
            return
        code = _undisturbed(trial, _next_command(trial))
    told = "the run is not complete after three resumes, the last of which ended with"
    raise AssertionError(f"{told} {code}")


def _first_command(trial: SignalledRun) -> list[str]:
    kind = KINDS[trial.case.kind]
    where = f"--name {trial.case.kind} --runs {trial.runs} --folder {trial.folder} --overwrite"
    how = f"--steps {STEPS} --threads 1 --no-progress --checkpoint-every 2"
    return [*f"run torture_graphs.py:{kind.function} {where} {how}".split(), *kind.flags]


def _next_command(trial: SignalledRun) -> list[str]:
    """resume; run again where the signal came before the run folder had its record."""
    names = ("graph.json", "options.json", "versions.json")
    recorded = all((trial.run / name).is_file() for name in names)
    return ["resume", str(trial.run)] if recorded else _first_command(trial)


def _start(
    trial: SignalledRun, command: list[str], *, forks: bool = False
) -> subprocess.Popen[str]:
    # Importing torch makes that folder among the temporary ones, where nothing says another place.
    torch = {"TORCHINDUCTOR_CACHE_DIR": str(trial.folder / "inductor")}
    own = {MARK: trial.mark, "TMPDIR": str(trial.temporary), **torch}
    how = {"cwd": trial.folder, "stderr": subprocess.STDOUT, "start_new_session": True}
    # Signals come while it imports, too; a fork may have its temporary files elsewhere.
    with contextlib.nullcontext() if forks else own_interpreters():
        return start_python("-c", COMMAND_LINE, *command, env=own, path=[trial.folder], **how)


def _undisturbed(trial: SignalledRun, command: list[str], *, forks: bool = False) -> int:
    process = _start(trial, command, forks=forks)
    output = _ended(trial, process, "")
    assert process.returncode == 0, f"the resume ended with {process.returncode}:\n{output}"
    return process.returncode


def _ended(trial: SignalledRun, process: subprocess.Popen[str], sent: str) -> str:
    """The end of what it prints once it has ended, without a traceback, and nothing is left."""
    try:
        output = process.communicate(timeout=_SECONDS_OF_RESUME)[0]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it has not ended {_SECONDS_OF_RESUME:g} s after {sent}") from None
    require_gone(trial.mark)
    telling = re.compile(r"stopped by|ended (at once )?by|stopping")
    trial.said += [line for line in output.splitlines() if sent and telling.search(line)]
    for wrong in ("Traceback", "Exception ignored"):
        assert wrong not in output, f"{wrong}:\n{output[-3000:]}"
    return output[-3000:]


def _disturbed(
    trial: SignalledRun, command: list[str], when: str, sent: str, draw: random.Random
) -> int:
    """Start, wait for the moment, send; what has to hold of the exit is asserted."""
    process = _start(trial, command)
    at = steps_recorded(trial.run)
    if _wait_for(_moment(trial, when, draw), process):
        _send(trial, process, sent, draw)
    output = _ended(trial, process, sent)
    _require_right_exit(trial, process.returncode, sent, output)
    last = min(at, _stored(trial.run))
    assert steps_recorded(trial.run) >= last, "Steps before the last checkpoint were lost"
    return process.returncode


def _require_right_exit(trial: SignalledRun, code: int, sent: str, output: str) -> None:
    """0 where the run was complete before, or went on after STOP; else the signal's exit code."""
    number = {"INT": 2, "TERM": 15, "HUP": 1, "again": 15, "twice": 15}.get(sent, 0)
    if code == -number and number and not output.strip():
        return  # Python itself was about to begin: a shell shows it as 128 and the number, too
    expected = {"STOP": {0}, "KILL": {0, -signal.SIGKILL}}.get(sent, {0, 128 + number})
    assert code in expected, f"exit {code}, expected one of {sorted(expected)}:\n{output}"
    if code == 0:
        assert _complete(trial.run), f"exit 0, and the run is not complete:\n{output}"
    elif sent != "KILL":
        assert trial.said, f"nothing says why it ended:\n{output}"
    recorded = steps_recorded(trial.run)
    if code == 128 + number and "stopped by" in output and recorded:
        assert _stored(trial.run) == recorded, "it stopped without a checkpoint of its last Step"


def _moment(trial: SignalledRun, when: str, draw: random.Random) -> Callable[[], bool]:
    """Whether it has come."""
    end = time.monotonic() + draw.uniform(1.0, 8.0)
    step = {"begin": 0, "end": STEPS - 1}.get(when, draw.randint(1, STEPS - 2))
    logs = trial.run / "logs"
    if when in ("start", "resume"):
        return lambda: time.monotonic() >= end
    if when == "begin":
        return lambda: any("begins after step" in log.read_text() for log in logs.glob("*.log"))
    if when == "checkpoint":
        folder = trial.run / "checkpoints"
        return lambda: any(folder.glob(".tmp-step_*")) or steps_recorded(trial.run) >= STEPS - 1
    return lambda: steps_recorded(trial.run) >= step


def _wait_for(come: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """False where it ended before."""
    while not come():
        if ended_within(process, 0.005):
            return False
    return process.poll() is None


def _send(
    trial: SignalledRun, process: subprocess.Popen[str], sent: str, draw: random.Random
) -> None:
    if sent == "STOP":
        _stop_and_go_on(trial, process, draw)
        return
    name = {"again": "TERM", "twice": "TERM"}.get(sent, sent)
    number = signal.Signals[f"SIG{name}"]
    to = os.killpg if trial.case.group and sent != "KILL" else os.kill
    with contextlib.suppress(ProcessLookupError):
        to(process.pid, number)
        if sent == "twice":
            to(process.pid, number)
        if sent == "again" and _told(trial, process):
            to(process.pid, number)


def _told(trial: SignalledRun, process: subprocess.Popen[str]) -> bool:
    """Read until the first signal is told of; False where the run ended instead."""
    assert process.stdout is not None
    for line in process.stdout:
        trial.said.append(line.strip())
        if "stopping after this Step" in line:
            return True
    return False


def _stop_and_go_on(
    trial: SignalledRun, process: subprocess.Popen[str], draw: random.Random
) -> None:
    """The whole run, or some of its processes, stand still for a moment."""
    there = marked(trial.mark)
    chosen = there if trial.case.group else draw.sample(there, max(1, len(there) // 2))
    kill(chosen, signal.SIGSTOP)
    ended_within(process, draw.uniform(0.1, 1.0))
    kill(chosen, signal.SIGCONT)


def _stored(run: Path) -> int:
    """The Step of the last checkpoint."""
    return max(steps_stored(run), default=0)


def _complete(run: Path) -> bool:
    return steps_recorded(run) == STEPS and _stored(run) == STEPS


def _prove(trial: SignalledRun, references: Mapping[str, Path]) -> None:
    """Of a run that was disturbed and then completed."""
    kind = KINDS[trial.case.kind]
    complete = column(trial.run, "step") == list(range(1, STEPS + 1))
    assert complete, "the metrics are not complete"
    latest = CheckpointStore(trial.run / "checkpoints").latest()
    assert latest is not None, "there is no checkpoint"
    assert latest.step == STEPS, f"the last intact checkpoint is of step {latest.step}"
    require_each_row_once(trial.run, BATCH * STEPS, SAMPLES)
    oldest = max(column(trial.run, "policy/lag/max"))
    assert oldest <= kind.max_lag, "a row is older than max_lag"
    if kind.exact:
        reference = references[_compared_with(trial.case.kind)]
        require_same_numbers(trial.run, reference, but=REPEATED)


def _compared_with(kind: str) -> str:
    """Several ranks add in another order than one; elsewhere the numbers are one process's."""
    return kind if "--ranks" in KINDS[kind].flags else KINDS[kind].function


def _reference(folder: Path, name: str) -> Path:
    """The folder of a run that nobody disturbs."""
    kind = name if name in KINDS else "one"
    case = SignalCase(kind=kind, sent="", when="", group=False, seed=0)
    trial = _trial(case, folder, f"undisturbed_{name}")
    _undisturbed(trial, _first_command(trial), forks=True)
    return trial.run


def main() -> None:
    """One case again: `python -m tests.torture.signals '{"kind": ..., "sent": ..., ...}'`."""
    case = SignalCase(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory(prefix="torture_") as place:
        _prepare(Path(place))
        name = _compared_with(case.kind)
        references = {name: _reference(Path(place), name)} if KINDS[case.kind].exact else {}
        print(_result(case, Path(place), references))


if __name__ == "__main__":
    main()
