"""Reward functions as declared: columns, names, verl's adapter, scorers of tasks; one call."""

from __future__ import annotations

import functools
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pyarrow as pa
import pytest

from dataflow.errors import GraphError
from engine.cli.target import load_function
from operators import rewards, tasks
from operators.kernels.scoring_child import Scorer, ScoringOutcome
from operators.kernels.scoring_keywords import CONVERSATIONAL
from tests.kit.scoring import answers, scoring


def trl_reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [1.0 if c == a else 0.0 for c, a in zip(completions, answer, strict=True)]


def strict(
    prompts: list[str],
    completions: list[str],
    solution: list[str],
    log_metric: Any,
    hint: Any = None,
) -> list[float]:
    log_metric("shown", len(prompts))
    return [float(s in c) for c, s in zip(completions, solution, strict=True)]


class Judge:
    def __call__(self, completions: list[str]) -> list[float]:
        return [0.5] * len(completions)


def scored(fn: Any, **columns: Any) -> ScoringOutcome:
    """One call on these columns, by default two completions."""
    return Scorer(fn).score(pa.record_batch({"completion": ["a", "b"]} | columns))


def test_a_trl_function_names_its_columns() -> None:
    assert rewards.reward_columns(trl_reward) == ("answer", "*")
    assert rewards.reward_columns(strict) == ("solution", "hint")
    assert rewards.wants(strict).required == {"prompts", "completions", "solution", "log_metric"}


def test_names_come_from_functions_partials_lambdas_and_classes_and_repeat_with_a_suffix() -> None:
    assert rewards.reward_name(functools.partial(strict, hint=1)) == "strict"
    fns = [trl_reward, lambda completions: [], Judge(), trl_reward, trl_reward]
    names = ("trl_reward", "lambda", "Judge", "trl_reward_2", "trl_reward_3")
    assert rewards.reward_names(fns) == names


@pytest.mark.parametrize("name", ["", "two\nlines", "two words", "\x1b[2J", "x" * 101, 7])
def test_a_function_whose_name_cannot_be_a_metrics_is_refused(name: Any) -> None:
    judge = Judge()
    judge.__name__ = name  # type: ignore[attr-defined]
    message = "reward 'Judge': expected a name of 1 to 100 letters, digits or any of _.:<>-, which"
    with pytest.raises(GraphError, match=message):
        rewards.wants(judge)


def positional(completions: list[str], /) -> list[float]:
    return []


def trl_only(completions: list[str], trainer_state: Any) -> list[float]:
    return []


def singular(prompt: str, completion: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    "fn, told",
    [
        (positional, "positional-only"),
        (trl_only, "trainer_state"),
        (singular, "it needs 'prompt', and is called with lists. Fix: 'prompts'"),
    ],
)
def test_functions_that_cannot_be_called_with_keywords_are_refused(fn: Any, told: str) -> None:
    with pytest.raises(GraphError, match=told):
        rewards.wants(fn)


def test_one_call_gets_exactly_what_the_signature_takes() -> None:
    spy = create_autospec(trl_reward, return_value=[0.0, 1.0])
    ids = pa.array([[1, 2], [3]], type=pa.large_list(pa.int32()))
    outcome = scored(spy, prompt=["p", "q"], completion_ids=ids, answer=["x", None])
    assert outcome.values == [0.0, 1.0]
    spy.assert_called_once_with(
        prompts=["p", "q"],
        completions=["a", "b"],
        completion_ids=[[1, 2], [3]],
        answer=["x", None],
    )


def test_columns_of_the_data_replace_nothing_that_the_engine_passes() -> None:
    passed: dict[str, Any] = {}

    def keeps(completions: list[str], log_metric: Any, **kwargs: Any) -> list[float]:
        passed.update(kwargs, completions=completions)
        log_metric("seen", 1.0)
        return [0.0] * len(completions)

    taken = ("completions", "prompts", "log_metric", "log_extra", "version")
    columns = {name: pa.array(["from the data"] * 2) for name in (*taken, "prompt_text")}
    chunk = answers(["a", "b"])
    rows = {"rows": chunk.inputs["rows"].with_columns(columns)}
    with scoring(keeps, inproc=True) as (kernel, session):
        list(kernel.run(replace(chunk, inputs=rows)))
    ids = passed.pop("completion_ids")
    assert [list(row) for row in ids] == [[0], [1]]
    assert passed == {
        "prompts": ["p0", "p1"],
        "completions": ["a", "b"],
        "prompt_text": ["from the data"] * 2,
    }
    assert session.logged() == [("reward/keeps/seen", 1.0)]


def test_conversational_prompts_make_message_list_completions() -> None:
    def reads(completions: list[list[dict[str, str]]]) -> list[float]:
        assert {message["role"] for (message,) in completions} == {"assistant"}
        return [float(message["content"]) for (message,) in completions]

    batch = pa.record_batch({"completion": ["2", "3"]})
    outcome = Scorer(reads).score(batch.replace_schema_metadata({CONVERSATIONAL: b"1"}))
    assert outcome.values == [2.0, 3.0]


