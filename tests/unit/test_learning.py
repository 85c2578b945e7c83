"""Steps that leave the weights of a Model as they were: what was 0, by their metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.protocol.events import EventStream, FailingSilently, StepEnded
from engine.session.learning import TrainedModel, find_standstills, list_trained_models
from engine.session.silent_failures import STEPS, SilentFailures
from tests.kit.plans import grpo_plan, ppo_plan

MOVED = {"optim/updates": 1.0, "optim/skipped": 0.0, "optim/lr": 1e-6, "optim/grad_norm": 0.5}
NO_GRADIENT = MOVED | {"optim/grad_norm": 0.0}
NO_UPDATE = {"optim/updates": 0.0, "optim/skipped": 0.0, "optim/lr": 1e-6}
CRITIC = {"optim/critic/updates": 1.0, "optim/critic/lr": 1e-5, "optim/critic/grad_norm": 2.0}
FLAT = {"reward/no_signal": 1.0}


def policy(start: int = 0) -> TrainedModel:
    return TrainedModel(name="policy", prefix="optim/", start=start)


CRITIC_MODEL = TrainedModel(name="critic", prefix="optim/critic/", start=0)


def told(
    steps: list[dict[str, float]], start: int = 0, last: int | None = None
) -> list[tuple[int, str]]:
    """(Step, text) of each warning of a policy and a critic."""
    stream, warnings = EventStream(), list[FailingSilently]()
    stream.on(warnings.append, FailingSilently)
    models = (policy(start), CRITIC_MODEL)
    folder = Path("samples")
    stream.add(SilentFailures(stream, folder, compares_groups=True, trained=models, last=last))
    for step, metrics in enumerate(steps, start=1):
        stream.emit(StepEnded(step=step, metrics=metrics))
    assert {each.rule for each in warnings} <= {"nothing_learnt", "no_signal"}
    return [(each.step, each.text) for each in warnings if each.rule == "nothing_learnt"]


@pytest.mark.parametrize(("metrics", "start", "cause"), [
    (NO_GRADIENT, 0, "its gradient was exactly 0"),
    (MOVED | {"optim/lr": 0.0}, 0, "its learning rate was 0"),
    (MOVED | {"optim/lr": 1e-14}, 0, "its learning rate was 1e-14, which moves no weight"),
    (MOVED | {"optim/changed": 0.0}, 0, "its updates changed none of the weights that were"),
    (NO_UPDATE, 99, r"no update was made before Step 99 (train(start=99))"),
    (NO_UPDATE | {"optim/skipped": 1.0}, 0, "no update was made, as no row had a token to train"),
    (NO_UPDATE, 0, "no update was made, as there was no row"),
])  # fmt: skip
def test_ten_steps_that_move_no_weight_are_told_with_what_was_0(
    metrics: dict[str, float], start: int, cause: str
) -> None:
    ((step, text),) = told([metrics] * STEPS, start)
    assert step == STEPS
    assert text.startswith(f"'policy' learnt nothing in the last 10 Steps (up to step 10): {cause}")
    assert ". Fix: " in text
    assert told([metrics] * (STEPS - 1) + [MOVED, metrics], start) == []


def test_the_cause_is_that_of_the_last_step() -> None:
    ((_, text),) = told([NO_GRADIENT] * (STEPS - 1) + [MOVED | {"optim/lr": 0.0}])
    assert "its learning rate was 0" in text


def test_each_model_is_told_of_by_itself() -> None:
    still = CRITIC | {"optim/critic/grad_norm": 0.0}
    ((_, text),) = told([MOVED | still] * STEPS)
    assert text.startswith("'critic' learnt nothing")
    ((_, text),) = told([MOVED | CRITIC | {"optim/critic/changed": 0.0}] * STEPS)
    assert text.startswith("'critic' learnt nothing")


def test_a_model_that_begins_while_another_learns_stands_still_on_purpose() -> None:
    """Unless the run ends before it begins."""
    waiting = [NO_UPDATE | CRITIC] * STEPS
    assert told(waiting, start=50) == []
    assert told(waiting, start=50, last=100) == []
    ((_, text),) = told(waiting, start=50, last=49)
    assert "before Step 50" in text


def test_of_several_causes_the_first_one_is_named() -> None:
    still = {"optim/changed": 0.0}
    for metrics in (NO_GRADIENT, MOVED | {"optim/lr": 0.0}):
        ((_, text),) = told([metrics | still] * STEPS)
        assert "its updates" not in text
    assert told([NO_GRADIENT | FLAT | still] * STEPS) == []


@pytest.mark.parametrize("changed", [1.0, 0.001])
def test_a_few_weights_that_changed_are_no_standstill(changed: float) -> None:
    assert told([MOVED | {"optim/changed": changed}] * STEPS) == []


def test_a_gradient_of_equal_rewards_is_told_once_as_no_signal() -> None:
    assert told([NO_GRADIENT | FLAT] * STEPS) == []
    assert told([MOVED | {"optim/lr": 0.0} | FLAT] * STEPS) != []


def test_the_models_of_a_plan_have_the_names_of_their_metrics() -> None:
    assert list_trained_models(grpo_plan()) == (policy(),)
    labelled = replace(policy(), prefix="optim/policy/")
    assert list_trained_models(ppo_plan()) == (labelled, CRITIC_MODEL)


def test_metrics_that_do_not_tell_count_for_nothing() -> None:
    assert find_standstills((policy(),), {"loss/x": 0.0}, 3, None) == {}


def test_between_two_steps_that_train_it_a_model_stands_still_on_purpose() -> None:
    model = TrainedModel(name="ranker", prefix="optim/", start=0, every=4)
    assert find_standstills((model,), NO_UPDATE, step=3, last=100) == {}
    assert find_standstills((model,), MOVED, step=4, last=100) == {"ranker": None}
    assert find_standstills((model,), NO_UPDATE, step=4, last=100)["ranker"] is not None
    (standstill,) = find_standstills((model,), NO_UPDATE, step=3, last=3).values()
    assert standstill is not None
    assert standstill.cause == "no update was made before Step 4 (train(every=4))"
