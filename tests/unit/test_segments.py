"""Rows that are segments of episodes: what compares, scores, counts and refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.check import check
from dataflow.errors import GraphError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.schema import Completion, Reward, Segment
from dataflow.user import Columns
from engine.run.worker.row_metrics import row_metrics
from operators import advantage_formulas as formulas
from operators.advantage import baseline_advantage, gae, group_advantage
from operators.concat import concat
from operators.data import prompts
from operators.forward import logprobs, values
from operators.interact import interact
from operators.losses import clipped_policy_loss, trajectory_balance_loss
from operators.mean_over import mean_over
from operators.reward import reward
from operators.select import mixed_groups, select
from operators.train import train
from operators.turns import transitions, turn_reward
from tests.kit.environments import VowelTurns
from tests.kit.episode_rows import WrittenTurn, episode_chunk, make_episodes
from tests.kit.plans import headers, save_tiny_header
from tests.kit.rows import ragged
from tests.kit.scoring import scoring

PLACES = 4
"""Of an episode's rows."""


def segment_keys(rows: list[tuple[int, int, int]]) -> tuple[Keys, dict[str, Any]]:
    """The keys and columns of rows (position, episode, segment)."""
    position, episode, segment = (np.array(numbers) for numbers in zip(*rows, strict=True))
    columns = {"episode": episode.astype(np.int32), "segment": segment.astype(np.int32)}
    return Keys.of(position, episode * PLACES + segment), columns


def completion(keys: Keys, masks: list[list[int]], **columns: Any) -> Columns[Completion]:
    batch = Batch.make(keys, {"completion_mask": ragged(masks, np.uint8)} | columns, Completion)
    return Columns(batch, Completion)


def score(keys: Keys, rewards: list[float]) -> Columns[Reward]:
    return Columns(Batch.make(keys, {"reward": np.array(rewards, np.float32)}, Reward), Reward)


# --- baselines over episodes ----------------------------------------------------------------------

Rows = list[list[list[tuple[float, list[int]]]]]
"""By prompt and episode the reward and the mask of each row."""
row = st.tuples(st.integers(-4, 4).map(float), st.lists(st.integers(0, 1), min_size=1, max_size=4))
groups_of_rows = st.lists(
    st.lists(st.lists(row, min_size=1, max_size=PLACES), min_size=1, max_size=4),
    min_size=1,
    max_size=3,
)


@given(
    groups=groups_of_rows,
    baseline=st.sampled_from(["mean", "leave_one_out", "length_weighted", "none"]),
    scale=st.sampled_from(["std", "leave_one_out_std", "none"]),
)
def test_an_advantage_is_that_of_the_whole_episode(groups: Rows, baseline: str, scale: str) -> None:
    places: list[tuple[int, int, int]] = []
    rows: list[tuple[float, list[int]]] = []
    whole_places: list[tuple[int, int]] = []
    whole: list[tuple[float, list[int]]] = []
    row_counts: list[int] = []
    for position, episodes in enumerate(groups):
        for number, parts in enumerate(episodes):
            places += [(position, number, segment) for segment in range(len(parts))]
            rows += parts
            whole_places.append((position, number))
            whole.append((sum(each for each, _ in parts), [m for _, mask in parts for m in mask]))
            row_counts.append(len(parts))
    how: dict[str, Any] = {"baseline": baseline, "scale": scale, "ragged": True, "dialect": "trl"}

    keys, columns = segment_keys(places)
    advantages = formulas.group_advantage(
        completion(keys, [mask for _, mask in rows], **columns),
        score(keys, [number for number, _ in rows]),
        **how,
    )
    whole_keys = Keys.of(*zip(*whole_places, strict=True))
    expected = formulas.group_advantage(
        completion(whole_keys, [mask for _, mask in whole]),
        score(whole_keys, [number for number, _ in whole]),
        **how,
    )
    assert advantages["advantage"].values.tolist() == expected["advantage"].values.tolist()
    assert advantages["advantage"].lengths.tolist() == [len(mask) for _, mask in rows]


def test_a_baseline_of_the_prompt_is_that_of_the_whole_episode() -> None:
    keys, columns = segment_keys([(0, 0, 0), (0, 0, 1), (0, 1, 0)])
    rollout = completion(keys, [[1], [1, 0], [1]], **columns)
    above = formulas.baseline_advantage(
        rollout, score(keys, [1.0, 2.0, 5.0]), score(keys, [1.0] * 3)
    )
    assert above["advantage"].values.tolist() == [2.0, 2.0, 0.0, 4.0]