@pytest.mark.parametrize("returned, kind, text", [
    ([1.0], "length", "returned 1 values for 2 completions"),
    ([float("inf"), 0.0], "value", "returned inf as value 0"),
    ([1e39, 0.0], "value", "returned 1e+39"),
    ({"score": 1.0}, "type", "returned dict"),
    (None, "type", "returned NoneType"),
    ((x for x in (0.0, 1.0)), "type", "returned generator"),
])  # fmt: skip
def test_not_one_finite_number_a_row_is_a_fault(returned: Any, kind: str, text: str) -> None:
    outcome = scored(lambda completions: returned)
    assert outcome.fault.kind == kind
    assert text in outcome.fault.text


@pytest.mark.parametrize(
    "returned", [(True, 0), np.array([1.0, 0.0], np.float32), [np.float32(1), np.int64(0)]]
)
def test_numbers_of_other_kinds_are_taken(returned: Any) -> None:
    assert scored(lambda completions: returned).values == [1.0, 0.0]


def test_async_functions_are_awaited_on_one_loop() -> None:
    async def judge(completions: list[str]) -> list[float | None]:
        return [None, 2.0]

    scorer = Scorer(judge)
    for _ in range(2):
        assert scorer.score(pa.record_batch({"completion": ["a", "b"]})).values == [None, 2.0]
    scorer.close()


def verl_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> Any:
    score = float(solution_str == ground_truth)
    return {"score": score, "acc": score, "pred": solution_str} if data_source == "math" else score


async def verl_score_async(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    return float(solution_str == ground_truth and extra_info["index"] == 1)


VERL = {
    "completion": ["4", "5"],
    "data_source": ["math", "other"],
    "reward_model": [{"style": "rule", "ground_truth": "4"}] * 2,
    "extra_info": [{"split": "train", "index": 1}, {"split": "train", "index": 2}],
}


@pytest.mark.parametrize("compute, metrics", [(verl_score, [("acc", 1.0)]), (verl_score_async, [])])
def test_verl_functions_run_by_the_adapter(compute: Callable[..., Any], metrics: list[Any]) -> None:
    fn = rewards.verl_reward(compute)
    outcome = scored(fn, **VERL)
    assert (outcome.fault, outcome.values, outcome.metrics) == (None, [1.0, 0.0], metrics)
    assert rewards.reward_name(fn) == compute.__name__
    assert rewards.reward_columns(fn) == ("data_source", "reward_model", "extra_info")


SPELL = "spell_backward?size=4&seed=1&min_word_len=6&max_word_len=6"


def test_exact_match_is_not_fooled_by_partial_credit_that_rounds_to_one() -> None:
    entry = json.dumps({"question": "q", "answer": "abcdef", "metadata": {}})
    overrun, right = "abcdefxyz", "abcdef"
    [score] = tasks.task_score([overrun], [entry], [SPELL])
    assert score != 1.0
    assert np.float32(score) == 1.0  # the trap
    assert tasks.exact_match([overrun, right], [entry, entry], [SPELL, SPELL]) == [0.0, 1.0]


def test_task_rewards_score_the_rows_of_their_table_and_read_messages() -> None:
    table = tasks.task_table(tasks.PREFIX + SPELL).to_pydict()
    assert tasks.exact_match(table["answer"], table["entry"], table["task"]) == [1.0] * 4
    chat = [[{"role": "assistant", "content": a}] for a in table["answer"]]
    assert tasks.task_score(chat, table["entry"], table["task"]) == [1.0] * 4
    assert rewards.reward_columns(tasks.exact_match) == ("entry", "task")


def test_declarations_and_scoring_import_no_torch() -> None:
    names = ("rewards", "tasks", "data_files", "kernels.scoring", "kernels.data")
    imports = ", ".join(f"operators.{name}" for name in names)
    code = f"import sys, {imports}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    return float(solution_str == ground_truth)


def batched(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> Any:
    """verl's."""


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> Any:
    """OpenRLHF's."""


@pytest.mark.parametrize("fn, told", [
    (functools.partial(compute_score, extra_info=None), r"Fix: verl_reward\(compute_score\)\.?$"),
    (batched, r"verl's BatchRewardManager .*Fix: def reward\(completions"),
    (reward_func, r"OpenRLHF's reward_func .*Fix: def reward\(prompts, completions, answer"),
    (Judge, r"found a class.*Fix: an object of it: Judge\(\.\.\.\)"),
])  # fmt: skip
def test_rewards_of_other_systems_are_refused_with_what_makes_them_ours(fn: Any, told: str) -> None:
    with pytest.raises(GraphError, match=told):
        rewards.wants(fn)


def test_the_file_that_is_told_makes_a_flag_of_verls_function(tmp_path: Path) -> None:
    text = inspect.getsource(compute_score)
    (tmp_path / "score_of_verl.py").write_text(f"from typing import Any\n\n\n{text}")
    flag = f"{tmp_path / 'score_of_verl.py'}:compute_score"
    with pytest.raises(GraphError) as refused:
        rewards.wants(load_function(flag, "--reward-fn"))
    lines = re.findall("`(.*?)`", str(refused.value))
    (tmp_path / "score_of_verl_ours.py").write_text("\n".join(lines))
    assert "score_of_verl_ours.py:scored" in str(refused.value)
    ours = load_function(f"{tmp_path / 'score_of_verl_ours.py'}:scored", "--reward-fn")
    assert rewards.reward_columns(ours) == ("data_source", "reward_model", "extra_info")
