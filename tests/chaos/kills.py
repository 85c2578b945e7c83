"""Real SIGKILLs at random moments, over every kind of process of a run.

    python -m tests.chaos.kills --kills 50 --seed 0

Each trial runs one case of victim.py, kills some of its processes (the coordinator's, a Worker's, a
reward child's) at random moments, resumes it where the coordinator is gone or has given up (as it
has to where a few attempts in a row end without a Step), and then asserts of what the run left:

    every admitted row trained exactly once, no group split, no row older than max_lag
    at max_lag 0: metrics and weights of a run in one process that nobody disturbed, to the bit
    after every exit: no process, shared memory or socket file of the run within 10 s

Owns: the killing and what is asserted. Does not own: the runs (victim.py).
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine.attempts import FRUITLESS
from tests.chaos.victim import BATCH, CASES, STEPS, Case

ROOT = Path(__file__).resolve().parents[2]
MARK = "DATAFLOW_CHAOS"
"""A variable in the environment of a trial, which every process of it inherits."""

GONE_WITHIN = 10.0
TRIAL_LIMIT = 240.0


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of a trial. kind: coordinator, worker:NAME or child (what a Worker started)."""

    pid: int
    kind: str


@dataclass(kw_only=True)
class Trial:
    """One run with its kills."""

    case: str
    seed: int
    kills: int
    folder: Path
    runs: Path
    kind: str = ""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    killed: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.runs / self.case


# --- processes of a trial -------------------------------------------------------------------------


def alive(mark: str) -> list[int]:
    """Every process of a trial that has not ended."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0") and _running(entry):
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def _running(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"


def processes(trial: Trial, main: int) -> list[Process]:
    """The processes of a trial, by kind."""
    found = []
    for pid in alive(trial.mark):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            output = os.readlink(f"/proc/{pid}/fd/1")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if pid == main:
            found.append(Process(pid=pid, kind="coordinator"))
        elif parent == main and b"engine.launch.worker_process" in command:
            found.append(Process(pid=pid, kind=f"worker:{Path(output).stem}"))
        else:
            found.append(Process(pid=pid, kind="child"))
    return found


def everything_gone(trial: Trial) -> None:
    """Raises AssertionError where something of a trial is there after the time that it has to go
    in.
    """
    gone(trial.mark)
    sockets = [p for p in trial.runs.rglob("*") if p.is_socket()]
    assert not sockets, f"socket files are left: {sockets}"


def gone(mark: str) -> None:
    """Raises AssertionError where a process is there after the time that it has to go in."""
    end = time.monotonic() + GONE_WITHIN
    for pid in alive(mark):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(handle) as opened:
            select.select([opened], [], [], max(0.0, end - time.monotonic()))
    left = alive(mark)
    assert not left, (
        f"processes outlived their run by {GONE_WITHIN:g} s: {[_command(pid) for pid in left]}"
    )


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    except (FileNotFoundError, ProcessLookupError):
        return f"{pid} (gone)"


# --- killing --------------------------------------------------------------------------------------


def survive(trial: Trial) -> None:
    """Run a case to its end, whoever is killed on the way."""
    draw = random.Random(trial.seed)
    left, resuming = trial.kills, False
    while True:
        made, before = _start(trial, resuming), len(trial.killed)
        try:
            left = _disturb(trial, made, draw, left)
            output = made.communicate(timeout=TRIAL_LIMIT)[0]
        finally:
            _end(trial, made)
        everything_gone(trial)
        if made.returncode == 0:
            return
        gave_up = (
            f"{FRUITLESS} attempts in a row came no further" in output
            and len(trial.killed) - before >= FRUITLESS
        )
        assert gave_up or made.returncode == -signal.SIGKILL, (
            f"exit {made.returncode} after {trial.killed}:\n{output[-6000:]}"
        )
        resuming = (trial.run / "options.json").is_file()


def _start(trial: Trial, resuming: bool) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.chaos.victim",
        trial.case,
        str(trial.folder),
        str(trial.runs),
    ]
    environment = {**os.environ, MARK: trial.mark, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *(["resume"] if resuming else [])],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _disturb(trial: Trial, made: subprocess.Popen[str], draw: random.Random, left: int) -> int:
    """Kill a process now and then until the run has ended or enough were killed; returns how many
    are left to kill.
    """
    while left:
        if _ended_before_a_moment(trial, made, draw):
            break
        there = processes(trial, made.pid)
        kinds = sorted({p.kind for p in there if p.kind.startswith(trial.kind)})
        if not kinds:
            continue
        kind = draw.choice(kinds)
        if kind == "coordinator" and draw.random() < 0.5:  # its death ends the others' trial
            continue
        chosen = draw.choice([p for p in there if p.kind == kind])
        try:
            os.kill(chosen.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        trial.killed.append(f"{chosen.kind} at step {_step(trial.run)}")
        left -= 1
        if chosen.kind == "coordinator":
            break
    return left


def _ended_before_a_moment(trial: Trial, made: subprocess.Popen[str], draw: random.Random) -> bool:
    """Wait for a random moment: soon, whatever the run does (it takes seconds to start), or in a
    random Step.
    """
    if draw.random() < 0.3:
        return _ended_within(made, draw.uniform(0.0, 1.5))
    wanted = draw.randint(min(_step(trial.run), STEPS - 1), STEPS - 1)
    while _step(trial.run) < wanted:
        if _ended_within(made, 0.01):
            return True
    return _ended_within(made, draw.uniform(0.0, 0.1))


def _ended_within(made: subprocess.Popen[str], seconds: float) -> bool:
    try:
        made.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _step(run: Path) -> int:
    """How many Steps have been recorded."""
    lines = run / "metrics.jsonl"
    return len(lines.read_bytes().splitlines()) if lines.is_file() else 0


def _end(trial: Trial, made: subprocess.Popen[str]) -> None:
    """Whatever happened, nothing of the trial runs on."""
    if made.poll() is None:
        made.kill()
        made.wait()
        for pid in alive(trial.mark):
            os.kill(pid, signal.SIGKILL)


# --- what has to hold -----------------------------------------------------------------------------


def proof(trial: Trial, reference: Path) -> None:
    """Assert every promise of what the run left."""
    from engine.observe.samples import read_samples
    from tests.kit.runs import metrics, timeless, weights

    case: Case = CASES[trial.case]
    rows = metrics(trial.run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["policy/lag/max"] for row in rows) <= case.max_lag
    samples = read_samples(trial.run / "samples").to_pylist()
    for node in {row["node"] for row in samples}:
        whole_groups_once(node, [row for row in samples if row["node"] == node], case.samples)
    if case.exact:
        made, wanted = undisturbed_by_repeats(timeless(rows)), timeless(metrics(reference))
        assert made == wanted, f"other numbers: {list(differences(made, wanted))[:9]}"
        last = f"checkpoints/step_{STEPS}"
        assert weights(trial.run / last) == weights(reference / last)


def whole_groups_once(
    node: str, samples: list[dict], size: int, positions: int = BATCH * STEPS
) -> None:
    """Assert that a train node trained every row just once, and groups in one Step."""
    keys = [(row["position"], row["sample"]) for row in samples]
    twice = [key for key, count in Counter(keys).items() if count > 1]
    assert not twice, f"{node} trained twice: {twice}"
    assert sorted(keys) == [(p, s) for p in range(positions) for s in range(size)], (
        f"{node}: rows are missing"
    )
    steps: dict[int, set[int]] = {}
    for row in samples:
        steps.setdefault(row["position"], set()).add(row["step"])
    split = {position: found for position, found in steps.items() if len(found) > 1}
    assert not split, f"{node}: groups in two Steps: {split}"


def differences(
    made: list[dict], wanted: list[dict]
) -> Iterator[tuple[int, str, float | None, float | None]]:
    """(Step, metric, found, expected), in the order of the Steps."""
    for one, other in zip(made, wanted, strict=True):
        for name in sorted(one.keys() | other.keys()):
            if one.get(name) != other.get(name):
                yield one["step"], name, one.get(name), other.get(name)


def undisturbed_by_repeats(rows: list[dict]) -> list[dict]:
    """Without the count of reward calls that were made again in a fresh child, which is what
    killing one leads to.
    """
    return [
        {k: v for k, v in row.items() if not k.endswith("/passed_when_repeated")} for row in rows
    ]


def undisturbed(name: str, folder: Path, runs: Path) -> Path:
    """The folder of the case's run in one process."""
    from engine.api import run

    case = CASES[name]
    return run(case.graph(folder), case.options(runs, f"{name}_undisturbed", inproc=True)).folder