def test_metrics_of_rewards_count_episodes() -> None:
    keys, columns = segment_keys([(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0)])
    columns["reward"] = np.array([0.0, 2.0, 4.0, 1.0, 1.0], np.float32)
    columns["reward/f"] = pa.array([None, 2.0, 4.0, 1.0, None], pa.float32())
    measured = {name: (number, count) for name, number, count in row_metrics(batch(keys, columns))}
    assert measured["reward/mean"] == (2.0, 4)
    assert measured["reward/f/mean"] == (pytest.approx(7 / 3), 3)
    assert measured["reward/f/applied"] == (0.75, 4)
    assert measured["reward/no_signal"] == (0.5, 2)


def batch(keys: Keys, columns: dict[str, Any]) -> Batch:
    return Batch.make(keys, columns, Segment)


# --- functions ------------------------------------------------------------------------------------


def test_a_function_sees_the_last_row_of_each_episode() -> None:
    def counts(completions: list[str], messages: Any, **others: Any) -> list[float]:
        assert "finish" not in others
        return [float(len(conversation)) for conversation in messages]

    turns = [WrittenTurn(written=[3])]
    keys, columns = segment_keys([(7, 0, 0), (7, 0, 1), (7, 1, 0)])
    conversations = ['[{"role": "user", "content": "x"}]', "[{}, {}]", "[{}, {}, {}]"]
    finishes = ["segment", "stop", "length"]
    rows = make_episodes([turns] * 3, keys=keys, messages=conversations, finish=finishes)
    rows = rows.with_columns({"prompt": pa.array(["p"] * 3)} | as_arrays(columns))
    with scoring(counts, inproc=True, episodes=True, segments=True) as (kernel, session):
        scored = Batch.concat(list(kernel.run(episode_chunk(rows, "rows")))).sort()
    assert scored.keys.rows() == keys.rows()
    assert scored.array("reward").to_pylist() == [0.0, 2.0, 3.0]
    assert scored.array("reward/counts").to_pylist() == [None, 2.0, 3.0]
    assert not session.tombstones


def as_arrays(columns: dict[str, Any]) -> dict[str, pa.Array]:
    return {name: pa.array(column) for name, column in columns.items()}


# --- the check ------------------------------------------------------------------------------------


def last_two(messages: list[Any]) -> list[Any]:
    return messages[-1:]


def by_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


HOW: dict[str, Any] = {"overflow": "segment", "segments": 3, "compact": last_two}


def graph_of(make_loss: Any, n: int = 2) -> Graph:
    policy = Model("policy", "tiny", trainable=True)
    prompt = prompts("tasks", batch=8)
    rows = interact(policy, prompt, VowelTurns, n=n, max_turns=3, max_tokens=64, **HOW)
    return Graph("g", train(policy, rows, loss=make_loss(rows, prompt), lr=1e-5))


def of_groups(rows: Any, prompt: Any) -> Any:
    return clipped_policy_loss(group_advantage(rows, reward(by_length, rows)))


def of_values(rows: Any, prompt: Any) -> Any:
    critic = Model("critic", "tiny", trainable=True, head="scalar")
    return clipped_policy_loss(gae(rows, turn_reward(rows), values(critic, rows)))


def of_partitions(rows: Any, prompt: Any) -> Any:
    reference = logprobs(Model("reference", "tiny"), rows)
    return trajectory_balance_loss(turn_reward(rows), reference=reference, beta=0.1)


def of_means(rows: Any, prompt: Any) -> Any:
    points = turn_reward(rows)
    return clipped_policy_loss(baseline_advantage(rows, points, mean_over(points, prompt)))


