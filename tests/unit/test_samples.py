"""Samples: the rows of each train node as Parquet files, and what is measured of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dataflow.batch import Batch, Keys, Ragged
from dataflow.errors import DataError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.node import Node
from dataflow.schema import Episode, Rollout
from engine.keep.samples import SampleWriter, read_samples, sample_table
from engine.plan.plan import Plan
from engine.run.worker.row_metrics import step_metrics
from graphs.ppo import ppo
from operators.advantage import group_advantage, whiten
from operators.data import prompts
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.select import mixed_groups, select
from operators.train import train
from tests.kit.episodes import episode_batch, episode_samples
from tests.kit.plans import placed, planned, planned_input
from tests.kit.rewards import zero


def rows_of_a_step() -> Batch:
    offsets = np.array([0, 2, 2, 5], np.int64)
    columns = {
        "prompt": ["1 2", "3", "4 5 6"],
        "completion": ["2 1", "", "6 5 4"],
        "completion_mask": Ragged(np.array([1, 1, 1, 0, 1], np.uint8), offsets),
        "version": Ragged(np.array([3, 2, 4, 4, 5], np.int32), offsets),
        "reward": pa.array([1.0, 0.0, 0.5], pa.float32()),
        "reward/exact": pa.array([1.0, None, 0.5], pa.float32()),
        "advantage": Ragged(np.array([1, 2, 4, 0, 8], np.float32), offsets),
    }
    return Batch.make(Keys.of([10, 11, 12], [0, 1, 0]), columns, Rollout)


def table_of(step: int, *columns: str) -> pa.Table:
    """Of one train node, with all columns or with these."""
    rows = rows_of_a_step()
    return sample_table(step, {"t": rows.select(columns) if columns else rows})


def test_a_sample_table_has_means_and_the_oldest_version() -> None:
    assert sample_table(12, {"train": rows_of_a_step()}).to_pydict() == {
        "step": [12] * 3,
        "node": ["train"] * 3,
        "position": [10, 11, 12],
        "sample": [0, 1, 0],
        "prompt": ["1 2", "3", "4 5 6"],
        "completion": ["2 1", "", "6 5 4"],
        "reward": [1.0, 0.0, 0.5],
        "reward/exact": [1.0, None, 0.5],
        "advantage": [1.5, None, 6.0],
        "finish": [None] * 3,
        "length": [2, 0, 3],
        "version": [2, None, 4],
        "prompt_ids": [None] * 3,
        "completion_ids": [None] * 3,
        "completion_mask": [[1, 1], [], [1, 0, 1]],
        "versions": [[3, 2], [], [4, 4, 5]],
    }
    whole = table_of(1, "prompt", "completion", "advantage")
    assert whole.column("advantage").to_pylist() == [1.5, None, 4.0]


def test_samples_are_written_when_due_and_read_back(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path / "samples", every=5)
    for step in range(1, 12):
        writer.write(step, table_of(step))
    writer.write(15, table_of(15, "prompt", "completion"))
    table = read_samples(tmp_path / "samples")
    assert table.column("step").to_pylist() == [1] * 3 + [5] * 3 + [10] * 3 + [15] * 3
    assert table.filter(pc.field("step") == 15).column("reward").null_count == 3
    first = ["step", "node", "position", "sample", "prompt", "completion", "reward"]
    assert table.column_names[:7] == first
    assert table.slice(0, 3).to_pylist() == table_of(1).to_pylist()


def test_samples_of_later_steps_are_dropped_on_resume(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, table_of(step))
    (tmp_path / ".step_000004.parquet.tmp").write_bytes(b"half")
    SampleWriter(tmp_path).truncate_after(2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step_000001.parquet", "step_000002.parquet"}


def test_samples_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found none"):
        read_samples(tmp_path / "nowhere")
    told = r"Step 1: expected columns .* Fix: add completion, position, sample"
    with pytest.raises(DataError, match=told):
        SampleWriter(tmp_path).write(1, pa.table({"prompt": ["a"]}))
    (tmp_path / "step_000001.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"step_000001.parquet: expected a Parquet file"):
        read_samples(tmp_path)
    with pytest.raises(ValueError, match="every >= 1"):
        SampleWriter(tmp_path, every=0)


MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = Batch(Keys.of([1]), pa.record_batch({"prompt": [MESSAGES], "completion": ["hello"]}))


def test_prompts_as_messages_are_kept(tmp_path: Path) -> None:
    SampleWriter(tmp_path).write(1, sample_table(1, {"t": CHAT}))
    assert read_samples(tmp_path).column("prompt").to_pylist() == [MESSAGES]


def test_text_and_messages_of_two_nodes_stand_in_one_column() -> None:
    plain = rows_of_a_step().select(["prompt", "completion"])
    table = sample_table(1, {"chat": CHAT, "plain": plain})
    texts = ['[{"role": "user", "content": "hi"}]', "1 2", "3", "4 5 6"]
    assert table.column("prompt").to_pylist() == texts
    assert table.column("node").to_pylist() == ["chat", "plain", "plain", "plain"]


# what is recorded of whom


def line(name: str) -> Node:
    """The training of one Model on rows of its own."""
    model = Model(name, "tiny", trainable=True)
    source = prompts("train.parquet", batch=4, name=f"{name}_prompts")
    rollout = generate(model, source, n=4, max_tokens=8, name=name)
    score = reward(zero, rollout, name=f"{name}_score")
    mixed = mixed_groups(score, name=f"{name}_mixed")
    kept, kept_score = select(rollout, score, where=mixed, name=f"{name}_kept")
    advantage = group_advantage(kept, kept_score, name=f"{name}_advantage")
    white = whiten(advantage, kept, name=f"{name}_white")
    return train(model, kept, loss=clipped_policy_loss(white), lr=1e-3)


def recorded(plan: Plan) -> dict[str, Any]:
    """By train node: producer -> columns."""
    return {i.name: {f.producer: f.columns for f in i.fetches} for i in plan.recorded}


def test_each_train_node_has_the_reward_and_the_advantage_of_its_own_graph() -> None:
    fetches = recorded(planned(Graph("two", line("red"), line("blue"))))
    assert fetches.keys() == {"train_red", "train_blue"}
    for name, other in (("red", "blue"), ("blue", "red")):
        own = fetches[f"train_{name}"]
        assert own[f"{name}_score"] == ("reward", "reward/*")
        assert own[f"{name}_white"] == ("advantage",)
        assert {"completion", "prompt_ids", "completion_ids", "finish", "version"} <= {*own[name]}
        assert not any(producer.startswith(other) for producer in own)


def test_full_samples_also_have_the_log_probs_of_sampler_and_trainer() -> None:
    graph = ppo("tiny", "train.parquet", zero)
    brief, full = recorded(placed(graph)), recorded(placed(graph, samples="full"))
    assert brief.keys() == {"train_policy", "train_critic"}
    rollout = brief["train_policy"]["rollout"]
    assert brief["train_critic"]["rollout"] == rollout
    assert "sampler_logprobs" not in rollout
    assert "old" not in brief["train_policy"]
    assert full["train_policy"]["rollout"] == (*rollout, "sampler_logprobs")
    assert full["train_policy"]["old"] == ("logprobs",)
    assert "old" not in full["train_critic"]


def episodes_graph() -> Graph:
    """A generation whose rows are episodes, as those of `interact` are."""
    model = Model("policy", "tiny", trainable=True)
    plain = generate(model, prompts("train.parquet", batch=4), n=4, max_tokens=8).node
    inputs, params = dict(plain.inputs), dict(plain.params)
    states = {"policy": model}
    node = Node(
        plain.operator, "rollout", states=states, inputs=inputs, params=params, schemas=(Episode,)
    )
    rollout = node.port()
    advantage = group_advantage(rollout, reward(zero, rollout))
    return Graph("agent", train(model, rollout, loss=clipped_policy_loss(advantage), lr=1e-3))


@pytest.mark.parametrize("samples", ["brief", "full"])
def test_of_an_episode_its_turns_and_its_messages_are_recorded(samples: str) -> None:
    (columns_by_producer,) = recorded(placed(episodes_graph(), samples=samples)).values()
    columns = columns_by_producer["rollout"]
    per_turn = {"turn_end", "turn_reward"}
    assert {"messages", "final_reward", "environment_state", *per_turn} <= {*columns}
    assert {"completion_ids", "completion_mask", "finish", "version"} <= {*columns}
    assert ("turn" in columns) == ("sampler_logprobs" in columns) == (samples == "full")


def test_an_episodes_samples_have_its_turns() -> None:
    rows = episode_batch(rows=3, turns=4)
    table = episode_samples(7, rows)
    assert table.column("turns").to_pylist() == rows.lengths("turn_end").tolist()
    assert table.column("turn_end").to_pylist()[0] == rows.ragged("turn_end")[0].tolist()
    for name in ("turn_reward", "final_reward", "messages", "environment_state"):
        assert table.column(name).to_pylist() == rows.array(name).to_pylist()
    for name in ("model_seconds", "environment_seconds"):
        assert table.column(name).to_pylist() == rows.array(name).to_pylist()


def test_rows_of_other_nodes_and_older_files_have_no_turns(tmp_path: Path) -> None:
    episodes = episode_batch(rows=2)
    prompt = pa.array(["a", "b"])
    shown = episodes.select(["completion", "messages", "turn_end", "turn_reward"])
    both = {"agent": shown.with_columns({"prompt": prompt}), "plain": rows_of_a_step()}
    writer = SampleWriter(tmp_path)
    writer.write(1, table_of(1))
    writer.write(2, sample_table(2, both))
    table = read_samples(tmp_path)
    for name in ("messages", "turn_end", "turn_reward", "turns"):
        cells = table.column(name).to_pylist()
        assert [cell is None for cell in cells] == [True] * 3 + [False] * 2 + [True] * 3


def test_a_full_sample_table_has_numbers_for_each_token() -> None:
    rows, numbers = rows_of_a_step(), np.arange(5, dtype=np.float32)
    like = rows.ragged("version").like
    logprobs = {"sampler_logprobs": like(-numbers), "logprobs": like(-2 * numbers)}
    made = Batch.make(rows.keys, logprobs, Rollout)
    whole = rows.with_columns({name: made.array(name) for name in logprobs})
    table = sample_table(1, {"train": whole})
    assert table.column("advantages").to_pylist() == [[1.0, 2.0], [], [4.0, 0.0, 8.0]]
    assert table.column("sampler_logprobs").to_pylist() == [[0.0, -1.0], [], [-2.0, -3.0, -4.0]]
    assert table.column("trainer_logprobs").to_pylist() == [[0.0, -2.0], [], [-4.0, -6.0, -8.0]]


def test_rows_of_several_nodes_are_measured_under_their_names_where_they_differ() -> None:
    rows = rows_of_a_step()
    gates = {"policy": "a", "critic": "a", "other": "b"}
    nodes = [planned_input(gate, "score", name=name) for name, gate in gates.items()]
    batches = {"policy": rows, "critic": rows, "other": rows.take(np.array([0, 1]))}
    measured = list(step_metrics(nodes, batches))
    assert [value for name, value, _ in measured if name == "data/rows"] == [3.0, 2.0]
    means = {name: value for name, value, _ in measured if name.endswith("reward/mean")}
    assert means == {"rows/policy/reward/mean": 0.5, "rows/other/reward/mean": 0.5}
    names = {name for name, _, _ in measured}
    assert not any("critic" in name for name in names)
    lengths = {f"rows/{node}/completion/length/max" for node in ("policy", "other")}
    assert names >= lengths
    alone = {name for name, _, _ in step_metrics(nodes[:2], batches)}
    assert alone >= {"reward/mean", "completion/length/max"}
