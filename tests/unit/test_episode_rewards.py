"""Functions of `reward` on episodes: what they are called with, and names that nothing has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from dataflow.batch import Batch, Keys
from dataflow.check import CheckedGraph, check
from dataflow.errors import GraphError, KernelError
from dataflow.graph import Graph
from dataflow.kernel import Chunk
from dataflow.model import Model
from dataflow.node import Port
from dataflow.schema import MESSAGE
from operators import tasks
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.kernels.scoring_keywords import cut_conversation
from operators.kernels.step_scoring import StepReward
from operators.losses import clipped_policy_loss
from operators.reward import reward, step_reward
from operators.rewards import verl_reward, wants
from operators.train import train
from tests.kit.episode_rows import WrittenTurn, as_episodes, episode_chunk, make_episodes
from tests.kit.plans import planned
from tests.kit.scoring import scoring

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
QUESTION = {"role": "user", "content": "1 + 2? Use tools."}
SPOKEN = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "Thank you."},
]
TURNS = [WrittenTurn(written=[3, 4], answer=[5], reward=0.5), WrittenTurn(written=[6])]


def chat_chunk(states: Sequence[Any], **columns: Any) -> Chunk:
    """Rows of one conversation, in which the data's prompt lacks what `reset` added."""
    count = len(states)
    prompt = [{"role": "user", "content": "1 + 2?"}]
    rows = make_episodes([TURNS] * count, final=[2.0] * count, keys=Keys.of(range(10, 10 + count)))
    texts = {
        "prompt": pa.array([prompt] * count, pa.list_(MESSAGE)),
        "messages": pa.array([json.dumps([QUESTION, *SPOKEN])] * count),
        "environment_state": pa.array([json.dumps(state) for state in states]),
    }
    arrays = {name: pa.array(column) for name, column in columns.items()}
    return episode_chunk(rows.with_columns(texts | arrays), "rows")


def numbers(batches: Any) -> list[float]:
    [batch] = batches
    return batch.array("reward").to_pylist()


def whole_conversation(
    prompts: Any,
    completions: Any,
    completion_ids: Any,
    environments: Any,
    environment_state: Any,
    messages: Any,
    turn_rewards: Any,
    final_reward: Any,
    finish: Any,
    answer: Any,
    log_metric: Any,
    score: Any = None,
) -> list[float]:
    assert prompts == [[QUESTION]]
    assert completions == [SPOKEN]
    assert messages == [[QUESTION, *SPOKEN]]
    assert completion_ids == [[3, 4, 5, 6]]
    assert turn_rewards == [[0.5, None]]
    assert (final_reward, finish, answer, score) == ([2.0], ["stop"], ["x"], [7])
    assert environment_state == [{"score": 7, "board": {"a": [1]}}]
    [environment] = environments
    log_metric("calls", 1.0)
    return [float(environment.score + environment.board["a"][0])]


@pytest.mark.parametrize("inproc", [False, True])
def test_a_function_gets_the_whole_conversation_and_the_state(inproc: bool) -> None:
    chunk = chat_chunk([{"score": 7, "board": {"a": [1]}}], answer=["x"])
    with scoring(whole_conversation, inproc=inproc, episodes=True) as (kernel, session):
        assert numbers(kernel.run(chunk)) == [8.0]
    assert session.logged() == [("reward/whole_conversation/calls", 1.0)]


def test_a_function_of_any_keywords_gets_what_trl_gives_it() -> None:
    passed: dict[str, Any] = {}

    def looks(completions: Any, **kwargs: Any) -> list[float]:
        passed.update(kwargs)
        return [float(len(completions[0]))]

    with scoring(looks, inproc=True, episodes=True) as (kernel, _):
        assert numbers(kernel.run(chat_chunk([{"score": 1}], answer=["x"]))) == [4.0]
    assert passed.pop("environments") == [SimpleNamespace(score=1)]
    assert passed.keys() == {"prompts", "completion_ids", "answer"}


