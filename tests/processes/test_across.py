"""Runs in several processes: the same numbers as in one, errors with their names, nothing left
behind.
"""

from __future__ import annotations

import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_graphs import breaks, evaluated, followed, hangs, not_a_number, raises, small, with_score
from run_processes import end_of_children, process, wait_for, wait_for_error

from dataflow.errors import DataError, KernelError, RunError
from dataflow.graph import Graph
from dataflow.model import Model
from engine.api import Result, resume, run
from engine.launch.local import Supervisor
from engine.observe.samples import read_samples
from engine.observe.trace import read_trace
from operators.data import prompts
from operators.generate import generate
from tests.kit.processes import children, workers
from tests.kit.runs import Rows, metrics, timeless, weights

Options = Callable[..., Any]
pytestmark = pytest.mark.timeout(240)
APART = {"rollout": "gen", "train_policy": "train"}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every process of a run has ended and was waited for when the call returns."""
    before = set(children())
    yield
    assert set(children()) <= before


def same(one: Result, other: Result) -> None:
    """Metrics, weights and samples of two runs, to the bit."""
    assert numbers(other) == numbers(one)
    assert weights(other) == weights(one)
    assert read_samples(other.folder / "samples").equals(read_samples(one.folder / "samples"))


def numbers(result: Result) -> Rows:
    """What depends neither on the clock nor on places."""
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(("worker/", "edge/", "coordinator/"))
        }
        for row in timeless(metrics(result.folder))
    ]


# the same bits wherever it runs


PLACES = {
    "three processes": (
        lambda folder: evaluated(folder, every=2, keep_best=1),
        {"pin": APART | {"greedy_rollout": "gen", "sampled_rollout": "train"}},
        {},
    ),
    "followers elsewhere": (
        followed,
        {
            "pin": {
                "train_policy": "train",
                "train_critic": "train",
                "past": "slow",
                "values": "slow",
            }
        },
        {},
    ),
    "replicas": (
        small,
        {"replicas": {"rollout": 2}, "chunks": {"rollout": 3}},
        {"chunks": {"rollout": 3}},
    ),
    "every node apart": (small, {"workers": "apart"}, {}),
    "three replicas": (small, {"replicas": {"rollout": 3}}, {"chunks": {"rollout": 3}}),
}
FAST = (  # a process with tensors costs three seconds: the other tests here compare with one process, too
    "replicas"
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == FAST else [pytest.mark.long]) for n in PLACES]
)
def test_the_bits_of_one_process(tiny: Path, options: Options, name: str) -> None:
    make, spread, alone = PLACES[name]
    one = run(make(tiny), options(4, name="one", checkpoint_every=2, **alone))
    several = run(make(tiny), options(4, name="several", checkpoint_every=2, **spread))
    same(one, several)
    assert best(several) == best(one)


def best(result: Result) -> dict[str, list[str]]:
    return {node: [path.name for path in paths] for node, paths in result.best.items()}


@pytest.mark.long
def test_two_ranks_train_as_one_does(tiny: Path, options: Options) -> None:
    one = run(small(tiny), options(3, name="one"))
    two = run(small(tiny), options(3, name="two", ranks={"train_policy": 2}))
    for here, there in zip(metrics(one.folder), metrics(two.folder), strict=True):
        for name in (
            "reward/mean",
            "train/tokens",
            "data/rows",
            "optim/grad_norm",
            "optim/updates",
        ):
            assert there[name] == pytest.approx(here[name], rel=1e-5), name


def test_with_lag_generation_and_training_overlap_and_the_bound_holds(
    tiny: Path, options: Options
) -> None:
    result = run(small(tiny, max_lag=1), options(6, workers="auto", checkpoint_every=3))
    rows = metrics(result.folder)
    assert max(row["policy/lag/max"] for row in rows) <= 1
    samples = read_samples(result.folder / "samples")
    keys = zip(samples["position"].to_pylist(), samples["sample"].to_pylist(), strict=True)
    assert sorted(keys) == [(position, sample) for position in range(24) for sample in range(4)]
    busy = [name for name in rows[0] if name.startswith("worker/")]
    assert len(busy) >= 2
    assert all(
        0.0 <= row[name] <= 1.0 and math.isfinite(row[name]) for row in rows for name in busy
    )
    assert "time/engine" not in rows[0]
    assert (result.folder / "logs" / "coordinator.log").read_text().count("ended at step 6") == 1
    (trace,) = (result.folder / "trace").iterdir()
    named = [e for e in read_trace(trace) if e["ph"] == "M" and e["name"] == "process_name"]
    assert {name.split("/")[1] for name in busy} <= {e["args"]["name"] for e in named}


@pytest.mark.long
def test_a_run_goes_on_in_other_places(tiny: Path, options: Options) -> None:
    whole = run(followed(tiny), options(6, name="whole"))
    part = run(followed(tiny), options(2, name="part"))
    resume(
        part.folder,
        steps=4,
        pin={"train_policy": "train", "train_critic": "train", "values": "values"},
    )
    same(whole, resume(part.folder, steps=6, pin={}))


# stopped


@pytest.mark.long
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_reaches_every_process_and_the_run_decides_what_it_means(
    tiny: Path, tmp_path: Path, presses: int
) -> None:
    with process(tiny, tmp_path, "overlapping", 100_000) as made:
        wait_for(made, "step 3")
        there = children(made.pid)
        os.killpg(made.pid, signal.SIGINT)
        wait_for_error(made, "Ctrl-C again")
        if presses == 2:
            os.killpg(made.pid, signal.SIGINT)
        out, err = made.communicate()
    assert len(there) >= 2
    end_of_children(there)
    if presses == 2:
        assert made.returncode != 0
        return
    assert made.returncode == 130, err
    assert "stopped by Ctrl-C" in out
    assert "Traceback" not in err
    last = metrics(tmp_path / "killed")[-1]["step"]
    assert (tmp_path / "killed" / "checkpoints" / f"step_{last}").is_dir()
    for log in (tmp_path / "killed" / "logs").iterdir():
        assert "KeyboardInterrupt" not in log.read_text(), log.name


# killed


def killing(name: str, *steps: int) -> Callable[[Any], None]:
    """Kills a Worker when it is told of one of these Steps, each time once."""
    left = set(steps)

    def told(row: Any) -> None:
        if row["step"] in left:
            left.discard(row["step"])
            os.kill(workers()[name], signal.SIGKILL)

    return told


@pytest.mark.long
def test_workers_that_are_killed_change_nothing(
    tiny: Path, options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    graph = evaluated(tiny, every=2, keep_best=1)
    spread = options(6, name="killed", checkpoint_every=2, pin=APART | {"greedy_rollout": "gen"})
    whole = run(graph, options(6, name="whole", checkpoint_every=2))
    killed = run(graph, spread, on_step=[killing("gen", 2), killing("train", 3)])
    same(whole, killed)
    assert best(killed) == best(whole)
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert sum("Worker gen was lost" in line and "SIGKILL" in line for line in told) == 1, (
        "it was begun anew"
    )
    assert (
        sum("going back to the last checkpoint, as Worker train was lost" in line for line in told)
        == 1
    )


@pytest.mark.long
def test_with_lag_a_generator_that_is_killed_loses_no_row(tiny: Path, options: Options) -> None:
    result = run(
        small(tiny, max_lag=1), options(8, workers="auto"), on_step=[killing("rollout", 2, 5)]
    )
    samples = read_samples(result.folder / "samples")
    keys = zip(samples["position"].to_pylist(), samples["sample"].to_pylist(), strict=True)
    assert sorted(keys) == [(position, sample) for position in range(32) for sample in range(4)]
    assert max(row["policy/lag/max"] for row in metrics(result.folder)) <= 1


# what goes wrong


def too_long(folder: Path) -> Graph:
    """Prompts that its generate refuses."""
    policy = Model("policy", str(folder / "model"), trainable=True)
    asked = prompts(str(folder / "train.parquet"), batch=4)
    rollout = generate(policy, asked, n=4, max_tokens=6, max_prompt_tokens=1, name="rollout")
    return small(folder).replace(rollout=rollout)


@pytest.mark.parametrize("make,worker,kind,told", [
    (lambda f: with_score(f, breaks), "breaks", KernelError, ["breaks: ", "(0, 0, 0)", "out of luck", "run_graphs.py"]),
    pytest.param(
        lambda f: with_score(f, None, not_a_number), "score", KernelError, ["train_policy: step 1", "found nan"],
        marks=pytest.mark.long,
    ),
    pytest.param(
        lambda f: small(f, raises), "score", KernelError, ["'score'", "row 0/0", "ZeroDivisionError"],
        marks=pytest.mark.long,
    ),
    pytest.param(
        too_long, "rollout", DataError, ["rollout: row (0, 0, 0)", "at most 1 prompt tokens"], marks=pytest.mark.long
    ),
], ids=["operator", "train", "reward", "generate"])  # fmt: skip
def test_an_error_arrives_with_its_names(
    tiny: Path,
    options: Options,
    make: Callable[[Path], Graph],
    worker: str,
    kind: type[Exception],
    told: list[str],
) -> None:
    with pytest.raises(kind) as caught:
        run(make(tiny), options(2, pin={worker: "elsewhere"}))
    for part in told:
        assert part in str(caught.value), part


@pytest.fixture
def watched_once_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog counts from when all Workers are open: how long their imports take is the
    machine's affair.
    """
    opened, open_all, doing = threading.Event(), Supervisor._all_opened, Supervisor.doing

    def told(supervisor: Supervisor) -> Any:
        events = open_all(supervisor)
        opened.set()
        return events

    monkeypatch.setattr(Supervisor, "_all_opened", told)
    monkeypatch.setattr(
        Supervisor, "doing", lambda self: doing(self) if opened.is_set() else object()
    )


@pytest.mark.long
@pytest.mark.usefixtures("watched_once_open")
def test_a_node_that_hangs_is_named(
    tiny: Path, options: Options, capfd: pytest.CaptureFixture[str]
) -> None:
    named = r"nothing has moved for 10 s; ops is in run_graphs.py:\d+ hangs \(chunk \d+, 8 rows\)"
    with pytest.raises(RunError, match=named) as caught:
        run(with_score(tiny, hangs), options(2, watchdog=10.0, pin={"hangs": "ops"}))
    assert re.search(
        r"ops, process \d+, stood at:(\n.*)*/run_graphs.py\", line \d+ in hangs\n",
        str(caught.value),
    )
    assert "advantage: " in capfd.readouterr().err, "who waits for it"
