"""The longest prompt of a source and of a generation, as an engine is sized by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataflow.rows import Domains
from engine.plan.cost.kv_cache import UNSTATED_PROMPT, longest_row
from engine.plan.cost.lengths import of_rollout
from engine.plan.prompt_bounds import NEXT_TURN, most_prompt_tokens
from operators.continued import continued
from operators.data import prompts
from operators.data_lengths import MARKS, TEMPLATE, longest_prompt
from operators.generate import generate
from tests.kit.graphs import graph_of, policy, sampled
from tests.kit.plans import CONFIG, placed

pytestmark = pytest.mark.usefixtures("tiny", "all_installed")
TEXTS = ["a", "b" * 5000, "caf\u00e9" * 10]


def saved(column: list[Any], path: str = "train.parquet") -> str:
    pq.write_table(pa.table({"prompt": column, "answer": ["a"] * len(column)}), path)
    return path


@pytest.mark.parametrize(
    ("column", "most"),
    [
        (TEXTS, 5000 + MARKS),
        (["caf\u00e9" * 10], 50 + MARKS),
        ([[1] * 7, [2]], 7),
        (
            [[{"role": "user", "content": "x" * 90}], [{"role": "user", "content": "y"}] * 2],
            4 + 90 + MARKS + TEMPLATE,
        ),
    ],
    ids=["text", "bytes, not characters", "token ids", "messages"],
)
def test_no_prompt_has_more_tokens_than_bytes(column: list[Any], most: int) -> None:
    assert longest_prompt(saved(column), None) == most


def test_a_file_that_was_written_anew_is_read_anew() -> None:
    path = saved(["a"])
    assert longest_prompt(path, None) == 1 + MARKS
    assert longest_prompt(saved(TEXTS), None) == 5000 + MARKS


def test_what_cannot_be_read_or_is_a_task_has_no_bound() -> None:
    assert longest_prompt("none.parquet", None) is None
    assert longest_prompt("reasoning_gym:zebra_puzzles", None) is None


def test_a_stated_bound_is_that_of_the_generation() -> None:
    saved(TEXTS)
    graph = graph_of(sampled(max_prompt_tokens=100))
    assert most_prompt_tokens(graph.node("rollout"), Domains(graph)) == 100


def test_prompts_that_continue_rows_have_room_for_those_rows() -> None:
    saved(TEXTS)
    first = generate(policy, prompts("train.parquet", batch=4), max_tokens=30, name="draft")
    second = generate(policy, continued(first, then="Check."), max_tokens=20, name="final")
    graph = graph_of(second)
    longest = 5000 + MARKS + 30 + NEXT_TURN + len("Check.")
    assert most_prompt_tokens(graph.node("final"), Domains(graph)) == longest


def test_an_engine_has_room_for_the_longest_prompt_of_the_data() -> None:
    """The Model has 16,384 positions; a bound of 4,096 was for data of which nothing is known."""
    Path("tiny/config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 16384}))
    saved(TEXTS)
    graph = graph_of(sampled(max_tokens=32))
    layout = placed(graph, kernel={"rollout": "vllm"}).node("rollout").layout
    assert layout.longest == 5000 + MARKS + 32
    saved(["a" * 40])
    assert placed(graph, kernel={"rollout": "vllm"}).node("rollout").layout.longest == 88


def test_an_engine_is_no_longer_than_the_positions_of_its_model() -> None:
    assert longest_row(of_rollout(32, None), 1024, 5000) == 1024
    assert longest_row(of_rollout(32, None), 0) == UNSTATED_PROMPT + 32


def test_a_bound_that_nobody_knows_is_said() -> None:
    Path("tiny/config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 16384}))
    graph = graph_of(sampled(max_tokens=32))
    message = "rollout: the engine has room for prompts of 4,096 tokens, and the data does not say"
    assert any(note.startswith(message) for note in placed(graph, kernel={"rollout": "vllm"}).notes)
    saved(TEXTS)
    assert not any(
        note.startswith(message) for note in placed(graph, kernel={"rollout": "vllm"}).notes
    )
