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
from pathlib import Path

from tests.chaos import kills
from tests.torture.outcome import Outcome

STEPS, BATCH, SAMPLES = 8, 4, 2
_SECONDS_OF_RESUME = 150.0
_CALL = "import sys; from engine.cli import main; sys.exit(main())"
_REWARD = (
    "def vowels(completions, **columns):\n    return [sum(c in 'aeiouAEIOU' for c in t) / 6 for t"
    " in completions]\n"
)
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
    return plain(folder).extend(evaluate(policy, reward(vowels, answers, name="marks"), every=3, keep_best=1))
"""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A graph, and where its nodes are. exact: whether it is compared to the bit with a run that
    nobody disturbs.
    """

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
class Case:
    """sent: what; when: at which moment; group: to the whole process group, as a terminal and a
    batch system do.
    """

    kind: str
    sent: str
    when: str
    group: bool
    seed: int

    def __str__(self) -> str:
        to = "all" if self.group else "its process"
        return f"{self.kind}: {self.sent} to {to}, {self.when} (seed {self.seed})"


@dataclass(kw_only=True)
class Trial:
    """A case as it is carried out. mark: as in tests/chaos/kills.py, by which its processes are
    found.
    """

    case: Case
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


def cases(seed: int, count: int) -> Iterator[Case]:
    """Every kind, every signal and every moment in turn, at random beside each other."""
    draw = random.Random(seed)
    kinds, sent, when = (_in_turn(draw, names) for names in (tuple(KINDS), SENT, WHEN))
    for number in range(count):
        yield Case(
            kind=next(kinds),
            sent=next(sent),
            when=next(when),
            group=draw.random() < 0.5,
            seed=seed * 1000 + number,
        )


def _in_turn(draw: random.Random, names: tuple[str, ...]) -> Iterator[str]:
    while True:
        yield from draw.sample(names, len(names))


def torture(short: bool, seed: int) -> list[Outcome]:
    """Short: 2 cases, each of another kind and signal; else 60. Two at a time, after what they are
    compared with.
    """
    found = list(cases(seed, 2 if short else 60))
    with tempfile.TemporaryDirectory(prefix="torture_") as made, ThreadPoolExecutor(2) as pool:
        folder = Path(made)
        _prepare(folder)
        names = list(
            dict.fromkeys(_compared_with(case.kind) for case in found if KINDS[case.kind].exact)
        )
        references = dict(
            zip(names, pool.map(lambda name: _reference(folder, name), names), strict=True)
        )
        return list(pool.map(lambda case: _outcome(case, folder, references), found))


def _prepare(folder: Path) -> None:
    kills.make_data(folder)
    (folder / "torture_rewards.py").write_text(_REWARD, encoding="ascii")
    (folder / "torture_graphs.py").write_text(_GRAPH, encoding="ascii")


def _outcome(case: Case, folder: Path, references: Mapping[str, Path]) -> Outcome:
    start, before = time.monotonic(), _shared()
    trial = _trial(case, folder, f"{case.seed}")
    fault = ""
    try:
        _carry_out(trial)
        _prove(trial, references)
        assert not (new := sorted(_shared() - before)), f"left in shared memory: {new}"
        assert not (new := sorted(p.name for p in trial.temporary.iterdir())), (
            f"temporary files are left: {new}"
        )
    except AssertionError as error:
        fault = str(error)
    finally:
        _end_all(trial)
    said = next((line for line in trial.said if line), "")
    return Outcome(
        part="signals", case=str(case), fault=fault, said=said, seconds=time.monotonic() - start
    )


def _trial(case: Case, folder: Path, name: str) -> Trial:
    trial = Trial(
        case=case, folder=folder, runs=folder / f"runs_{name}", mark=f"signals-{name}-{os.getpid()}"
    )
    trial.temporary.mkdir(parents=True)
    return trial


def _shared() -> set[str]:
    """Names in shared memory that a run could have left; those of other programs are none of it."""
    return {
        name
        for name in os.listdir("/dev/shm")
        if name.startswith(("dataflow", "torch_", "psm_", "pymp-"))
    }


# --- carrying out ---------------------------------------------------------------------------------


def _carry_out(trial: Trial) -> None:
    """Run, disturb, and resume until the run is complete; a resume is disturbed where the case says
    so.
    """
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
    raise AssertionError(
        f"the run is not complete after three resumes, the last of which ended with {code}"
    )


