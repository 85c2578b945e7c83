"""Functions that fight their process: forged answers, garbage, closed descriptors, helpers."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dataflow.errors import KernelError
from operators.kernels import scoring_keeper, scoring_parent
from operators.kernels.scoring_frames import (
    HEADER,
    LARGEST_ANSWER,
    MARK,
    Answers,
    Garbled,
    decode_answer,
)
from operators.kernels.scoring_keeper import sweep
from tests.kit.nothing_left import descriptors
from tests.kit.processes import ended, limited, start_python
from tests.kit.scoring import answers, rewards, scoring

pytestmark = pytest.mark.timeout(180)


BROKE = "broke the connection to its process: "
LOGGED = "logged a metric that "
HOSTILE = {
    "fork": BROKE + "process ",
    "garbage": BROKE + r"b'\x00garbage\x1b[2J",
    "closed": "lost its process, which ended with exit code 1",
    "odd": "raised Odd: (its str raised ZeroDivisionError)",
    "long": "raised ValueError: xxx",
    "nan": LOGGED + "'ratio' has the value nan",
    "two lines": LOGGED + r"has the name 'a\nb'",
    "own name": LOGGED + "has the name 'mean', which every reward has already",
    "applied": LOGGED + "has the name 'applied', which every reward has already",
    "two words": LOGGED + "has the name 'two words', which no metric can have; one like",
    "no name": LOGGED + "has a name of type int, not str",
}
"""What the last completion asks for, and what is said of it."""
METRICS: dict[str, tuple[Any, float]] = {
    "nan": ("ratio", float("nan")), "own name": ("mean", 1.0),
    "applied": ("applied", 1.0), "two words": ("two words", 1.0), "no name": (7, 1.0),
}  # fmt: skip


class Odd(BaseException):
    def __str__(self) -> str:
        raise ZeroDivisionError


def hostile(completions: list[str], log_metric: Any) -> list[float]:
    """Does what the last completion says."""
    match completions[-1]:
        case "fork":
            first, second = os.pipe()
            if os.fork() > 0:
                os.close(second)
                os.read(first, 1)  # until the fork, which answers too, is gone
        case "garbage":
            for descriptor in range(3, 64):
                with contextlib.suppress(OSError):
                    os.write(descriptor, b"\x00garbage\x1b[2J" * 9)
        case "closed":
            os.closerange(3, 64)
        case "odd":
            raise Odd
        case "long":
            raise ValueError("x" * 10_000_000 + "\x1b[2J")
        case "two lines":  # of which it catches the error
            with contextlib.suppress(ValueError):
                log_metric("a\nb", 1.0)
        case what if what in METRICS:
            log_metric(*METRICS[what])
    return [1.0] * len(completions)


def test_whatever_it_does_is_the_fault_of_its_row() -> None:
    with scoring(hostile, timeout=20, on_error="drop_group") as (kernel, session):
        for what, said in HOSTILE.items():
            session.tombstones.clear()
            assert list(kernel.run(answers([what]))) == []
            [told] = session.failed.values()
            assert told.startswith(f"node 'score': reward 'hostile' {said}"), told
            assert "(row 10/0, step 3)" in told
            assert ". Fix: " in told
            assert "\x1b" not in told
            assert len(told) < 100_000
        session.tombstones.clear()
        [batch] = kernel.run(answers(["fine", "garbage"]))
        assert batch.keys.position.tolist() == [10], "the chunk is run again row by row"
        assert list(session.failed) == [(11, 0, 0)]
        assert not session.metrics


def frame(
    body: bytes, *, pid: int = 5, number: int = 2, mark: bytes = MARK, size: int | None = None
) -> bytes:
    return HEADER.pack(mark, pid, number, len(body) if size is None else size) + body


GOOD = msgspec.msgpack.encode({"values": [1.0, None], "metrics": [("a", 1.0)]})


def packed(*values: float, **fields: Any) -> bytes:
    """An answer of these values."""
    return frame(msgspec.msgpack.encode({"values": values, **fields}))


CANNOT_BE_READ = "an answer came that cannot be read"


@pytest.mark.parametrize("came,said", [
    (frame(GOOD, mark=b"dfr\x02"), "came where its answer was expected"),
    (b"\x80", "came where its answer was expected"),
    (frame(GOOD, pid=6), "process 6, which it had forked, answered, too"),
    (frame(GOOD, number=1), "an answer to call 1 came where one to call 2 was expected"),
    (frame(b"", size=LARGEST_ANSWER + 1), f"an answer of {LARGEST_ANSWER + 1} bytes came"),
    (frame(b"\xc1"), CANNOT_BE_READ),
    (frame(b"\x91" * 100_000), CANNOT_BE_READ),
    (frame(pickle.dumps([1.0, 2.0])), CANNOT_BE_READ),
    (frame(b"\x80"), "an answer with 0 values came where 2 are due"),
    (packed(1.0, float("inf")), "a value that is no finite float32"),
    (packed(1, 2, metrics=[("a\x1b", 1)]), r"has the name 'a\x1b'"),
    (packed(1, 2, metrics=[("a", float("nan"))]), "has the value nan"),
])  # fmt: skip
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_what_is_no_answer_is_refused_however_it_comes(came: bytes, said: str, step: int) -> None:
    with pytest.raises(Garbled, match=re.escape(said)):
        outcome_of(came, step)


def outcome_of(came: bytes, step: int) -> None:
    """What a kernel makes of bytes that come in pieces of this size."""
    stream, payload = Answers(), None
    for at in range(0, len(came), step):
        assert payload is None
        stream.add(came[at : at + step])
        payload = stream.take(5, 2)
    if payload is not None:
        decode_answer(payload, 2)


def test_two_answers_to_one_call_are_refused() -> None:
    with pytest.raises(Garbled, match="more than one answer came"):
        outcome_of(frame(GOOD) + frame(GOOD), 1 << 20)
    outcome_of(frame(GOOD), 1)


def test_a_faults_text_is_bounded_whoever_wrote_it() -> None:
    fault = {"kind": "raised", "text": "x" * 1_000_000, "detail": "y" * 1_000_000}
    cut = decode_answer(msgspec.msgpack.encode({"fault": fault}), 2).fault
    assert cut is not None
    assert max(len(cut.text), len(cut.detail)) < 21_000


def leaves_much(completions: list[str], folder: list[str]) -> list[float]:
    """A child that stays, one in its own session that holds stdout, one that ignores SIGTERM."""
    script = "import os, signal, sys, pathlib; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    script += "pathlib.Path(sys.argv[1], str(os.getpid())).touch(); signal.pause()"
    for how in ({}, {"start_new_session": True}):
        subprocess.Popen([sys.executable, "-c", script, folder[0]], **how)  # type: ignore[call-overload]
    if os.fork() == 0:  # a daemon, as they are made
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", script, folder[0]])
        os._exit(0)
    while len(os.listdir(folder[0])) < 3:
        time.sleep(0.01)
    if completions[-1] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if completions[-1] == "kill keeper":
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    return [1.0] * len(completions)


@pytest.mark.long
@pytest.mark.parametrize("how", ["fine", "die", "kill keeper"])
def test_what_a_function_started_ends_with_its_process(tmp_path: Path, how: str) -> None:
    with scoring(leaves_much, timeout=30, on_error="drop_group") as (kernel, session):
        list(kernel.run(answers([how], folder=[str(tmp_path)])))
        pids = [int(name) for name in os.listdir(tmp_path)]
        # where it is fine, what it started may serve the next call
        assert [ended(pid, 0) for pid in pids] == [how != "fine"] * 3
        assert len(session.failed) == (how != "fine")
    assert all(ended(pid, 0) for pid in pids)


PARENT = """
import sys
import pyarrow as pa
from operators.kernels.scoring_process import Children
from test_scoring_faults import leaves_much

