"""`dataflow profile`: real kernels in child processes, and how such a process may end."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest

from dataflow.errors import DataError, RunError
from engine.cli import main
from engine.plan.cost.profile import ProfiledNode, read_profile
from engine.plan.cost.transfers import MESSAGE
from engine.predict.profile.child import run_in_child
from tests.kit.tiny_runs import TinyRuns


def counted(last: int) -> Iterator[int]:
    yield from range(last)


def ends_badly(how: str) -> Iterator[str]:
    yield "begun"
    if how == "error":
        raise DataError("rows: expected some. Fix: give some.")
    if how == "killed":  # as Linux does for want of memory
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("a fault of ours")


def child(task: object) -> tuple[tuple[object, ...], bool]:
    """What it told, and whether it ended for want of memory."""
    result = run_in_child(task, threads=1, needed={"SAID": "yes"}, title="a test")  # type: ignore[arg-type]
    return result.outputs, result.out_of_memory


def test_a_child_tells_what_it_yields() -> None:
    assert child(partial(counted, 3)) == ((0, 1, 2), False)


def test_a_child_has_its_threads_and_variables() -> None:
    def seen() -> Iterator[str]:
        yield from (os.environ["OMP_NUM_THREADS"], os.environ["SAID"])

    assert child(seen) == (("1", "yes"), False)


def test_a_child_that_is_killed_has_told_what_came_before() -> None:
    assert child(partial(ends_badly, "killed")) == (("begun",), True)


def test_errors_of_a_child_are_raised() -> None:
    with pytest.raises(DataError, match=r"^rows: expected some. Fix: give some.$"):
        child(partial(ends_badly, "error"))
    told = r"(?s)^profile: a test: its process ended with exit code 1. Fix: .*a fault of ours"
    with pytest.raises(RunError, match=told):
        child(partial(ends_badly, "fault"))


def test_an_allocation_without_memory_fails_in_the_child_alone() -> None:
    def greedy() -> Iterator[str]:
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        yield "limited" if 0 < limit < total_memory() else f"limit {limit}"
        try:
            bytearray(limit)  # of which no byte is there before it is refused
        except MemoryError:
            yield "refused"

    assert child(greedy) == (("limited", "refused"), False)


def total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.long
@pytest.mark.repeats(turn=1)  # the README's commands profile a graph, too, and simulate with that
def test_a_profile_of_a_graph(tiny: TinyRuns, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.runs / "profile.json"
    data = ("--data", str(tiny.folder / "train.parquet"), "--base", str(tiny.folder / "model"))
    sizes = ("--n", "2", "--batch", "4", "--max-tokens", "8", "--beta", "0.1")
    words = ("profile", "graphs.grpo:grpo", *data, *sizes, "--reward-fn", f"{__name__}:letters")
    how = (
        "--quick",
        "--threads",
        "1",
        "--function-steps",
        "1",
        "--busy",
        "accept",
        "--out",
        str(path),
    )
    assert main([*words, *how]) == 0
    said = capsys.readouterr().out
    found = read_profile(path)
    entries = {(n.node, n.kind): n for n in found.nodes}
    assert set(entries) == {
        ("rollout", "decode"), ("rollout", "prefill"), ("reference", "forward"),
        ("train_policy", "train"),
    }  # fmt: skip
    for (node, kind), entry in entries.items():
        assert f"{node} ({kind}, 1 thread)" in said or kind == "prefill"
        longer = f"; in a run {entry.in_run:.2f} times as long"
        line = next((line for line in said.splitlines() if line.startswith(f"{node} ({kind}")), "")
        assert (longer in line) == (entry.in_run != 1.0)
        _is_measured(entry)
    assert f"meanwhile {found.load.words}\n" in said
    compared = "others disturbed the short run" not in said
    assert (entries["train_policy", "train"].in_run != 1.0) == compared
    assert {"score", "advantage"} <= set(found.functions)
    assert found.functions["score"] >= 0.01, "letters() sleeps"
    assert 0.0 < found.cpu["score"] < 0.5, "and computes little"
    assert " us a row, of which it computes " in said
    assert 0.0 < found.message < 0.1, "of the run, whose nodes are in one Worker"
    assert found.message != MESSAGE
    assert found.device.name == "cpu"
    assert f"written to {path}: --profile {path}" in said


def letters(completions: list[str], **columns: object) -> list[float]:
    """Takes 10 ms a row, and a little."""
    time.sleep(0.01 * len(completions))
    return [float(len(text)) for text in completions]


def _is_measured(entry: ProfiledNode) -> None:
    assert entry.coefficients.origin == "fitted"
    assert 1.0 <= entry.beside < 50.0
    assert entry.opening > 0.0
    assert bool(entry.cells) == (entry.kind != "prefill")
    for cell in entry.cells:
        assert cell.seconds is not None
        assert cell.seconds > 0
        assert cell.fitted is not None
        assert cell.peak > 0
        assert entry.peak.of(cell.estimated) >= cell.peak