def _first_command(trial: Trial) -> list[str]:
    kind = KINDS[trial.case.kind]
    common = [
        "--steps",
        STEPS,
        "--name",
        trial.case.kind,
        "--runs",
        trial.runs,
        "--threads",
        1,
        "--no-progress",
    ]
    stored = ["--checkpoint-every", 2, "--overwrite", "--folder", trial.folder]
    return [
        "run",
        f"torture_graphs.py:{kind.function}",
        *map(str, common),
        *map(str, stored),
        *kind.flags,
    ]


def _next_command(trial: Trial) -> list[str]:
    """resume; run again where the signal came before the run folder had its record."""
    recorded = all(
        (trial.run / name).is_file() for name in ("graph.json", "options.json", "versions.json")
    )
    return ["resume", str(trial.run)] if recorded else _first_command(trial)


def _start(trial: Trial, command: list[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join(map(str, (kills.ROOT, trial.folder)))
    environment = os.environ | {
        kills.MARK: trial.mark,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "TMPDIR": str(trial.temporary),
    }
    return subprocess.Popen(
        [sys.executable, "-c", _CALL, *command],
        cwd=trial.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _undisturbed(trial: Trial, command: list[str]) -> int:
    made = _start(trial, command)
    output = made.communicate(timeout=_SECONDS_OF_RESUME)[0]
    _gone(trial)
    assert "Traceback" not in output, f"a traceback:\n{output[-3000:]}"
    assert made.returncode == 0, f"the resume ended with {made.returncode}:\n{output[-3000:]}"
    return made.returncode


def _disturbed(trial: Trial, command: list[str], when: str, sent: str, draw: random.Random) -> int:
    """Start, wait for the moment, send; what has to hold of the exit is asserted."""
    made = _start(trial, command)
    at = _step(trial.run)
    if _wait_for(_moment(trial, when, draw), made):
        _send(trial, made, sent, draw)
    try:
        output = made.communicate(timeout=_SECONDS_OF_RESUME)[0]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it has not ended {_SECONDS_OF_RESUME:g} s after {sent}") from None
    _gone(trial)
    trial.said += [
        line
        for line in output.splitlines()
        if re.search(r"stopped by|ended (at once )?by|stopping", line)
    ]
    assert "Traceback" not in output, f"a traceback:\n{output[-3000:]}"
    assert "Exception ignored" not in output, (
        f"an exception in a place where nobody hears it:\n{output[-3000:]}"
    )
    _right_exit(trial, made.returncode, sent, output)
    assert _step(trial.run) >= min(at, _stored(trial.run)), (
        "Steps before the last checkpoint were lost"
    )
    return made.returncode


def _right_exit(trial: Trial, code: int, sent: str, output: str) -> None:
    """0 where the run was complete before the signal could count, or went on as after STOP; else
    what it leads to.
    """
    number = {"INT": 2, "TERM": 15, "HUP": 1, "again": 15, "twice": 15}.get(sent, 0)
    expected = (
        {0} if sent == "STOP" else {0, -signal.SIGKILL} if sent == "KILL" else {0, 128 + number}
    )
    if code == -number and number and not output.strip():
        return  # Python itself was about to begin: a shell shows it as 128 and the number, too
    assert code in expected, f"exit {code}, expected one of {sorted(expected)}:\n{output[-3000:]}"
    if code == 0:
        assert _complete(trial.run), f"exit 0, and the run is not complete:\n{output[-3000:]}"
    elif sent != "KILL":
        assert trial.said, f"nothing says why it ended:\n{output[-3000:]}"
    if code == 128 + number and "stopped by" in output and _step(trial.run):
        assert _stored(trial.run) == _step(trial.run), (
            "it stopped without a checkpoint of its last Step"
        )


def _moment(trial: Trial, when: str, draw: random.Random) -> Callable[[], bool]:
    """Whether it has come."""
    end = time.monotonic() + draw.uniform(1.0, 8.0)
    step = {"begin": 0, "end": STEPS - 1}.get(when, draw.randint(1, STEPS - 2))
    begins = trial.run / "logs"
    if when in ("start", "resume"):
        return lambda: time.monotonic() >= end
    if when == "begin":
        return lambda: any("begins after step" in log.read_text() for log in begins.glob("*.log"))
    if when == "checkpoint":
        folder = trial.run / "checkpoints"
        return lambda: any(folder.glob(".tmp-step_*")) or _step(trial.run) >= STEPS - 1
    return lambda: _step(trial.run) >= step


def _wait_for(come: Callable[[], bool], made: subprocess.Popen[str]) -> bool:
    """False where it ended before."""
    while not come():
        with contextlib.suppress(subprocess.TimeoutExpired):
            made.wait(0.005)
            return False
    return made.poll() is None


def _send(trial: Trial, made: subprocess.Popen[str], sent: str, draw: random.Random) -> None:
    if sent == "STOP":
        _stop_and_go_on(trial, made, draw)
        return
    name = {"again": "TERM", "twice": "TERM"}.get(sent, sent)
    number = signal.Signals[f"SIG{name}"]
    to = os.killpg if trial.case.group and sent != "KILL" else os.kill
    with contextlib.suppress(ProcessLookupError):
        to(made.pid, number)
        if sent == "twice":
            to(made.pid, number)
        if sent == "again" and _told(trial, made):
            to(made.pid, number)


def _told(trial: Trial, made: subprocess.Popen[str]) -> bool:
    """Read until the first signal is told of; False where the run ended instead."""
    assert made.stdout is not None
    for line in made.stdout:
        trial.said.append(line.strip())
        if "stopping after this Step" in line:
            return True
    return False


def _stop_and_go_on(trial: Trial, made: subprocess.Popen[str], draw: random.Random) -> None:
    """The whole run, or some of its processes, stand still for a moment."""
    there = kills.alive(trial.mark)
    chosen = there if trial.case.group else draw.sample(there, max(1, len(there) // 2))
    for number, seconds in ((signal.SIGSTOP, draw.uniform(0.1, 1.0)), (signal.SIGCONT, 0.0)):
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            made.wait(seconds)


def _gone(trial: Trial) -> None:
    kills.gone(trial.mark)


def _end_all(trial: Trial) -> None:
    for pid in kills.alive(trial.mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# --- what has to hold -----------------------------------------------------------------------------


def _step(run: Path) -> int:
    """How many Steps are recorded."""
    lines = run / "metrics.jsonl"
    return lines.read_bytes().count(b"\n") if lines.is_file() else 0


def _stored(run: Path) -> int:
    """The Step of the last checkpoint."""
    return max(
        (int(p.name.removeprefix("step_")) for p in (run / "checkpoints").glob("step_*")), default=0
    )


def _complete(run: Path) -> bool:
    return _step(run) == STEPS and _stored(run) == STEPS


def _prove(trial: Trial, references: Mapping[str, Path]) -> None:
    """Of a run that was disturbed and then completed."""
    from engine.checkpoint.store import CheckpointStore
    from engine.observe.samples import read_samples
    from tests.kit.runs import metrics, timeless, weights

    kind, rows = KINDS[trial.case.kind], metrics(trial.run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), (
        "the metrics are not complete"
    )
    latest = CheckpointStore(trial.run / "checkpoints").latest()
    assert latest is not None, "there is no checkpoint"
    assert latest.step == STEPS, f"the last intact checkpoint is of step {latest.step}"
    samples = read_samples(trial.run / "samples").to_pylist()
    for node in {row["node"] for row in samples}:
        kills.whole_groups_once(
            node, [row for row in samples if row["node"] == node], SAMPLES, BATCH * STEPS
        )
    assert max(row["policy/lag/max"] for row in rows) <= kind.max_lag, "a row is older than max_lag"
    if kind.exact:
        reference = references[_compared_with(trial.case.kind)]
        made, wanted = timeless(rows), timeless(metrics(reference))
        made, wanted = kills.undisturbed_by_repeats(made), kills.undisturbed_by_repeats(wanted)
        assert made == wanted, f"other numbers: {list(kills.differences(made, wanted))[:5]}"
        assert weights(latest.path) == weights(reference / latest.path.relative_to(trial.run)), (
            "other weights"
        )


def _compared_with(kind: str) -> str:
    """Several ranks add in another order than one; in all other places the numbers are those of one
    process.
    """
    return kind if "--ranks" in KINDS[kind].flags else KINDS[kind].function


def _reference(folder: Path, name: str) -> Path:
    """The folder of a run that nobody disturbs."""
    kind = name if name in KINDS else "one"
    trial = _trial(
        Case(kind=kind, sent="", when="", group=False, seed=0), folder, f"undisturbed_{name}"
    )
    assert _undisturbed(trial, _first_command(trial)) == 0
    return trial.run


def main() -> None:
    """One case again: `python -m tests.torture.signals '{"kind": ..., "sent": ..., "when": ...,
    ...}'`.
    """
    case = Case(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory(prefix="torture_") as made:
        _prepare(Path(made))
        name = _compared_with(case.kind)
        references = {name: _reference(Path(made), name)} if KINDS[case.kind].exact else {}
        print(_outcome(case, Path(made), references))


if __name__ == "__main__":
    main()
