"""Environments of SkyRL-Gym."""

from __future__ import annotations

from typing import Any

from operators.environment_kinds import skyrl_environment
from tests.environments.episodes import texts
from tests.environments.users import Greeter, Rewriter

PACKAGE = "skyrl_gym"
QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]
ROW = {
    "prompt": QUESTION,
    "reward_spec": {"method": "rule", "ground_truth": "4"},
    "extra_info": {"max_turns": 3},
}


def test_a_question_takes_several_turns(begin: Any) -> None:
    episode = begin(skyrl_environment("gsm8k_multi_turn"), ROW)
    assert (episode.first.messages, episode.first.text) == ((), None)
    first = episode.say("It is 5.")
    assert (first.reward, first.done) == (0.0, False)
    assert "#### ANSWER" in texts(first)[0]
    second = episode.say("It is #### 5")
    assert abs(second.reward - 0.2 / 3) < 1e-6
    assert "only the final numeric answer" in texts(second)[0]
    third = episode.say("#### 4")
    assert (third.reward, third.done, texts(third)) == (1.0, True, [])
    final = episode.end()
    assert (final.reward, final.state["steps"]) == (None, 3)


def test_a_prompt_may_be_text(begin: Any) -> None:
    episode = begin(skyrl_environment("gsm8k"), ROW | {"prompt": "What is 2 + 2?"})
    assert episode.first.fault is None
    reply = episode.say("#### 4")
    assert (reply.reward, reply.done) == (1.0, True)


def test_a_class_adds_to_the_prompt(begin: Any) -> None:
    environment = skyrl_environment(Greeter, arguments={"word": "hello"})
    episode = begin(environment, {"prompt": QUESTION, "name": "Bo"})
    assert texts(episode.first) == ["hello"]
    assert episode.say("Bo").reward == 1.0
    assert episode.end().state == {"metadata": {"length": 2}, "postprocessed": 1}


def test_a_prompt_that_is_changed_is_a_fault(begin: Any) -> None:
    environment = skyrl_environment(Rewriter, arguments={"word": "hello"})
    fault = begin(environment, {"prompt": QUESTION, "name": "Bo"}).first.fault
    assert fault is not None
    assert "changed the messages of the prompt" in fault.text
