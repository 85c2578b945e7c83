"""Runs of episodes that go on in further rows: the same numbers however they are divided."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dataflow.graph import Graph
from dataflow.model import Model
from engine.api import rerun, resume
from operators.advantage import group_advantage
from operators.data import prompts
from operators.interact import interact
from operators.losses import clipped_policy_loss
from operators.train import train
from operators.turns import turn_reward
from tests.kit import runs
from tests.kit.environments import Talker, first_and_last
from tests.kit.processes import KillWorkers
from tests.kit.tiny_runs import TinyRuns

pytestmark = [pytest.mark.timeout(240), pytest.mark.long]
CHUNKS: dict[str, Any] = {"chunks": {"episode": 2}}
REPLICAS: dict[str, Any] = {"workers": "apart", "replicas": {"episode": 2}}
PROMPTS, EPISODES, SEGMENTS = 4, 2, 3


def agent(folder: Path, *, max_lag: int = 0) -> Graph:
    """GRPO over episodes, most of which need a second row."""
    policy = Model("policy", str(folder / "model"), trainable=True)
    episode = interact(
        policy,
        prompts(str(folder / "train.parquet"), batch=PROMPTS),
        Talker,
        n=EPISODES,
        max_turns=6,
        max_tokens=60,
        max_turn_tokens=8,
        max_context=48,
        overflow="segment",
        segments=SEGMENTS,
        compact=first_and_last,
        max_lag=max_lag,
        name="episode",
    )
    score = turn_reward(episode, name="score")
    loss = clipped_policy_loss(group_advantage(episode, score, name="advantage"))
    return Graph("segments", train(policy, episode, loss=loss, lr=1e-3))


def lagging_agent(folder: Path) -> Graph:
    return agent(folder, max_lag=1)


def require_whole_episodes_once(run: runs.Run, prompt_count: int) -> None:
    """Each episode of so many prompts has its first rows, and was trained once."""
    rows = runs.samples(run).to_pylist()
    assert max(Counter((row["position"], row["sample"]) for row in rows).values()) == 1
    episodes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["sample"]):
        assert row["sample"] == row["episode"] * SEGMENTS + row["segment"]
        episodes.setdefault((row["position"], row["episode"]), []).append(row)
    assert len(episodes) == prompt_count * EPISODES
    for its_rows in episodes.values():
        assert [row["segment"] for row in its_rows] == list(range(len(its_rows)))
        assert [row["finish"] for row in its_rows[:-1]] == ["segment"] * (len(its_rows) - 1)
        assert its_rows[-1]["finish"] != "segment"
    assert max(map(len, episodes.values())) > 1


def test_segments_have_the_same_bits_in_one_process_and_after_deaths(tiny: TinyRuns) -> None:
    death = KillWorkers({1: "episode-0", 2: "score"})
    one = tiny.run(agent, name="one", **CHUNKS)
    killed = tiny.run(agent, name="killed", on_step=[death], **CHUNKS, **REPLICAS)
    runs.require_same_numbers(killed, one)
    require_whole_episodes_once(one, 3 * PROMPTS)
    assert set(runs.column(one, "data/lost_rows")) == {0.0}
    for step in runs.metrics(one):
        assert step["data/rows"] == round(step["episode/segments"] * PROMPTS * EPISODES)
        assert step["reward/mean"] == pytest.approx(step["episode/reward"], abs=1e-6)


def test_no_segment_is_lost_or_trained_twice_with_lag_kills_and_resume(tiny: TinyRuns) -> None:
    death = KillWorkers({1: "episode-0", 3: "episode-1"})
    result = tiny.run(lagging_agent, 4, on_step=[death], checkpoint_every=1, **REPLICAS)
    resume(result.folder, steps=6)
    require_whole_episodes_once(result, 6 * PROMPTS)


def test_a_recorded_step_of_segments_runs_again_to_the_same_bits(tiny: TinyRuns) -> None:
    result = tiny.run(agent, 2, record="all")
    for node in ("episode", "score", "advantage", "train_policy"):
        again = rerun(result.folder, [node], 2)
        assert again.same, again.nodes
