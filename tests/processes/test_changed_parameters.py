"""Runs that go on with other parameters: the same bits before, and the new value's from there on.

A run that has not trained yet has no state but its place in the data. So where the first update is
made after the change, it must equal a run that had the new values from its beginning, to the bit.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import CheckpointError
from dataflow.graph import Graph
from dataflow.model import linear
from dataflow.settings import edited
from engine.api import Result, resume
from engine.checkpoint.cut import Cut
from operators.train import train
from tests.kit.run_graphs import evaluated, rolled_out, scaled, small, switched, vowels
from tests.kit.run_programs import two_phases
from tests.kit.runs import column, metrics, samples, timeless, weights
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(240), pytest.mark.long]

UNTRAINED, WHOLE = 2, 4
LATE = f"train_policy.start={UNTRAINED + 1}"
"""The first update is made in the Step after the change."""


@pytest.fixture(scope="module")
def untrained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose Steps consumed their rows without an update; to be copied."""
    tiny = TinyRuns(folder=tiny_folder, runs=tmp_path_factory.mktemp("untrained"))
    return tiny.run(edited(evaluated(tiny_folder), [LATE]), UNTRAINED).folder


@pytest.fixture(scope="module")
def unchanged(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the whole run that nothing is changed in; to be read alone."""
    tiny = TinyRuns(folder=tiny_folder, runs=tmp_path_factory.mktemp("unchanged"))
    return tiny.run(edited(evaluated(tiny_folder), [LATE]), WHOLE).folder


TRAINING = ["train_policy.lr=0.01", "train_policy.epochs=2", "train_policy.minibatches=2"]
GENERATION = ["rollout.n=2", "rollout.max_tokens=4", "rollout.temperature=0.7"]
LONG = [
    ["train_policy.lr=0.01"],
    ["train_policy.epochs=2"],
    ["train_policy.minibatches=2"],
    ["train_policy.minibatches=2", "train_policy.clipped_policy_loss.clip=0.0001"],
    ["train_policy.clip_norm=0.01"],
    ["train_policy.clipped_policy_loss.beta=0.5"],
    ["train_policy.clipped_policy_loss.weight=3.0"],
    ["train_policy.aggregate=sequence_sum"],
    ["train_policy.optimizer=AdamW(weight_decay=0.5)"],
    ["train_policy.intake=drop", "train_policy.lr=0.01"],
    ["rollout.n=2"],
    ["rollout.max_tokens=4"],
    ["rollout.temperature=0.0"],
    ["rollout.top_p=0.5"],
    ["rollout.top_k=2"],
    ["rollout.stop=a"],
    ["advantage.scale=none"],
    ["evaluate.every=1"],
]


@pytest.mark.parametrize(
    "settings",
    [TRAINING, GENERATION, *(pytest.param(s, marks=pytest.mark.long) for s in LONG)],
    ids=" ".join,
)
def test_from_its_step_on_a_value_holds_as_if_it_always_had(
    tiny: TinyRuns, untrained: Path, unchanged: Path, settings: list[str]
) -> None:
    changed = Path(shutil.copytree(untrained, tiny.runs / "changed"))
    wanted = tiny.run(edited(evaluated(tiny.folder), [LATE, *settings]), WHOLE, name="wanted")
    resume(changed, settings=settings, steps=WHOLE)
    require_as_before(changed, untrained)
    assert rows_from(changed, UNTRAINED) == rows_from(wanted, UNTRAINED)
    assert sampled(changed, UNTRAINED) == sampled(wanted, UNTRAINED)
    of_changed, of_wanted = weights(changed), weights(wanted)
    assert {k: of_wanted[k] for k in of_changed} == of_changed
    assert rows_from(changed, UNTRAINED) != rows_from(unchanged, UNTRAINED), "it changed nothing"


def require_as_before(changed: Path, before: Path) -> None:
    """Up to the change nothing is another."""
    steps = len(metrics(before))
    assert timeless(metrics(changed))[:steps] == timeless(metrics(before))
    assert [row for row in samples(changed).to_pylist() if row["step"] <= steps] == (
        samples(before).to_pylist()
    )


def rows_from(run: Result | Path, step: int) -> list[dict[str, Any]]:
    return [row for row in timeless(metrics(run)) if row["step"] > step]


def sampled(run: Result | Path, step: int) -> list[dict[str, Any]]:
    return [row for row in samples(run).to_pylist() if row["step"] > step]


def test_moments_go_on_under_another_lr(tiny: TinyRuns) -> None:
    """As under a schedule that changes it at that Step; the record says from which."""
    scheduled = edited(small(tiny.folder), ["train_policy.lr=0.0009765625"])
    node = scheduled.node("train_policy")
    assert node.params["lr"] == 2**-10
    wanted = tiny.run(with_lr(tiny, linear(2**-10, 2**-7, 2)), 4, name="wanted")
    changed = tiny.run(scheduled, 1, name="changed")
    resume(changed.folder, settings=["train_policy.lr=0.0078125"], steps=3)
    resume(changed.folder, steps=4)  # which goes on with the edited graph
    assert timeless(metrics(changed)) == timeless(metrics(wanted))
    assert weights(changed) == weights(wanted)
    assert changes_of(changed.folder) == [
        (2, "node train_policy", "lr", "0.0009765625", "0.0078125")
    ]
    cut = Cut.from_json((changed.folder / "checkpoints" / "step_4" / "cut.json").read_bytes())
    assert cut.record is not None
    assert [c.step for c in cut.record.changes] == [2]


def with_lr(tiny: TinyRuns, lr: Any) -> Graph:
    graph = small(tiny.folder)
    node = graph.node("train_policy")
    return Graph(graph.name, node.changed(params=node.params | {"lr": lr}))


def changes_of(folder: Path) -> list[tuple[int, str, str, str, str]]:
    kept = json.loads((folder / "changes.json").read_text())["changes"]
    return [(c["step"], c["where"], c["what"], c["old"], c["new"]) for c in kept]


def test_a_parameter_of_a_loss_changes_between_two_updates(tiny: TinyRuns) -> None:
    """As in a loss that changes it itself at that Step."""
    changed = tiny.run(own_loss(tiny, scaled, scale=1.0), 2, name="changed")
    resume(changed.folder, settings=["train_policy.scaled.scale=0.25"], steps=4)
    switching = own_loss(tiny, switched, before=1.0, after=0.25, at=3)
    assert weights(changed) == weights(tiny.run(switching, 4, name="wanted"))
    constant = tiny.run(own_loss(tiny, scaled, scale=1.0), 4, name="constant")
    assert weights(changed) != weights(constant)


def own_loss(tiny: TinyRuns, loss: Any, **parameters: Any) -> Graph:
    from operators.advantage import group_advantage
    from operators.reward import reward

    policy, rollout = rolled_out(tiny.folder, 2)
    advantage = group_advantage(rollout, reward(vowels, rollout, name="score"), name="advantage")
    return Graph("own", train(policy, rollout, loss=loss(advantage, **parameters), lr=1e-3))


def test_prompts_go_on_where_they_were_under_another_batch(tiny: TinyRuns) -> None:
    """None is lost or repeated, over three batches, two resumes and the end of an epoch."""
    run = tiny.run(partial(small, n=2), 2, name="changed")
    resume(run.folder, settings=["prompts.batch=3"], steps=4)
    resume(run.folder, settings=["prompts.batch=6"], steps=6)
    resume(run.folder, steps=7)
    rows = samples(run).to_pylist()
    positions = {s: sorted({r["position"] for r in rows if r["step"] == s}) for s in range(1, 8)}
    bounds = [0, 4, 8, 11, 14, 20, 26, 32]
    assert list(positions.values()) == [list(range(a, b)) for a, b in pairwise(bounds)]
    whole = samples(tiny.run(partial(small, n=2), 8, name="whole")).to_pylist()
    order = {row["position"]: row["prompt"] for row in whole}
    assert {row["position"]: row["prompt"] for row in rows} == order
    assert column(run, "data/prompts") == [4, 4, 3, 3, 6, 6, 6]


@pytest.mark.parametrize(
    "settings",
    [
        ["rollout.max_tokens=3"],
        pytest.param(["rollout.n=2", "rollout.max_tokens=3"], marks=pytest.mark.long),
        pytest.param(["rollout.max_lag=1", "rollout.max_tokens=3"], marks=pytest.mark.long),
        pytest.param(["prompts.batch=2", "rollout.max_tokens=3"], marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_rows_that_wait_are_made_again_with_the_new_value(
    tiny: TinyRuns, settings: list[str]
) -> None:
    """Also where the run dies again before its next checkpoint."""
    run = tiny.run(partial(small, max_lag=2), 6, name="lagging", checkpoint_every=1, keep=10)
    folder = run.folder
    for step in range(2, 7):
        shutil.rmtree(folder / "checkpoints" / f"step_{step}")
    cut = Cut.from_json((folder / "checkpoints" / "step_1" / "cut.json").read_bytes())
    assert len(cut.sources["prompts"].finished) == 8, "no row waits, so this tests nothing"
    with pytest.raises(ZeroDivisionError):
        resume(folder, settings=settings, checkpoint_every=0, on_step=[breaks])
    resume(folder)
    rows = [row for row in samples(folder).to_pylist() if row["step"] > 1]
    assert max(row["length"] for row in rows) <= 3
    new = {s.partition("=")[0]: int(s.partition("=")[2]) for s in settings}
    assert max(column(folder, "policy/lag/max")[1:]) <= new.get("rollout.max_lag", 2)
    n, batch = new.get("rollout.n", 4), new.get("prompts.batch", 4)
    wanted = {(p, s) for p in range(4, 4 + 5 * batch) for s in range(n)}
    assert sorted((row["position"], row["sample"]) for row in rows) == sorted(wanted)


def breaks(row: Any) -> None:
    raise ZeroDivisionError


# refused


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("prompts.shuffle=False", "node prompts: shuffle cannot change from True to False"),
        ("prompts.data={folder}/demos.parquet", "node prompts: data cannot change from "),
        ("prompts.split=train", "node prompts: split cannot change from None to train"),
        ("train_policy.start=9", "node train_policy: start cannot change from 3 to 9"),
    ],
    ids=["shuffle", "data", "split", "start"],
)
def test_what_cannot_change_is_refused_by_name_and_changes_nothing(
    tiny: TinyRuns, untrained: Path, setting: str, told: str
) -> None:
    folder = Path(shutil.copytree(untrained, tiny.runs / "refused"))
    before = files_in(folder)
    with pytest.raises(CheckpointError) as refused:
        resume(folder, settings=[setting.format(folder=tiny.folder)], steps=WHOLE)
    assert told in str(refused.value)
    assert f"Fix: leave it out; or start another run, from {folder}/graph.json" in str(
        refused.value
    )
    assert files_in(folder) == before


def files_in(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_moved_data_is_the_same_data(tiny: TinyRuns, untrained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(untrained, tiny.runs / "moved"))
    moved = shutil.copy(tiny.folder / "train.parquet", tmp_path / "elsewhere.parquet")
    resume(folder, settings=[f"prompts.data={moved}"], steps=UNTRAINED + 1)
    assert str(moved) in (folder / "graph.json").read_text()
    assert not (folder / "changes.json").exists()


def test_a_setting_accepts_nothing_but_itself(tiny: TinyRuns, untrained: Path) -> None:
    folder = Path(shutil.copytree(untrained, tiny.runs / "both"))
    graph = (folder / "graph.json").read_text()
    (folder / "graph.json").write_text(graph.replace('"temperature": 1.0', '"temperature": 0.9'))
    with pytest.raises(CheckpointError) as refused:
        resume(folder, settings=["train_policy.lr=0.5"], steps=WHOLE)
    assert "node rollout: temperature: 1.0 -> 0.9" in str(refused.value)
    assert "lr" not in str(refused.value)


# Programs


def test_a_phase_that_goes_on_may_change_and_one_that_has_ended_may_not(tiny: TinyRuns) -> None:
    def stop(row: Any) -> bool:
        return row["step"] == 3

    run = tiny.run(two_phases(tiny.folder), None, until=stop, name="program")
    trained = two_phases(tiny.folder).phases[0].graph.sinks[0].name
    with pytest.raises(CheckpointError, match=f"node 1/{trained}: lr: phase 1 has ended"):
        resume(run.folder, settings=[f"1/{trained}.lr=0.5"])
    assert resume(run.folder, settings=["2/train_policy.lr=0.5"]).step > 3
    assert [c[:3] for c in changes_of(run.folder)] == [(4, "node 2/train_policy", "lr")]
    assert column(run, "optim/lr")[2:4] == [0.01, 0.5]


# what a plan does otherwise


def test_threads_and_chunks_are_recorded_with_their_step(tiny: TinyRuns, untrained: Path) -> None:
    folder = Path(shutil.copytree(untrained, tiny.runs / "elsewhere"))
    resume(folder, steps=UNTRAINED + 1, chunks={"rollout": 2})
    assert changes_of(folder) == [(3, "plan of rollout", "chunks", "1", "2")]
    resume(folder, steps=UNTRAINED + 2)
    assert len(changes_of(folder)) == 1