@pytest.fixture
def in_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_tiny_header(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_groups_of_episodes_are_compared(in_tiny: Path) -> None:
    checked = check(graph_of(of_groups), headers)
    [generation] = [node for node in checked.graph.nodes if node.name == "interact"]
    assert generation.schemas == (Segment,)


REFUSED = {"gae": of_values, "trajectory_balance_loss": of_partitions, "mean_over": of_means}


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_a_row_for_an_episode_is_refused(in_tiny: Path, name: str) -> None:
    with pytest.raises(GraphError, match=f"{name} takes each row for a whole episode") as caught:
        check(graph_of(REFUSED[name]), headers)
    assert "up to 3 rows of one" in str(caught.value)
    assert "segments=1" in str(caught.value)


def test_two_rows_are_several(in_tiny: Path) -> None:
    policy, prompt = Model("policy", "tiny", trainable=True), prompts("tasks", batch=8)
    how: dict[str, Any] = {**HOW, "segments": 2}
    rows = interact(policy, prompt, VowelTurns, n=2, max_turns=3, max_tokens=64, **how)
    assert rows.schema is Segment
    graph = Graph("g", train(policy, rows, loss=of_values(rows, prompt), lr=1e-5))
    with pytest.raises(GraphError, match="up to 2 rows of one"):
        check(graph, headers)


def test_so_are_selections_turns_and_evaluations_of_them(in_tiny: Path) -> None:
    policy = Model("policy", "tiny", trainable=True)
    prompt = prompts("tasks", batch=8)
    rows = interact(policy, prompt, VowelTurns, n=2, max_turns=3, max_tokens=64, **HOW)
    points = turn_reward(rows)
    kept_rows, kept_points = select(rows, points, where=mixed_groups(points))
    loss = clipped_policy_loss(group_advantage(kept_rows, kept_points))
    turns = transitions(rows, max_turns=3)
    other = Model("other", "tiny", trainable=True)
    turn_loss = clipped_policy_loss(group_advantage(turns, turns, ragged=True))
    graph = Graph(
        "g",
        train(policy, kept_rows, loss=loss, lr=1e-5),
        train(other, turns, loss=turn_loss, lr=1e-5, name="train_other"),
    )
    with pytest.raises(GraphError) as caught:
        check(graph, headers)
    for name in ("mixed_groups", "transitions"):
        assert f"{name} takes each row for a whole episode" in str(caught.value)


def concat_graph(other_how: dict[str, Any]) -> Graph:
    """Training on two generations, of which one makes segments."""
    policy, prompt = Model("policy", "tiny", trainable=True), prompts("tasks", batch=8)
    how: dict[str, Any] = {"n": 2, "max_turns": 3, "max_tokens": 64}
    several = interact(policy, prompt, VowelTurns, **how, **HOW)
    other = interact(policy, prompt, VowelTurns, **how, **other_how, name="other")
    rows = concat(several, other)
    advantage = group_advantage(rows, concat_of_rewards(several, other))
    return Graph("g", train(policy, rows, loss=clipped_policy_loss(advantage), lr=1e-5))


def test_parts_are_all_segments_or_none(in_tiny: Path) -> None:
    check(concat_graph(HOW), headers)
    with pytest.raises(GraphError, match="some of its parts are rows of episodes"):
        check(concat_graph({}), headers)


def concat_of_rewards(rows: Any, other: Any) -> Any:
    return concat(turn_reward(rows), turn_reward(other, name="other_reward"), name="all_rewards")


def test_rows_of_two_generations_are_episodes_of_their_own() -> None:
    """Both have an episode 0."""
    columns = {"episode": np.zeros(4, np.int32), "segment": np.array([0, 1, 0, 1], np.int32)}
    keys = Keys.of([0] * 4, [0, 1, PLACES, PLACES + 1])
    rollout = completion(keys, [[1]] * 4, **columns)
    how: dict[str, Any] = {"baseline": "mean", "scale": "none", "ragged": True, "dialect": "trl"}
    above = formulas.group_advantage(rollout, score(keys, [1.0, 1.0, 0.0, 4.0]), **how)
    assert above["advantage"].values.tolist() == [-1.0, -1.0, 1.0, 1.0]


def test_one_episode_is_no_group_however_many_rows_it_has(in_tiny: Path) -> None:
    with pytest.raises(GraphError, match="groups have 1 row"):
        check(graph_of(of_groups, n=1), headers)


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"overflow": "segment", "segments": 3}, "expected compact to be a function of messages"),
        ({"compact": last_two}, "and only there, found"),
        ({"overflow": "segment", "compact": last_two}, "expected segments to be 2 or more"),
        ({"segments": 3}, "1 without both, found 3"),
        ({"thinking": "template"}, "expected segments to be 2 or more"),
    ],
)
def test_settings_of_segments_go_together(how: dict[str, Any], problem: str) -> None:
    policy, prompt = Model("policy", "tiny", trainable=True), prompts("tasks", batch=8)
    with pytest.raises(GraphError, match=problem):
        interact(policy, prompt, VowelTurns, max_turns=3, max_tokens=64, **how)