# --- the whole ------------------------------------------------------------------------------------


def trials(seed: int, folder: Path, cases: list[str], kind: str) -> Iterator[Trial]:
    """Trials without end, over the cases in turn."""
    draw = random.Random(seed)
    for number in itertools.count():
        case = cases[number % len(cases)]
        kills = draw.randint(2, 5)
        yield Trial(
            case=case,
            seed=seed * 1000 + number,
            kills=kills,
            folder=folder,
            runs=folder / f"{number}",
            kind=kind,
        )


def make_data(folder: Path) -> None:
    """A tiny model and its prompts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tests.kit.models import save_tiny

    save_tiny(folder / "model", layers=1)
    asked = [a + b for a in "abcdefgh" for b in "xyz"]
    pq.write_table(
        pa.table({"prompt": asked, "answer": [a[0] for a in asked]}), folder / "train.parquet"
    )
    pq.write_table(
        pa.table({"prompt": ["q", "rr", "sss"], "answer": ["q", "r", "s"]}), folder / "test.parquet"
    )


def one(trial: Trial, reference: Path) -> Iterator[str]:
    """Carry out a trial; the kinds of process that were killed."""
    start = time.monotonic()
    try:
        survive(trial)
        proof(trial, reference)
    finally:
        seconds = time.monotonic() - start
        print(
            f"{trial.case} (seed {trial.seed}): {seconds:.0f} s, killed {trial.killed}", flush=True
        )
    return (kind.partition(" ")[0].partition(":")[0] for kind in trial.killed)


def main() -> None:
    parser = argparse.ArgumentParser(description="kill real runs and see that nothing is lost")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument(
        "--kind", default="", help="kill only this kind: coordinator, child, or worker:NAME"
    )
    given = parser.parse_args()
    by_kind: Counter[str] = Counter()
    names = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="chaos_") as made:
        folder = Path(made)
        make_data(folder)
        references: dict[str, Path] = {}
        for trial in trials(given.seed, folder, given.cases.split(","), given.kind):
            if by_kind.total() >= given.kills:
                break
            if trial.case not in references:
                references[trial.case] = undisturbed(trial.case, folder, folder / "undisturbed")
            by_kind.update(one(trial, references[trial.case]))
    left = set(os.listdir("/dev/shm")) - names
    assert not left, f"shared memory is left: {left}"
    print(f"survived {by_kind.total()} kills: {dict(by_kind)}")


if __name__ == "__main__":
    main()