children = Children(["leaves_much"], [leaves_much], timeout=60.0)
children.score({0: pa.RecordBatch.from_pydict({"completion": ["fine"], "folder": [sys.argv[1]]})})
print("left", *children.pids(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_what_a_function_started_ends_when_the_kernels_process_is_killed(
    tmp_path: Path, stopped: bool
) -> None:
    """Also where somebody has stopped the keeper and the function's process."""
    how: Any = {"path": [Path(__file__).parent], "stdin": subprocess.PIPE, "stderr": None}
    with limited(start_python("-c", PARENT, tmp_path, **how)) as parent:
        assert parent.stdout is not None
        left = parent.stdout.readline().split()
        assert left[0] == "left"
        pids = [int(pid) for pid in (*left[1:], *os.listdir(tmp_path))]
        keeper = int(Path(f"/proc/{left[1]}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in (keeper, pids[0]) if stopped else ():
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
        assert parent.stdout.read() == "", "nobody below it has its standard output"
    assert len(pids) == 4
    assert all(ended(pid, 20) for pid in (keeper, *pids))


def test_what_is_printed_is_bounded_and_a_death_shows_the_last_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def floods(completions: list[str]) -> list[float]:
        for number in range(20_000):
            print(f"line {number}")
        os.write(2, b"the last words")
        if "die" in completions:
            os._exit(7)
        return [1.0 for _ in completions]

    with scoring(floods, timeout=30) as (kernel, _):
        assert rewards(kernel, answers(["x"])) == [1.0]
        said = [record.getMessage() for record in caplog.records]
        assert said[0] == "reward 'floods' printed: line 0"
        assert sum(map(len, said)) < 100_000
        assert said[-1].endswith("bytes more, which are not kept")
        with pytest.raises(KernelError) as caught:
            list(kernel.run(answers(["die"])))
    assert "which ended with exit code 7 (row 10/0, step 3)" in str(caught.value)
    assert str(caught.value).endswith("  | line 19999\n  | the last words")


def test_a_time_out_says_where_the_function_stood_even_where_it_holds_the_lock() -> None:
    def holds(completions: list[str]) -> list[float]:
        import re

        return [float(re.match("(a+)+$", "a" * 60 + "b") is None)]  # longer than there are atoms

    with scoring(holds, timeout=1.0) as (kernel, _), pytest.raises(KernelError) as caught:
        list(kernel.run(answers(["x"])))
    told = str(caught.value)
    assert "timed out after 1 s" in told
    assert "It stood at (the innermost call first):" in told
    assert "in holds" in told
    assert "scoring_child" not in told


ONE_LONG = type("L", (list,), {"__len__": lambda self: 1})
MATRIX = type("A", (list,), {"shape": (1, 1)})
NO_REPR = type("R", (), {"__repr__": lambda self: 1 / 0})


@pytest.mark.parametrize("make,said", [
    (lambda: ONE_LONG([1.0, 2.0]), "of length 1 with another number"),
    (lambda: MATRIX([1.0]), r"an array of shape (1, 1), expected (1,)"),
    (lambda: [[1.0]], "returned [1.0] as value 0"),
    (lambda: [10**400], "as value 0"),
    (lambda: [NO_REPR()], "whose repr raised ZeroDivisionError"),
])  # fmt: skip
def test_what_is_no_list_of_numbers(make: Callable[[], Any], said: str) -> None:
    with (
        scoring(lambda completions: make(), inproc=True) as (kernel, _),
        pytest.raises(KernelError) as caught,
    ):
        list(kernel.run(answers(["x"])))
    assert said in str(caught.value)


def test_a_process_that_cannot_start_is_named_and_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = descriptors()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with (
        pytest.raises(KernelError, match=r"reward 'hostile': expected its process to start.*Fix: "),
        scoring(hostile),
    ):
        pytest.fail("it opened")
    assert descriptors() == before


FORKS_NOTHING = """
import errno, os
def fork():
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
os.fork = fork
"""


@pytest.mark.usefixtures("own_interpreters")
def test_a_fork_that_fails_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scoring_parent, "_BOOTSTRAP", FORKS_NOTHING + scoring_parent._BOOTSTRAP)
    message = r"process to start, found: Resource temporarily unavailable\. Fix: .*\(ulimit -u"
    with pytest.raises(KernelError, match=message), scoring(hostile):
        pytest.fail("it opened")
    assert "Traceback" not in caplog.text


EXECS_FOR_EVER = 'exec /proc/self/exe -c "$0" "$0"'
"""A shell program that becomes itself: it is most of the time in the middle of an exec."""


@pytest.mark.long
def test_a_process_in_the_middle_of_an_exec_is_swept_up_too() -> None:
    for number in range(40):
        words = ["/bin/sh", "-c", EXECS_FOR_EVER, EXECS_FOR_EVER]
        mark = {"DATAFLOW_SWEPT": str(number)}
        with (
            limited(subprocess.Popen(words, env=mark, text=True)) as one,
            limited(subprocess.Popen(words, env=mark, text=True)) as other,
        ):
            sweep(f"DATAFLOW_SWEPT={number}")
            assert ended(one.pid, 0.0)
            assert ended(other.pid, 0.0)


def test_a_process_whose_environment_cannot_be_seen_at_first_is_swept_up_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, seen = [], scoring_keeper._environment

    def later(pid: int) -> list[bytes] | None:
        if pid == process.pid:
            looks.append(pid)
            return None if len(looks) == 1 else seen(pid)
        return seen(pid)

    monkeypatch.setattr(scoring_keeper, "_environment", later)
    asleep = [sys.executable, "-c", "import signal; signal.pause()"]
    mark = {"DATAFLOW_SWEPT": "later"}
    with limited(subprocess.Popen(asleep, env=mark, text=True)) as process:
        sweep("DATAFLOW_SWEPT=later")
        assert ended(process.pid, 0.0)
        assert len(looks) > 1
