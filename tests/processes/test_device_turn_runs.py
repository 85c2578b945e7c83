"""Whole runs whose Workers share devices: one is awake at a time; one process's numbers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.api import resume
from engine.keep.trace.timeline import read_trace
from tests.kit.run_graphs import dapo, followed, small
from tests.kit.runs import require_alike, require_same_numbers
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(240), pytest.mark.long]
TURNS: dict[str, Any] = {
    "pin": {"rollout": "gen", "train_policy": "train"},
    "turns": (("gen", "train"),),
}


def turns(folder: Path) -> list[tuple[str, str]]:
    """(wake or sleep, Worker) in the order of time, but for the first sleep of each."""
    (path,) = (folder / "trace").iterdir()
    events = read_trace(path)
    named = [e for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    workers = {e["pid"]: e["args"]["name"] for e in named}
    spans = [e for e in events if e["name"] in ("wake", "sleep")]
    spans.sort(key=lambda e: e["ts"])
    ordered = [(span["name"], workers[span["pid"]]) for span in spans]
    for worker in ("gen", "train"):
        ordered.remove(("sleep", worker))
    return ordered


def test_workers_that_take_turns_give_the_numbers_of_one_also_resumed(tiny: TinyRuns) -> None:
    alone = tiny.run(small, 4, name="alone", inproc=True)
    turned = tiny.run(small, 3, name="turned", **TURNS)
    ordered = turns(turned.folder)
    awake = ""
    for what, worker in ordered:
        assert awake == ("" if what == "wake" else worker)
        awake = worker if what == "wake" else ""
    woken = [worker for what, worker in ordered if what == "wake"]
    assert len(woken) >= 6  # each Step once gen and once train
    assert all(one != other for one, other in pairwise(woken))
    require_same_numbers(resume(turned.folder, steps=4), alone)


def test_ranks_of_actor_and_critic_take_turns_on_the_same_devices(tiny: TinyRuns) -> None:
    """Each pair of devices has a rank of both, and the first one the generation, too."""
    ranks = {"train_policy": "actor-0,actor-1", "train_critic": "critic-0,critic-1"}
    shared = (("gen", "actor-0", "critic-0"), ("actor-1", "critic-1"))
    alone = tiny.run(followed, name="alone", inproc=True)
    spread = {"pin": {"rollout": "gen"} | ranks, "ranks": dict.fromkeys(ranks, 2)}
    require_alike(tiny.run(followed, name="turned", turns=shared, **spread), alone)


def test_ranks_of_which_one_sleeps_write_checkpoints(tiny: TinyRuns) -> None:
    """Groups that are made up for wait for the devices that one of the ranks has, so that it sleeps
    with an offer which the other one makes already; a checkpoint waits for that, as its ranks write
    it together, too.
    """
    pin = {"rollout": "gen", "score": "judge", "train_policy": "train,train-1"}
    spread: dict[str, Any] = {"pin": pin, "tensor": {"train_policy": 2}, "turns": TURNS["turns"]}
    graph = dapo(tiny.folder, max_lag=3)
    result = tiny.run(graph, 10, checkpoint_every=1, keep=10, **spread)
    assert len(list(result.folder.glob("checkpoints/step_*/cut.json"))) == result.step == 10