def test_of_text_prompts_a_completion_is_text() -> None:
    def reads(prompts: list[str], completions: list[str], messages: Any) -> list[float]:
        assert prompts == ["p0", "p1"]
        assert completions == ["text 0", "text 1"]
        return [float(len(conversation)) for conversation in messages]

    rows = make_episodes([TURNS, []], messages=["[]", json.dumps(SPOKEN)])
    rows = rows.with_columns({"prompt": pa.array(["p0", "p1"])})
    with scoring(reads, inproc=True, episodes=True) as (kernel, _):
        assert numbers(kernel.run(episode_chunk(rows, "rows"))) == [0.0, 4.0]


def test_a_conversation_is_cut_at_the_models_first_turn() -> None:
    shown = [QUESTION, {"role": "assistant", "content": "An example."}, QUESTION]
    assert cut_conversation([*shown, *SPOKEN], 3) == (shown, SPOKEN)
    assert cut_conversation([*shown, QUESTION, *SPOKEN], 3) == ([*shown, QUESTION], SPOKEN)
    assert cut_conversation(shown, 3) == (shown, [])


def by_entries(completions: Any, score: list[Any], answer: list[Any]) -> list[float]:
    return [0.0 if s is None else float(s + a) for s, a in zip(score, answer, strict=True)]


def test_a_column_of_the_data_goes_before_an_entry_and_rows_may_lack_one() -> None:
    states = [{"score": 1, "answer": 100}, {}, {"score": 3}]
    with scoring(by_entries, inproc=True, episodes=True) as (kernel, _):
        assert numbers(kernel.run(chat_chunk(states, answer=[10, 20, 30]))) == [11.0, 0.0, 33.0]
        later = chat_chunk([{}], answer=[1])
        assert numbers(kernel.run(later)) == [0.0], "rows before had it"


def test_a_name_that_nothing_has_is_an_error_that_lists_both() -> None:
    with scoring(by_entries, inproc=True, episodes=True) as (kernel, _):
        chunk = chat_chunk([{"scores": 1}, {"steps": 2}], answer=[1, 2])
        message = (
            r"reward 'by_entries': wants 'score', data has: answer; the environment's state has:"
            r" scores, steps\. Fix: 'scores', or a default for this parameter\."
        )
        with pytest.raises(KernelError, match=message):
            list(kernel.run(chunk))


def picky(completions: Any, score: list[Any]) -> list[float]:
    if None in score:
        raise ValueError("no score")
    return [float(each) for each in score]


def test_a_failed_call_is_repeated_with_the_entries_of_each_row() -> None:
    states = [{"score": 1}, {}, {"score": 3}]
    with scoring(picky, episodes=True, on_error="drop_group") as (kernel, session):
        [batch] = kernel.run(chat_chunk(states))
    assert batch.array("reward").to_pylist() == [1.0, 3.0]
    assert list(session.failed) == [(11, 0, 0)]
    assert "ValueError: no score" in session.failed[11, 0, 0]


def test_a_state_that_is_no_json_is_a_fault_of_that_row() -> None:
    chunk = chat_chunk([{}, {}])
    rows = chunk.inputs["rows"]
    broken = rows.with_columns({"environment_state": pa.array(["{}", "{"])})

    def counts(environments: Any, completions: Any) -> list[float]:
        return [1.0] * len(environments)

    with scoring(counts, episodes=True, on_error="drop_group") as (kernel, session):
        [batch] = kernel.run(episode_chunk(broken, "rows"))
    assert len(batch) == 1
    assert "JSONDecodeError" in session.failed[11, 0, 0]


