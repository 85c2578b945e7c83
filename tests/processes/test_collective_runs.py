"""Weights by the collective route in whole runs: the numbers of the pull route to the bit, and a
death on the way.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_graphs import followed, small, vowels
from test_across import numbers

from dataflow.graph import Graph
from dataflow.model import Model
from engine.api import run
from engine.observe.samples import read_samples
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import policy_gradient_loss
from operators.reward import reward
from operators.train import train
from tests.kit.processes import children, workers
from tests.kit.runs import metrics, weights

Options = Callable[..., Any]
pytestmark = pytest.mark.timeout(240)
APART = {"rollout": "gen", "train_policy": "train"}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(children())
    yield
    assert set(children()) <= before


def by_collectives(folder: Path) -> float:
    """Bytes of weights that came by collectives in a Step, the mean."""
    rows = metrics(folder)
    return sum(row.get("edge/collective/bytes", 0.0) for row in rows) / len(rows)


PLACES = {
    "three processes": (small, {"pin": APART | {"score": "data"}}),
    "replicas": (small, {"replicas": {"rollout": 2}}),
    "a split writer, a reader beside its first rank": (
        small,
        {"ranks": {"train_policy": 2}, "shard": True, "pin": {"rollout": "main,gen"}},
    ),
    "followers": (
        followed,
        {"pin": {"train_policy": "train", "train_critic": "train", "past": "slow"}},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", list(PLACES))
def test_the_bits_of_the_pull_route(tiny: Path, options: Options, name: str) -> None:
    make, spread = PLACES[name]
    pull = run(make(tiny), options(4, name="pull", weights="pull", **spread))
    sent = run(make(tiny), options(4, name="sent", weights="collective", **spread))
    assert numbers(sent) == numbers(pull)
    assert weights(sent) == weights(pull)
    assert read_samples(sent.folder / "samples").equals(read_samples(pull.folder / "samples"))
    assert by_collectives(sent.folder) > 0
    assert not by_collectives(pull.folder)


@pytest.mark.long
def test_after_a_death_of_the_writer_all_meet_anew(tiny: Path, options: Options) -> None:
    killed: list[int] = []

    def kill(row: Any) -> None:
        if row["step"] == 3 and not killed:
            killed.append(workers()["train"])
            os.kill(killed[0], signal.SIGKILL)

    whole = run(small(tiny), options(5, name="whole", checkpoint_every=2))
    again = run(
        small(tiny),
        options(5, name="again", checkpoint_every=2, pin=APART, weights="collective"),
        on_step=[kill],
    )
    assert killed
    assert numbers(again) == numbers(whole)
    assert weights(again) == weights(whole)


def overlapping(folder: Path, on_update: str) -> Graph:
    """REINFORCE, generated under one version less than the newest."""
    policy = Model("policy", str(folder / "model"), trainable=True)
    asked = prompts(str(folder / "train.parquet"), batch=4)
    rollout = generate(
        policy, asked, n=4, max_tokens=6, max_lag=1, on_update=on_update, name="rollout"
    )
    advantage = group_advantage(rollout, reward(vowels, rollout, name="score"), name="advantage")
    return Graph(
        "overlapping", train(policy, rollout, loss=policy_gradient_loss(advantage), lr=1e-3)
    )


@pytest.mark.long
@pytest.mark.parametrize("on_update", ["drain", "interrupt"])
def test_with_lag_a_generator_that_is_killed_goes_on(
    tiny: Path, options: Options, on_update: str
) -> None:
    killed: set[int] = set()

    def kill(row: Any) -> None:
        if row["step"] in (2, 4) and row["step"] not in killed:
            killed.add(int(row["step"]))
            os.kill(workers()["rollout"], signal.SIGKILL)

    graph = overlapping(tiny, on_update)
    result = run(graph, options(6, workers="auto", weights="collective"), on_step=[kill])
    samples = read_samples(result.folder / "samples")
    keys = zip(samples["position"].to_pylist(), samples["sample"].to_pylist(), strict=True)
    assert killed == {2, 4}
    assert sorted(keys) == [(position, sample) for position in range(24) for sample in range(4)]
    assert by_collectives(result.folder) > 0
    assert max(row["policy/lag/max"] for row in metrics(result.folder)) <= 1
