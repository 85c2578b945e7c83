"""Numbers that a parameter takes: those that it is used with, in the precision of kernels."""

from __future__ import annotations

import pytest

from dataflow.check import check
from dataflow.errors import GraphError
from dataflow.limits import number
from dataflow.schedule import linear, warmup
from dataflow.set_expressions import edited
from graphs.grpo import grpo
from operators.importance import importance
from operators.optimizers import AdamW
from tests.kit.rewards import exact

LOST = (1e-320, 1e-46, 1e39, -1e300)
HELD = (0.0, 1e-37, -1e-37, 3e38, 1, 0.1)


@pytest.mark.parametrize("value", LOST)
def test_a_number_that_float32_does_not_hold_is_refused(value: float) -> None:
    limit = number(like=1.0)
    assert not limit.accepts(value)
    assert limit.describe(value) == "a number, also in float32"
    assert not limit.accepts(linear(value, 0.0, 3))
    assert limit.describe(warmup(2, value)) == "a number, also in float32"


@pytest.mark.parametrize("value", HELD)
def test_a_number_that_float32_holds_is_taken(value: float) -> None:
    limit = number(like=1.0)
    assert limit.accepts(value)
    assert limit.describe(value) == "a number"


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("rollout.temperature=1e-320", "expected a number >= 0, also in float32, found 1e-320"),
        (
            "train_policy.lr=1e-60",
            "expected a number > 0, or a schedule, also in float32, found 1e-60",
        ),
        ("train_policy.lr=linear(1e39, 5)", "also in float32"),
        ("train_policy.clip_norm=1e39", "expected a number > 0, also in float32, found 1e+39"),
        ("train_policy.clipped_policy_loss.clip=1e-60", "also in float32"),
    ],
)
def test_a_setting_and_the_check_refuse_it_by_name(setting: str, told: str) -> None:
    graph = grpo("hub/name", "rows.jsonl", exact, n=2, batch=2)
    with pytest.raises(GraphError) as refused:
        check(edited(graph, [setting]))
    path, _, _ = setting.partition("=")
    assert path.rpartition(".")[2] in str(refused.value)
    assert told in str(refused.value)


def test_the_check_names_the_parameter() -> None:
    graph = grpo("hub/name", "rows.jsonl", exact, n=2, batch=2, lr=1e-320)
    message = "expected lr to be a number > 0, also in float32, found 1e-320"
    with pytest.raises(GraphError, match=message):
        check(graph)


def test_values_of_constructors_are_held_to_it() -> None:
    with pytest.raises(GraphError, match="expected eps to be a number > 0, also in float32"):
        AdamW(eps=1e-60)
    with pytest.raises(
        GraphError, match="expected above to be a number >= 1 or None, also in float32"
    ):
        importance(above=1e39)