def test_verls_functions_and_tasks_read_what_the_model_said_last() -> None:
    def compute(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        return float(solution_str == "It is 3.")

    chunk = chat_chunk([{}], data_source=["d"], reward_model=[{"ground_truth": "3"}])
    with scoring(verl_reward(compute), inproc=True, episodes=True) as (kernel, _):
        assert numbers(kernel.run(chunk)) == [1.0]
    assert tasks.completion_text(SPOKEN[:2]) == ""
    assert tasks.completion_text([]) == ""


def test_steps_of_an_episode_are_scored_beside_its_state(base: str) -> None:
    def by_step(steps: Any, environments: Any, completions: Any) -> list[list[float]]:
        assert completions == [SPOKEN]
        return [[float(environments[0].score)] * len(row) for row in steps]

    models = {"tokenizer": Model("policy", base)}
    params: dict[str, Any] = {"split": "|", "inproc": True, "episodes": True, "models": models}
    with scoring(by_step, kind=StepReward, **params) as (kernel, _):
        [batch] = kernel.run(chat_chunk([{"score": 4}]))
    assert batch.array("token_reward").to_pylist() == [[0, 0, 0, 4]]


# in a graph

DATA: dict[str, pa.DataType] = {"prompt": pa.utf8(), "answer": pa.utf8()}


def graph_of(fn: Any, rows: Any = None) -> Graph:
    policy = Model("policy", "models/tiny", trainable=True)
    rollout = generate(policy, prompts("data/train.parquet", batch=4), n=2, max_tokens=6)
    rows = rollout if rows == "plain" else as_episodes(rollout)
    score = reward(fn, rows, name="score")
    loss = clipped_policy_loss(group_advantage(rows, score))
    return Graph("g", train(policy, rows, loss=loss, lr=1e-3))


def checked(fn: Any, rows: Any = None, **more: pa.DataType) -> CheckedGraph:
    return check(graph_of(fn, rows), lambda data, split: DATA | more)


def test_only_of_episodes_a_name_may_be_an_entry() -> None:
    checked(picky)
    with pytest.raises(GraphError, match=r"wants 'score', prompts 'train\.parquet' has: prompt"):
        checked(picky, "plain")


def needs_objects(completions: Any, environments: Any) -> list[float]:
    return []


def needs_states(completions: Any, environment_state: Any) -> list[float]:
    return []


def needs_turns(completions: Any, turn_rewards: Any) -> list[float]:
    return []


@pytest.mark.parametrize("fn", [needs_objects, needs_states, needs_turns])
def test_what_only_episodes_have_is_refused_of_other_rows(fn: Any) -> None:
    checked(fn)
    *_, keyword = wants(fn).names
    with pytest.raises(GraphError, match=f"wants '{keyword}'.*Fix: episodes, rows of interact"):
        checked(fn, "plain")
    keys = Keys.of([0])
    with (
        scoring(fn, inproc=True) as (kernel, _),
        pytest.raises(KernelError, match=f"wants '{keyword}'.*rows of interact"),
    ):
        list(kernel.run(Chunk(id=0, step=0, keys=keys, inputs={"rows": plain_rows()})))


def plain_rows() -> Batch:
    return make_episodes([TURNS]).select(["completion", "completion_ids"])


def test_a_column_that_is_called_as_a_keyword_is_warned_of() -> None:
    def looks(completions: Any, environments: Any) -> list[float]:
        return []

    warnings = checked(looks, environments=pa.utf8()).warnings
    assert [each.rule for each in warnings] == ["hidden_column"]
    assert "a column 'environments', which it is not given" in warnings[0].problem
    assert not checked(looks, "plain", environments=pa.utf8()).warnings


def fetched(fn: Any) -> set[str]:
    """The columns that the plan fetches for a function of episodes."""
    plan = planned(graph_of(fn))
    [rows] = plan.node("score").inputs
    return {column for fetch in rows.fetches for column in fetch.columns}


def test_columns_travel_only_if_they_are_read() -> None:
    def by_text(completions: Any, answer: Any) -> list[float]:
        return []

    def by_turns(turn_rewards: Any) -> list[float]:
        return []

    assert fetched(by_text) == {"completion", "completion_ids", "prompt", "messages", "answer"}
    assert fetched(by_turns) == {"completion", "completion_ids", "prompt", "turn_reward"}
    assert "environment_state" in fetched(picky)


def test_step_rewards_of_episodes_ask_for_the_same() -> None:
    def by_step(steps: Any, environments: Any) -> list[list[float]]:
        return []

    policy = Model("policy", "models/tiny", trainable=True)
    rollout = generate(policy, prompts("data/train.parquet", batch=4), max_tokens=6)
    port: Port[Any] = step_reward(by_step, as_episodes(rollout))
    assert port.node.params["columns"] == ("environment_state",)
    assert step_reward(by_step, rollout).node.params["columns"] == ("environments",)
