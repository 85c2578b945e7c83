"""Functions that fight their process: forks that answer, garbage, closed descriptors; what they
start ends, too.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_scoring import chunk, ended, kernel, rewards

from dataflow.errors import KernelError
from operators.kernels.scoring_frames import (
    HEADER,
    LARGEST_ANSWER,
    MARK,
    Answers,
    Garbled,
    judged_answer,
)

pytestmark = pytest.mark.timeout(180)


def hostile(completions: list[str], log_metric: Any) -> list[float]:
    """Does what the last completion says."""
    what = completions[-1]
    if what == "fork":
        first, second = os.pipe()
        if os.fork() == 0:
            return [0.5] * len(completions)  # and answers
        os.close(second)
        os.read(first, 1)  # until the fork is gone
    elif what == "garbage":
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\x00garbage\x1b[2J" * 9)
    elif what == "closed":
        os.closerange(3, 64)
    elif what == "exits":
        raise SystemExit(0)
    elif what == "base":
        raise type("Odd", (BaseException,), {"__str__": lambda self: 1 / 0})
    elif what == "long":
        raise ValueError("x" * 10_000_000 + "\x1b[2J")
    elif what == "unpicklable":
        raise type("Local", (Exception,), {"lock": threading.Lock()})("cannot be sent\nsecond line")
    elif what == "nan metric":
        log_metric("ratio", float("nan"))
    elif what == "swallowed":
        with contextlib.suppress(ValueError):
            log_metric("a\nb", 1.0)
    elif what == "own name":
        log_metric("mean", 1.0)
    elif what == "no name":
        log_metric(7, 1.0)
    return [1.0] * len(completions)


BROKE = "broke the connection to its process: "
SAID = {
    "fork": BROKE + "process ",
    "garbage": BROKE + r"b'\x00garbage\x1b[2J",
    "closed": "lost its process, which ended with exit code 1",
    "exits": "raised SystemExit: 0",
    "base": "raised Odd: (its str raised ZeroDivisionError)",
    "long": "raised ValueError: xxx",
    "unpicklable": "raised Local: cannot be sent (row",
    "nan metric": "logged a metric that 'ratio' has the value nan",
    "swallowed": r"logged a metric that has the name 'a\nb'",
    "own name": "logged a metric that has the name 'mean', which every reward has already",
    "no name": "logged a metric that has a name of type int, not str",
}


def test_whatever_it_does_is_the_fault_of_its_row() -> None:
    with kernel(hostile, timeout=20, on_error="drop_group") as (made, session):
        for what, said in SAID.items():
            session.tombstones.clear()
            assert list(made.run(chunk([what]))) == []
            [told] = session.tombstones.values()
            assert told.startswith(f"node 'score': reward 'hostile' {said}"), told
            assert "(row 10/0, step 3)" in told
            assert ". Fix: " in told
            assert "\x1b" not in told
            assert len(told) < 100_000
        session.tombstones.clear()
        [batch] = made.run(chunk(["fine", "garbage"]))
        assert batch.keys.position.tolist() == [10], "the chunk is run again row by row"
        assert list(session.tombstones) == [(11, 0, 0)]
        assert not session.metrics


def frame(
    body: bytes, *, pid: int = 5, number: int = 2, mark: bytes = MARK, size: int | None = None
) -> bytes:
    return HEADER.pack(mark, pid, number, len(body) if size is None else size) + body


GOOD = msgspec.msgpack.encode({"values": [1.0, None], "metrics": [("a", 1.0)]})


@pytest.mark.parametrize(
    "came, said",
    [
        (frame(GOOD, mark=b"dfr\x02"), "came where its answer was expected"),
        (b"\x80", "came where its answer was expected"),
        (frame(GOOD, pid=6), "process 6, which it had forked, answered, too"),
        (frame(GOOD, number=1), "an answer to call 1 came where one to call 2 was expected"),
        (frame(b"", size=LARGEST_ANSWER + 1), f"an answer of {LARGEST_ANSWER + 1} bytes came"),
        (frame(b"\xc1"), "an answer came that cannot be read"),
        (frame(b"\x91" * 100_000), "an answer came that cannot be read"),
        (frame(pickle.dumps([1.0, 2.0])), "an answer came that cannot be read"),
        (frame(b"\x80"), "an answer with 0 values came for 2 rows"),
        (
            frame(msgspec.msgpack.encode({"values": [1.0, float("inf")]})),
            "a value that is no finite float32",
        ),
        (
            frame(msgspec.msgpack.encode({"values": [1, 2], "metrics": [("a\x1b", 1)]})),
            r"has the name 'a\x1b'",
        ),
        (
            frame(msgspec.msgpack.encode({"values": [1, 2], "metrics": [("a", float("nan"))]})),
            "has the value nan",
        ),
    ],
)
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_what_is_no_answer_is_refused_however_it_comes(came: bytes, said: str, step: int) -> None:
    with pytest.raises(Garbled, match=re.escape(said)):
        outcome_of(came, step)


def outcome_of(came: bytes, step: int) -> None:
    """What a kernel does with bytes that come so many at once."""
    answers, payload = Answers(), None
    for at in range(0, len(came), step):
        assert payload is None
        answers.add(came[at : at + step])
        payload = answers.take(5, 2)
    if payload is not None:
        judged_answer(payload, 2)


def test_two_answers_to_one_call_are_refused() -> None:
    with pytest.raises(Garbled, match="more than one answer came"):
        outcome_of(frame(GOOD) + frame(GOOD), 1 << 20)
    outcome_of(frame(GOOD), 1)


def test_a_faults_text_is_bounded_whoever_wrote_it() -> None:
    fault = {"kind": "raised", "text": "x" * 1_000_000, "detail": "y" * 1_000_000}
    cut = judged_answer(msgspec.msgpack.encode({"fault": fault}), 2).fault
    assert cut is not None
    assert max(len(cut.text), len(cut.detail)) < 21_000


def leaves_much(completions: list[str], folder: list[str]) -> list[float]:
    """A child that stays, one in a session of its own that holds standard output, and one that
    ignores SIGTERM.
    """
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


@pytest.mark.parametrize("how", ["fine", "die", "kill keeper"])
def test_what_a_function_started_ends_with_its_process(tmp_path: Path, how: str) -> None:
    with kernel(leaves_much, timeout=30, on_error="drop_group") as (made, session):
        list(made.run(chunk([how], folder=[str(tmp_path)])))
        pids = [int(name) for name in os.listdir(tmp_path)]
        assert len(pids) == 3
        if how == "fine":
            assert not any(ended(pid, 0) for pid in pids), "what it started may serve the next call"
        else:
            assert len(session.tombstones) == 1
            assert all(ended(pid, 0) for pid in pids)
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


def test_what_a_function_started_ends_when_the_kernels_process_is_killed(tmp_path: Path) -> None:
    folders = map(
        str, (Path(__file__).parent, Path(__file__).parents[1] / "unit", Path(__file__).parents[2])
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
    )
    with parent:
        assert parent.stdout is not None
        left = parent.stdout.readline().split()
        assert left[0] == "left"
        pids = [*map(int, left[1:]), *(int(name) for name in os.listdir(tmp_path))]
        parent.kill()
        assert parent.stdout.read() == "", "nobody below it has its standard output"
    assert len(pids) == 4
    assert all(ended(pid, 20) for pid in pids)


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

    with kernel(floods, timeout=30) as (made, _):
        assert rewards(made, chunk(["x"])) == [1.0]
        said = [record.getMessage() for record in caplog.records]
        assert said[0] == "reward 'floods' printed: line 0"
        assert sum(map(len, said)) < 100_000
        assert said[-1].endswith("bytes more, which are not kept")
        with pytest.raises(KernelError) as caught:
            list(made.run(chunk(["die"])))
    assert "which ended with exit code 7 (row 10/0, step 3)" in str(caught.value)
    assert str(caught.value).endswith("  | line 19999\n  | the last words")


def test_a_time_out_says_where_the_function_stood_even_where_it_holds_the_interpreters_lock() -> (
    None
):
    def holds(completions: list[str]) -> list[float]:
        import re

        return [
            float(re.match("(a+)+$", "a" * 60 + "b") is None)
        ]  # for longer than there are atoms

    with kernel(holds, timeout=1.0) as (made, _), pytest.raises(KernelError) as caught:
        list(made.run(chunk(["x"])))
    told = str(caught.value)
    assert "timed out after 1 s" in told
    assert "It stood at (the innermost call first):" in told
    assert "in holds" in told
    assert "scoring_child" not in told


def test_a_function_that_exits_in_this_process_is_an_error_too() -> None:
    def leaves(completions: list[str]) -> list[float]:
        sys.exit("enough")

    with (
        kernel(leaves, inproc=True) as (made, _),
        pytest.raises(KernelError, match="raised SystemExit: enough"),
    ):
        list(made.run(chunk(["x"])))


@pytest.mark.parametrize(
    "make, said",
    [
        (
            lambda: type("L", (list,), {"__len__": lambda self: 1})([1.0, 2.0]),
            "of length 1 with another number",
        ),
        (
            lambda: type("A", (list,), {"shape": (1, 1)})([1.0]),
            r"an array of shape (1, 1), expected (1,)",
        ),
        (lambda: {1.0}, "returned set, expected a list"),
        (lambda: (x for x in [1.0]), "returned generator, expected a list"),
        (lambda: [[1.0]], "returned [1.0] as value 0"),
        (lambda: [10**400], "as value 0"),
        (lambda: [1e39], "returned 1e+39 as value 0"),
        (
            lambda: [type("R", (), {"__repr__": lambda self: 1 / 0})()],
            "whose repr raised ZeroDivisionError",
        ),
    ],
)
def test_what_is_no_list_of_numbers(make: Callable[[], Any], said: str) -> None:
    with (
        kernel(lambda completions: make(), inproc=True) as (made, _),
        pytest.raises(KernelError) as caught,
    ):
        list(made.run(chunk(["x"])))
    assert said in str(caught.value)


def test_a_process_that_cannot_start_is_said_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with (
        pytest.raises(KernelError, match=r"reward 'hostile': expected its process to start.*Fix: "),
        kernel(hostile),
    ):
        pytest.fail("it opened")
    assert len(os.listdir("/proc/self/fd")) == before
