"""Whole runs whose Workers share devices: one at a time is awake, and the numbers are those of one
process.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from run_graphs import dapo, followed, small
from test_rank_runs import alike

from engine.api import resume, run
from engine.observe.trace import read_trace
from tests.kit.runs import metrics, timeless, weights

pytestmark = pytest.mark.timeout(240)
TURNS: dict[str, Any] = {
    "pin": {"rollout": "gen", "train_policy": "train"},
    "turns": (("gen", "train"),),
}


def numbers(folder: Path) -> list[dict[str, float]]:
    """What depends neither on the clock nor on who did it."""
    others = ("worker/", "edge/", "coordinator/")
    return [
        {k: v for k, v in row.items() if not k.startswith(others)}
        for row in timeless(metrics(folder))
    ]


def turns(folder: Path) -> list[tuple[str, str]]:
    """(wake or sleep, Worker) in the order of time, but for the first sleep of each."""
    found = []
    for path in sorted((folder / "trace").iterdir()):
        events = read_trace(path)
        name = {
            e["pid"]: e["args"]["name"]
            for e in events
            if e["ph"] == "M" and e["name"] == "process_name"
        }
        spans = [
            (e["ts"], e["name"], name[e["pid"]]) for e in events if e["name"] in ("wake", "sleep")
        ]
        found += [(what, worker) for _, what, worker in sorted(spans)]
    first = {worker: found.index(("sleep", worker)) for worker in ("gen", "train")}
    return [turn for at, turn in enumerate(found) if at not in first.values()]


@pytest.mark.long
def test_workers_that_take_turns_give_the_numbers_of_one(
    tiny: Path, options: Callable[..., Any]
) -> None:
    alone = run(small(tiny), options(3, name="alone", inproc=True))
    turned = run(small(tiny), options(3, name="turned", **TURNS))
    assert numbers(turned.folder) == numbers(alone.folder)
    assert weights(turned) == weights(alone)
    found = turns(turned.folder)
    assert [what for what, _ in found] == ["wake", "sleep"] * (len(found) // 2) + ["wake"] * (
        len(found) % 2
    )
    assert all(found[at][1] == found[at + 1][1] for at in range(0, len(found) - 1, 2))
    woken = [worker for what, worker in found if what == "wake"]
    assert len(woken) >= 6  # each Step once gen and once train
    assert all(one != other for one, other in pairwise(woken))


@pytest.mark.long
def test_a_run_with_turns_goes_on_from_its_checkpoint(
    tiny: Path, options: Callable[..., Any]
) -> None:
    whole = run(small(tiny), options(4, name="whole", inproc=True))
    part = run(small(tiny), options(2, name="part", **TURNS))
    on = resume(part.folder, steps=4)
    assert numbers(on.folder) == numbers(whole.folder)
    assert weights(on) == weights(whole)


@pytest.mark.long
def test_ranks_of_actor_and_critic_take_turns_on_the_same_devices(
    tiny: Path, options: Callable[..., Any]
) -> None:
    """Each pair of devices has a rank of both, and the first one the generation, too."""
    ranks = {"train_policy": "actor-0,actor-1", "train_critic": "critic-0,critic-1"}
    shared = (("gen", "actor-0", "critic-0"), ("actor-1", "critic-1"))
    alone = run(followed(tiny), options(3, name="alone", inproc=True))
    turned = run(
        followed(tiny),
        options(
            3,
            name="turned",
            workers="one",
            pin={"rollout": "gen"} | ranks,
            ranks=dict.fromkeys(ranks, 2),
            turns=shared,
        ),
    )
    alike(alone.folder, turned.folder)


@pytest.mark.long
def test_ranks_of_which_one_sleeps_write_checkpoints(
    tiny: Path, options: Callable[..., Any]
) -> None:
    """Groups that are made up for wait for the devices that one of the ranks has, so that it sleeps
    with an offer which the other one makes already; a checkpoint waits for that, as its ranks write
    it together, too.
    """
    shared: dict[str, Any] = {"tensor": {"train_policy": 2}, "turns": (("gen", "train"),)}
    pin = {"rollout": "gen", "score": "judge", "train_policy": "train,train-1"}
    made = options(
        10, workers="one", pin=pin, checkpoint_every=1, keep=10, watchdog=150.0, **shared
    )
    result = run(dapo(tiny, max_lag=3), made)
    assert len(list(result.folder.glob("checkpoints/step_*/cut.json"))) == result.step == 10
