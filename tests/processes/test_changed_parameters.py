"""Runs that go on with other parameters: the same bits before, and the new value's from there on.

A run that has not trained yet has no state but its place in the data. So where the first update is
made after the change, it must equal a run that had the new values from its beginning, to the bit.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import CheckpointError, DataError
from dataflow.set_expressions import edited
from engine.api import resume
from engine.keep.checkpoint.cut import Cut
from tests.kit.run_graphs import evaluated, small
from tests.kit.run_programs import two_phases
from tests.kit.runs import column, files_in, metrics, samples, timeless, weights
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


# A resume makes the plan and opens every kernel with the edited graph, so how a value is taken over
# depends on who reads it, not on its name. Each reader has its parameters here: a train kernel
# (lr), beside the state of its optimizer (weight_decay), its loss (clip, which counts from the
# second minibatch on), generation (temperature), a function on columns (scale), the plan's
# numbers of rows (n, minibatches) and the coordinator (every).
SETTINGS = {
    "training": [
        "train_policy.lr=0.01",
        "train_policy.minibatches=2",
        "train_policy.clipped_policy_loss.clip=0.0001",
        "train_policy.optimizer=AdamW(weight_decay=0.5)",
    ],
    "rows": ["rollout.n=2", "rollout.temperature=0.7", "advantage.scale=none", "evaluate.every=1"],
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_from_its_step_on_a_value_holds_as_if_it_always_had(
    tiny: TinyRuns, untrained: Path, settings: list[str]
) -> None:
    changed = Path(shutil.copytree(untrained, tiny.runs / "changed"))
    wanted = tiny.run(edited(evaluated(tiny.folder), [LATE, *settings]), WHOLE, name="wanted")
    resume(changed, settings=settings, steps=WHOLE)
    assert timeless(metrics(changed))[:UNTRAINED] == timeless(metrics(untrained))
    assert timeless(metrics(changed))[UNTRAINED:] == timeless(metrics(wanted))[UNTRAINED:]
    rows, of_wanted = samples(changed).to_pylist(), samples(wanted).to_pylist()
    before = samples(untrained).to_pylist()
    assert rows[: len(before)] == before
    assert rows[len(before) :] == [row for row in of_wanted if row["step"] > UNTRAINED]
    assert weights(changed).items() <= weights(wanted).items()


def test_moments_go_on_under_another_lr(tiny: TinyRuns) -> None:
    """As under a schedule that changes it at that Step; the record says from which."""
    scheduled = edited(small(tiny.folder), ["train_policy.lr=linear(0.0009765625, 0.0078125, 2)"])
    wanted = tiny.run(scheduled, 4, name="wanted")
    first = edited(small(tiny.folder), ["train_policy.lr=0.0009765625"])
    changed = tiny.run(first, 1, name="changed")
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


def changes_of(folder: Path) -> list[tuple[int, str, str, str, str]]:
    kept = json.loads((folder / "changes.json").read_text())["changes"]
    return [(c["step"], c["where"], c["what"], c["old"], c["new"]) for c in kept]


def test_prompts_go_on_where_they_were_under_another_batch(tiny: TinyRuns) -> None:
    """None is lost or repeated, over three batches, two resumes and the end of an epoch."""
    run = tiny.run(partial(small, n=2), 2, name="changed")
    resume(run.folder, settings=["prompts.batch=3"], steps=4)
    resume(run.folder, settings=["prompts.batch=6"], steps=6)
    resume(run.folder, steps=7)
    whole = tiny.run(partial(small, n=2), 8, name="whole")
    order = {row["position"]: row["prompt"] for row in samples(whole).to_pylist()}
    wanted: list[tuple[int, int, str]] = []
    for step, batch in enumerate([4, 4, 3, 3, 6, 6, 6], start=1):
        for position in range(len(wanted), len(wanted) + batch):
            wanted.append((step, position, order[position]))
    rows = samples(run).to_pylist()
    assert sorted({(row["step"], row["position"], row["prompt"]) for row in rows}) == wanted
    assert column(run, "data/prompts") == [4, 4, 3, 3, 6, 6, 6]


def test_rows_that_wait_are_made_again_with_the_new_values(tiny: TinyRuns) -> None:
    """Also where the run dies again before its next checkpoint."""
    run = tiny.run(partial(small, max_lag=2), 6, name="lagging", checkpoint_every=1, keep=10)
    folder = run.folder
    for step in range(3, 7):
        shutil.rmtree(folder / "checkpoints" / f"step_{step}")
    cut = Cut.from_json((folder / "checkpoints" / "step_2" / "cut.json").read_bytes())
    assert len(cut.sources["prompts"].finished) == 4, "no row waits, so this tests nothing"
    settings = ["rollout.max_tokens=3", "rollout.n=2", "rollout.max_lag=1", "prompts.batch=2"]
    with pytest.raises(ZeroDivisionError):
        resume(folder, settings=settings, checkpoint_every=0, on_step=[breaks])
    resume(folder)
    rows = [row for row in samples(folder).to_pylist() if row["step"] > 2]
    assert max(row["length"] for row in rows) <= 3
    assert max(column(folder, "policy/lag/max")[2:]) <= 1
    keys = sorted((row["position"], row["sample"]) for row in rows)
    assert keys == [(position, sample) for position in range(8, 16) for sample in range(2)]


def breaks(row: Any) -> None:
    raise ZeroDivisionError


def test_an_edit_whose_first_step_ends_in_an_error_is_taken_back(
    tiny: TinyRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny.run(small, 1).folder
    resume(folder, settings=["train_policy.lr=0.5"], steps=2)
    names = ("graph.json", "changes.json", "options.json", "plan.json")
    before = {name: (folder / name).read_text() for name in names}
    with pytest.raises(DataError, match=r"rollout: row .*: expected at most 1 prompt tokens"):
        resume(folder, settings=["rollout.max_prompt_tokens=1", "rollout.n=2"], steps=4)
    assert {name: (folder / name).read_text() for name in names} == before
    message = (
        "an error came before the first step with rollout.max_prompt_tokens=1 rollout.n=2 ended"
    )
    assert message in capsys.readouterr().err
    resume(folder, steps=3)
    assert column(folder, "step") == [1, 2, 3]
    assert changes_of(folder)[0][0] == 2
    assert len(changes_of(folder)) == 1


# refused


def test_what_cannot_change_is_refused_by_name_and_changes_nothing(
    tiny: TinyRuns, untrained: Path
) -> None:
    folder = Path(shutil.copytree(untrained, tiny.runs / "refused"))
    before = files_in(folder)
    told = r"node prompts: data cannot change from .* Fix: leave it out; or start another run, from"
    with pytest.raises(CheckpointError, match=rf"{told} {folder}/graph.json"):
        resume(folder, settings=[f"prompts.data={tiny.folder}/demos.parquet"], steps=WHOLE)
    assert files_in(folder) == before


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
    run = tiny.run(two_phases, None, until=lambda row: row["step"] == 3, name="program")
    with pytest.raises(CheckpointError, match="node 1/train_policy: lr: phase 1 has ended"):
        resume(run.folder, settings=["1/train_policy.lr=0.5"])
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
