"""The reward kernel with child processes: what functions see, every way to fail, no orphans."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dataflow.batch import Keys
from dataflow.errors import KernelError
from dataflow.processor_time import ProcessorTime
from operators.kernels.scoring_process import Children, _stream
from tests.kit.processes import ended
from tests.kit.scoring import answers, rewards, scoring

pytestmark = pytest.mark.timeout(180)


def same(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [1.0 if c == a else 0.0 for c, a in zip(completions, answer, strict=True)]


def picky(completions: list[str]) -> list[float | None]:
    """Each completion says what happens to its row."""
    if "raise" in completions:
        raise ValueError("boom")
    if "hang" in completions:
        signal.pause()
    if "die" in completions:
        os.kill(os.getpid(), signal.SIGKILL)
    if "leave" in completions:
        sys.exit(3)
    return [None if c == "none" else 1.0 for c in completions if c != "short"]


def test_a_trl_function_in_a_child_gives_reward_and_its_own_column() -> None:
    with scoring(same) as (kernel, _):
        [batch] = kernel.run(answers(["a", "b"], answer=["a", "a"]))
        assert batch.names == ["reward", "reward/same"]
        assert batch.flat("reward").tolist() == [1.0, 0.0]
        assert batch.array("reward").type == "float"
        assert batch.keys.rows() == [(10, 0, 0), (11, 0, 0)]


def test_a_trl_reward_file_runs_unchanged_when_loaded_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "my_rewards.py"
    text = textwrap.dedent("""
            from collections import Counter

            def _score(text: str) -> float:
                return float(Counter(text)["a"])

            def count_a(
                prompts, completions: list[list[dict]], solution, log_metric, **kwargs
            ) -> list[float]:
                assert prompts[0][0]["role"] == "user"
                log_metric("longest", max(len(c[0]["content"]) for c in completions))
                return [_score(c[0]["content"]) + len(s) for c, s in zip(completions, solution)]
            """)
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("my_rewards", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["my_rewards"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    prompt = pa.array([[{"role": "user", "content": "q"}]] * 2)
    try:
        with scoring(module.count_a) as (kernel, session):
            chunk = answers(["aab", "b"], solution=["", "xy"], prompt=prompt)
            assert rewards(kernel, chunk) == [2.0, 2.0]
            assert session.logged() == [("reward/count_a/longest", 3.0)]
    finally:
        del sys.modules["my_rewards"]


def test_weights_lambdas_closures_and_none_add_up_over_the_functions_that_apply() -> None:
    offset = 10.0
    fns = (picky, lambda completions: [offset] * len(completions), picky)
    with scoring(*fns, weights=(2.0, 0.5, 1.0)) as (kernel, _):
        [batch] = kernel.run(answers(["x", "none"]))
        assert batch.flat("reward").tolist() == [8.0, 5.0]
        assert batch.array("reward/picky").to_pylist() == [1.0, None]
        assert batch.array("reward/picky_2").to_pylist() == [1.0, None]
        assert batch.array("reward/lambda").to_pylist() == [10.0, 10.0]


def test_functions_run_at_the_same_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        os.mkfifo(tmp_path / name)

    def meets(mine: str, other: str) -> Callable[..., list[float]]:
        def meet(completions: list[str]) -> list[float]:
            with open(tmp_path / min(mine, other), "w" if mine < other else "r"):
                return [1.0] * len(completions)  # it opens once the other side does

        return meet

    with scoring(meets("a", "b"), meets("b", "a"), timeout=20) as (kernel, _):
        assert rewards(kernel, answers(["x"])) == [2.0]


@pytest.mark.usefixtures("own_interpreters")
def test_the_child_imports_neither_torch_nor_pandas_and_its_prints_reach_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def look(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
        print("seen:", *completions, "\x1b[2J")
        return [float(bool({"torch", "pandas"} & {*sys.modules}))] * len(completions)

    with scoring(look) as (kernel, _):
        assert rewards(kernel, answers(["x"])) == [0.0]
    said = [record.getMessage() for record in caplog.records]
    assert said == ["reward 'look' printed: seen: x \\x1b[2J"]


def computing(completions: list[str]) -> list[float]:
    """Keeps a core busy for 0.05 seconds, and so does a process that it starts."""
    code = "import time\nwhile time.process_time() < 0.05: pass"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    return [0.0] * len(completions)


def test_what_a_function_computes_counts_with_what_it_starts() -> None:
    with scoring(computing) as (kernel, session):
        list(kernel.run(answers(["a"])))
        (took,) = session.elsewhere
        assert took.computed > 0.099
    with scoring(computing, inproc=True) as (kernel, session):
        list(kernel.run(answers(["a"])))
        assert session.elsewhere == [ProcessorTime()], "the Worker's thread counts itself"


def test_a_missing_column_is_named_with_those_there_are() -> None:
    told = "wants 'answer', data has: solution"
    with scoring(same) as (kernel, _), pytest.raises(KernelError, match=told):
        list(kernel.run(answers(["x"], solution=["y"])))


@pytest.mark.parametrize("bad, message", [
    ("raise", "reward 'picky' raised ValueError: boom"),
    ("short", "reward 'picky' returned 0 values for 1 completions"),
    ("hang", "reward 'picky' timed out after 2 s"),
    ("die", "reward 'picky' lost its process, which was killed by SIGKILL"),
    ("leave", "reward 'picky' raised SystemExit: 3"),
])  # fmt: skip
def test_every_failure_names_its_row_and_gives_up_only_that_row(bad: str, message: str) -> None:
    work = answers(["fine", bad, "good"])
    how: Any = {"timeout": 2.0 if bad == "hang" else 30.0, "on_error": "drop_group"}
    with scoring(picky, **how) as (kernel, session):
        [batch] = kernel.run(work)
        assert batch.keys.position.tolist() == [10, 12]
        assert list(session.failed) == [(11, 0, 0)]
        said = session.failed[11, 0, 0]
        assert said.startswith(f"node 'score': {message}")
        assert f"(row 11/0, step 3); first completion: {bad!r}. Fix: " in said
        assert ("in picky" in said) == (bad in ("raise", "hang", "leave"))
        assert "drop_group" not in said, "that is what it does already"
        assert rewards(kernel, answers(["fine"])) == [1.0]  # a replaced child serves on


def test_by_default_the_first_failing_row_stops_the_run() -> None:
    with scoring(picky) as (kernel, session):
        told = r'raised ValueError: boom \(row 11/0.*, or on_error="drop_group" to'
        with pytest.raises(KernelError, match=told):
            list(kernel.run(answers(["fine", "raise", "raise"])))
        assert not session.failed


def test_a_group_function_is_repeated_by_whole_groups() -> None:
    def ranked(completions: list[str]) -> list[float]:
        assert len(completions) % 2 == 0, "half a group"
        assert "bad" not in completions, "bad text"
        return [float(i) for i in range(len(completions))]

    keys = Keys.of([1, 2, 3]).expand(2)
    work = answers(["a", "b", "c", "bad", "e", "f"], keys)
    with scoring(ranked, scope="group", on_error="drop_group") as (kernel, session):
        [batch] = kernel.run(work)
        assert batch.keys.rows() == [(1, 0, 0), (1, 1, 0), (3, 0, 0), (3, 1, 0)]
        assert list(session.failed) == [(2, 0, 0), (2, 1, 0)]
        assert "rows 2/0 to 2/1, step 3" in session.failed[2, 0, 0]


def test_a_function_that_is_wrong_only_for_rows_together_stops_the_run_in_any_case() -> None:
    def distinct(completions: list[str]) -> list[float]:
        return [1.0 for _ in set(completions)]

    told = r"returned 1 values for 2 completions \(rows 10/0 to 11/0, step 3\)"
    with (
        scoring(distinct, on_error="drop_group") as (kernel, _),
        pytest.raises(KernelError, match=told),
    ):
        list(kernel.run(answers(["x", "x"])))


def test_a_failure_that_passes_when_repeated_is_counted_and_rows_are_kept(tmp_path: Path) -> None:
    def once(completions: list[str]) -> list[float]:
        if not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise ConnectionError("try again")
        return [1.0] * len(completions)

    with scoring(once) as (kernel, session):
        assert rewards(kernel, answers(["x", "y"])) == [1.0, 1.0]
        assert session.logged() == [("reward/once/passed_when_repeated", 1.0)]


@pytest.mark.parametrize("how, seconds, kind", [
    (signal.SIGKILL, 30.0, "died"), (signal.SIGSTOP, 2.0, "timeout"),
])  # fmt: skip
def test_a_child_killed_or_stopped_from_outside_is_replaced_and_nothing_is_lost(
    how: signal.Signals, seconds: float, kind: str
) -> None:
    # more than a socket holds, so that a child that does not read is met while sending
    large = "x" * 4_000_000
    records = pa.RecordBatch.from_pydict({"completion": [large], "answer": [large]})
    children = Children(["same"], [same], timeout=seconds)
    try:
        [pid] = children.pids()
        os.kill(pid, how)
        fault = children.score({0: records})[0].fault
        assert fault is not None
        assert fault.kind == kind
        assert children.score({0: records})[0].values == [1.0]
        assert children.pids() != [pid]
    finally:
        children.close()


def test_rows_to_which_nothing_applies() -> None:
    told = "no reward for row 11/0, step 3: picky returned"
    with scoring(picky) as (kernel, _), pytest.raises(KernelError, match=told):
        list(kernel.run(answers(["x", "none"])))
    with scoring(picky, on_error="drop_group") as (kernel, session):
        assert rewards(kernel, answers(["x", "none"])) == [1.0]
        assert list(session.failed) == [(11, 0, 0)]
        assert list(kernel.run(answers(["none"]))) == []


def test_inproc_calls_here_and_fails_the_same_way() -> None:
    where: list[int] = []

    def here(completions: list[str]) -> list[float | None]:
        where.append(os.getpid())
        return picky(completions)

    with scoring(here, inproc=True) as (kernel, _):
        assert rewards(kernel, answers(["x"])) == [1.0]
        assert where == [os.getpid()]
        for bad, told in [("raise", "ValueError: boom"), ("leave", "SystemExit: 3")]:
            with pytest.raises(KernelError, match=rf"(?s)raised {told}.*row 11/0.*in here"):
                list(kernel.run(answers(["x", bad])))


def test_what_cannot_be_shipped_or_loaded_is_said_at_open() -> None:
    lock = threading.Lock()

    def locked(completions: list[str]) -> list[float]:
        with lock:
            return []

    class Fragile:
        def __init__(self) -> None:
            self.licence = "elsewhere"

        def __call__(self, completions: list[str]) -> list[float]:
            return []

        def __setstate__(self, state: dict[str, Any]) -> None:
            raise RuntimeError("no licence here")

    with pytest.raises(KernelError, match="reward 'locked': cannot be sent"), scoring(locked):
        pass
    with pytest.raises(KernelError, match=r"reward 'Fragile'.*no licence here"), scoring(Fragile()):
        pass


@pytest.mark.parametrize("kills", [1, 2])
def test_a_child_killed_while_it_starts_is_started_once_more(tmp_path: Path, kills: int) -> None:
    class Killed:
        def __init__(self) -> None:
            self.folder = str(tmp_path)

        def __call__(self, completions: list[str]) -> list[float]:
            return [1.0 for _ in completions]

        def __setstate__(self, state: dict[str, str]) -> None:
            started = len(os.listdir(state["folder"]))
            Path(state["folder"], str(started)).touch()
            if started < kills:
                os.kill(os.getpid(), signal.SIGKILL)

    if kills == 1:
        with scoring(Killed()) as (kernel, _):
            assert rewards(kernel, answers(["x"])) == [1.0]
    else:
        with pytest.raises(KernelError, match="was killed by SIGKILL"), scoring(Killed()):
            pass


def test_no_child_outlives_close_not_even_a_busy_one() -> None:
    children = Children(["picky", "same"], [picky, same], timeout=30.0)
    pids = children.pids()
    assert len(pids) == 2
    work = answers(["hang"]).inputs["rows"].select(["completion"]).records
    busy = children._children[0]
    busy.ask(_stream(work), 1)
    while busy._unsent:
        busy._talk()
    children.close()
    assert all(ended(pid, 5) for pid in pids)


def test_the_current_folder_is_behind_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward process runs the user's function, and no file named like a module Python imports."""
    names = "json random struct selectors numpy pyarrow msgspec cloudpickle socket"
    for name in names.split():
        ran = f"raise SystemExit('{name} of the current folder ran')\n"
        (tmp_path / f"{name}.py").write_text(ran)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    lengths = lambda completions, **columns: [float(len(text)) for text in completions]
    with scoring(lengths) as (kernel, _):
        assert rewards(kernel, answers(["a", "bbb"])) == [1.0, 3.0]
