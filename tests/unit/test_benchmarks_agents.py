"""The benchmark of agents: its pairing and goals, what its model is taught, what its notes say."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest

from benchmarks import (
    agents,
    agents_model,
    agents_our_side,
    agents_settings,
    agents_trl_side,
    settings,
)
from benchmarks.agents_environment import NumberSearch
from benchmarks.trl_side import StepClock

RUN = agents_settings.AgentRun(
    model_dir="model",
    data="data.parquet",
    turns=2,
    max_new_tokens=8,
    prompts_per_step=2,
    num_generations=2,
    steps=2,
    warmup_steps=1,
    lr=1e-3,
    threads=1,
    seed=7,
)
NAMES = [each.name for each in fields(agents.MeasuredEpisodes)]
MEASURED = agents.MeasuredEpisodes(**dict.fromkeys(NAMES, 5.0))


@dataclass(frozen=True)
class SideOfKnownSpeed(agents.AgentSide):
    """Notes when it was called, and with which seed."""

    speeds: tuple[float, ...] = ()
    calls: list[tuple[str, int]] = field(default_factory=list)

    def run(self, run: agents_settings.AgentRun) -> agents.MeasuredEpisodes:
        self.calls.append((self.name, run.seed))
        return replace(MEASURED, episodes_per_second=self.speeds[run.seed - RUN.seed])


def sides_of(ours: tuple[float, ...], trl: tuple[float, ...]) -> list[SideOfKnownSpeed]:
    """Two sides with one list of calls."""
    calls: list[tuple[str, int]] = []
    return [
        SideOfKnownSpeed(name="ours", command=(), speeds=ours, calls=calls),
        SideOfKnownSpeed(name="trl", command=(), speeds=trl, calls=calls),
    ]


def test_pairs_of_agents_alternate_and_share_a_seed() -> None:
    sides = sides_of((1.0, 1.0), (1.0, 1.0))
    agents.run_agent_pairs(sides, RUN, pairs=2)
    assert sides[0].calls == [("ours", 7), ("trl", 7), ("trl", 8), ("ours", 8)]


@pytest.mark.parametrize(("setting", "holds"), [("two_turns", True), ("six_turns", False)])
def test_a_settings_goal_is_for_the_median_of_ratios(setting: str, holds: bool) -> None:
    sides = sides_of((20.0, 120.0, 900.0), (10.0, 30.0, 10.0))
    results = agents.agent_results(setting, agents.run_agent_pairs(sides, RUN, pairs=3))
    by_name = {each.name: each for each in results}
    assert by_name[f"{setting}/ratio"].value == 4.0
    assert by_name[f"{setting}/ratio"].holds is holds
    assert by_name[f"{setting}/ratio_least"].value == 2.0
    assert by_name[f"{setting}/ours/episodes_per_second"].value == 120.0


def test_the_hidden_number_is_approached_by_hints() -> None:
    search = NumberSearch()
    search.reset(number=500, prompt=[])
    assert search.get_reward() == 0.0
    assert search.guess(410) == "It is higher."
    assert search.get_reward() == pytest.approx(0.9)
    assert search.guess(999) == "It is lower."
    assert search.guess(500) == "That is it."
    assert search.get_reward() == 1.0


def test_labels_are_the_turns_that_the_model_writes() -> None:
    tokenizer = agents_model.agent_tokenizer()
    episode = agents_model.conversation(random.Random(3))
    ids, labels = agents_model.make_examples(tokenizer, [episode])
    taught = str(tokenizer.decode(labels[0][labels[0] >= 0]))
    assert taught.count("<eos>") == taught.count("</tool_call>") == agents_model.TAUGHT_TURNS
    assert "It is" not in taught
    assert (ids[labels >= 0] == labels[labels >= 0]).all()
    turn = taught.partition("<eos>")[0] + "<eos>"
    prefix = "<|im_start|>assistant\n"
    message = tokenizer.parse_response(turn, prefix=prefix)  # type: ignore[call-arg]
    assert message["tool_calls"] == episode[1]["tool_calls"]  # type: ignore[index]


def test_a_saved_agent_tokenizer_describes_turns(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    agents_model.agent_tokenizer().save_pretrained(tmp_path)
    settings.small_config(agents_model.TOKENS).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.response_template == agents_model.RESPONSE
    assert len(loaded("<tool_call>{}</tool_call>")["input_ids"]) == 4


def test_both_sides_say_all_that_is_compared() -> None:
    step = {
        "time/step": 2.0,
        "time/train_policy": 0.5,
        "episode/turns": 2.0,
        "episode/tokens": 30.0,
        "generate/tokens": 20.0,
        "reward/mean": 0.5,
    }
    ours = agents_our_side.numbers([step, step], RUN) | {"prompt_tokens": 9.0}
    clock = StepClock(ends=[0.0, 50.0, 52.0, 54.0], rollout=[9.0, 1.5, 1.5], rewards=[0, 0.5, 0.5])
    notes = agents_trl_side.EpisodeNotes(
        decoding=[9.0, 1.0, 1.0],
        turns=[9.0, 2.0, 2.0],
        written=[9.0, 20.0, 20.0],
        answered=[9.0, 10.0, 10.0],
        prompts=[9.0, 9.0, 9.0],
    )
    run = {"warmup_steps": 1, "prompts_per_step": 2, "num_generations": 2}
    trl = agents_trl_side.measured(run, clock, notes)
    measured = [agents.measured_episodes(numbers) for numbers in (ours, trl)]
    assert measured[0] == measured[1]
    assert measured[0].episodes_per_second == 2.0
    assert measured[0].answered_tokens == 10.0
