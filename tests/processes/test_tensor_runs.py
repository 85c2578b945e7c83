"""Whole runs whose train node has tensor ranks: the numbers of one rank, rows that are fetched
once, a death.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_graphs import deadly, evaluated, followed, small, unlucky, with_score
from test_rank_runs import alike
from transformers import AutoModelForCausalLM

from dataflow.errors import KernelError
from dataflow.graph import Graph
from engine.api import resume, run
from engine.options import RunOptions
from tests.kit.processes import children, workers
from tests.kit.runs import metrics

Options = Callable[..., RunOptions]

pytestmark = pytest.mark.timeout(300)

TWO: dict[str, Any] = {"tensor": {"train_policy": 2}}
GEN = {"pin": {"rollout": "gen"}}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(children())
    yield
    assert set(children()) <= before


def total(folder: Path, name: str) -> float:
    """Of a metric over all Steps."""
    return sum(row.get(name, 0.0) for row in metrics(folder))


@pytest.mark.long
def test_two_tensor_ranks_train_as_one_does_and_each_row_is_fetched_once(
    tiny: Path, options: Options
) -> None:
    one = run(small(tiny), options(3, name="one", pin={"rollout": "gen", "train_policy": "train"}))
    two = run(
        small(tiny),
        options(3, name="two", pin={"rollout": "gen", "train_policy": "train,train-1"}, **TWO),
    )
    alike(one.folder, two.folder)
    assert total(two.folder, "edge/broadcast/bytes") > 0
    assert total(two.folder, "edge/shm/bytes") == total(one.folder, "edge/shm/bytes")
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(r.trained["policy"]).state_dict() for r in (two, one)
    )
    assert ours.keys() == theirs.keys()
    assert max(float((ours[n] - theirs[n]).abs().max()) for n in ours) < 1e-5


@pytest.mark.long
def test_a_checkpoint_goes_on_with_other_ranks(tiny: Path, options: Options) -> None:
    whole = run(evaluated(tiny, keep_best=1), options(4, name="whole", checkpoint_every=2))
    part = run(evaluated(tiny, keep_best=1), options(2, name="part", checkpoint_every=2, **TWO))
    for path in (*(p for paths in part.best.values() for p in paths), *part.trained.values()):
        found = AutoModelForCausalLM.from_pretrained(path).state_dict()
        assert {n: t.shape for n, t in found.items()} == {
            n: t.shape
            for n, t in AutoModelForCausalLM.from_pretrained(tiny / "model").state_dict().items()
        }
    resume(part.folder, steps=3, tensor={})
    resume(part.folder, steps=4, **TWO)
    alike(whole.folder, part.folder)


@pytest.mark.long
def test_two_by_two_ranks_train_as_one_does(tiny: Path, options: Options) -> None:
    one = run(small(tiny), options(3, name="one", **GEN))
    four = run(small(tiny), options(3, name="four", ranks={"train_policy": 2}, **TWO, **GEN))
    alike(one.folder, four.folder)


@pytest.mark.long
def test_two_train_nodes_share_their_ranks_and_followers_are_given_whole_weights(
    tiny: Path, options: Options
) -> None:
    both = {"tensor": {"train_policy": 2, "train_critic": 2}}
    one = run(followed(tiny), options(4, name="one"))
    two = run(followed(tiny), options(4, name="two", weights="collective", **both, **GEN))
    alike(one.folder, two.folder)
    assert total(two.folder, "edge/collective/bytes") > 0


@pytest.mark.long
@pytest.mark.parametrize("rank", ["main", "main-1"])
def test_after_the_death_of_a_rank_all_go_back_and_the_numbers_are_the_same(
    tiny: Path, options: Options, rank: str
) -> None:
    killed: list[int] = []

    def kill(row: Any) -> None:
        if row["step"] == 3 and not killed:
            killed.append(workers()[rank])
            os.kill(killed[0], signal.SIGKILL)

    whole = run(small(tiny), options(5, name="whole", checkpoint_every=2))
    again = run(
        small(tiny), options(5, name="again", checkpoint_every=2, **TWO, **GEN), on_step=[kill]
    )
    assert killed
    alike(whole.folder, again.folder)


SPREAD = pytest.mark.parametrize(
    "spread",
    [{"tensor": {"train_policy": 2}}, {"ranks": {"train_policy": 2}}],
    ids=["tensor", "data"],
)


@pytest.mark.long
@SPREAD
def test_what_one_rank_alone_fails_with_ends_the_run_at_once(
    tiny: Path, options: Options, spread: dict[str, Any]
) -> None:
    """The other one waits in a collective meanwhile, whose time limit is half an hour."""
    with pytest.raises(KernelError, match="out of luck"):
        run(with_score(tiny, None, unlucky), options(4, **spread))


@pytest.mark.long
@SPREAD
def test_a_rank_that_dies_in_a_step_is_not_what_the_other_failed_with(
    tiny: Path, options: Options, tmp_path: Path, spread: dict[str, Any]
) -> None:
    def dying(marker: str) -> Graph:
        return with_score(
            tiny, None, lambda advantage: deadly(advantage, marker=str(tmp_path / marker))
        )

    whole = run(dying("whole"), options(4, name="whole"))
    again = run(dying("again"), options(4, name="again", checkpoint_every=2, **spread))
    assert not (tmp_path / "whole").exists()
    assert (tmp_path / "again").exists()
    alike(whole.folder, again.folder)
