"""The benchmarks' own arithmetic: pairing, goals, the clock's numbers, the settings' files."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest

from benchmarks import against_trl, data_plane, engine_parts, report, rewards, settings, trl_side
from benchmarks.sides import Measured, measured

MEASURED = Measured(**dict.fromkeys((f.name for f in fields(Measured)), 5.0) | {"slot_waste": 0.5})
RUN = settings.Run(
    model_dir="model", data="data.parquet", prompts_per_step=2, num_generations=2, max_new_tokens=8,
    steps=2, warmup_steps=1, lr=1e-3, threads=1, seed=7, reward="exact_match",
)  # fmt: skip


@dataclass
class FixedSide:
    """A side of known speed that notes when it was called, and with which seed."""

    name: str
    speeds: list[float]
    calls: list[tuple[str, int]] = field(default_factory=list)

    def run(self, run: settings.Run) -> Measured:
        self.calls.append((self.name, run.seed))
        return replace(MEASURED, samples_per_second=self.speeds[run.seed - RUN.seed])


def test_pairs_alternate_and_share_a_seed() -> None:
    calls: list[tuple[str, int]] = []
    sides = (FixedSide("ours", [1.0, 1.0], calls), FixedSide("trl", [1.0, 1.0], calls))
    against_trl.run_paired(sides, RUN, pairs=2)
    assert calls == [("ours", 7), ("trl", 7), ("trl", 8), ("ours", 8)]


def compared(workload: str, ours: list[float], trl: list[float]) -> dict[str, report.SideResult]:
    """The results of two sides of these speeds, by name."""
    sides = (FixedSide("ours", ours), FixedSide("trl", trl))
    pairs = against_trl.run_paired(sides, RUN, pairs=len(ours))
    return {result.name: result for result in against_trl.results(workload, sides, pairs)}


def test_the_ratio_is_the_median_over_pairs_not_of_medians() -> None:
    found = compared("short", [20.0, 90.0, 200.0], [10.0, 30.0, 200.0])
    assert found["short/ours_to_trl/ratio"].value == 2.0
    assert found["short/ours_to_trl/ratio"].holds is True
    assert found["short/ours_to_trl/ratio_least"].value == 1.0
    assert found["short/trl/samples_per_second"].value == 30.0


def test_long_tail_is_held_to_its_slot_waste() -> None:
    found = compared("long_tail", [30.0], [10.0])
    assert found["long_tail/ours_to_trl/ratio"].holds is True
    assert found["long_tail/ours_to_trl/waste"].holds is False


@pytest.mark.parametrize(
    ("value", "least", "holds"), [(2.0, True, True), (1.0, True, False), (1.0, False, True)]
)
def test_a_goal_holds_on_its_side(value: float, least: bool, holds: bool) -> None:
    assert report.SideResult(name="a", value=value, unit="x", goal=1.5, least=least).holds is holds


def test_json_is_a_list_of_the_five_fields(tmp_path: Path) -> None:
    path, where = tmp_path / "deep/found.json", report.machine()
    report.write_json(path, [report.SideResult(name="a", value=1.0, unit="ms")], where)
    expected = [{"name": "a", "value": 1.0, "unit": "ms", "goal": None, "holds": None}]
    assert json.loads(path.read_text()) == expected
    assert json.loads(path.with_suffix(".machine.json").read_text())["cores"] >= 1
    table = path.with_suffix(".md").read_text()
    assert str(where) in table
    assert table.endswith("| a | 1 | ms |  |  |\n")


def test_the_clock_leaves_the_warm_up_out() -> None:
    clock = trl_side.StepClock(
        ends=[0.0, 100.0, 101.0, 103.0],
        generation=[50.0, 0.2, 0.4],
        rollout=[60.0, 0.5, 0.5],
        lengths=[[9, 9, 9, 9], [1, 2, 3, 4], [2, 2, 2, 4]],
        prompts=[[5] * 4] * 3,
        rewards=[9.0, 0.25, 0.75],
    )
    run = {"warmup_steps": 1, "prompts_per_step": 2, "num_generations": 2}
    found = measured(trl_side.measured(run, clock))
    assert found.samples_per_second == pytest.approx(8 / 3)
    assert found.slot_waste == pytest.approx(1 - 20 / 32)
    assert found.train_ms == pytest.approx(1000.0)
    assert found.generation_ms == pytest.approx(300.0)
    assert (found.reward, found.reward_last, found.steps) == (0.5, 0.75, 2)


def test_rewards_are_of_the_rows_they_are_given() -> None:
    assert rewards.exact_match(["ab", "ba"], answer=["ab", "ab"], prompts=[]) == [1.0, 0.0]
    agreed = rewards.agreement(["ab", "abc", ""], answer=["aa", "a", "a"])
    assert agreed == [0.5, pytest.approx(1 / 3), 0.0]
    assert rewards.even_share(["24", "13", ""]) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("tokens", [settings.DIGIT_TOKENS, settings.TEXT_TOKENS])
def test_a_saved_tokenizer_still_has_one_token_a_character(
    tokens: tuple[str, ...], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    settings.character_tokenizer(tokens).save_pretrained(tmp_path)
    settings.small_config(tokens).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(token for token in tokens if len(token) == 1)
    ids = loaded(text)["input_ids"]
    assert ids == list(range(len(text)))
    assert loaded.decode(ids) == text
    assert (loaded.eos_token_id, loaded.pad_token_id) == settings.ending_and_padding(tokens)


def test_digit_pairs_are_reversed() -> None:
    rows = list(itertools.islice(settings.digit_pairs(random.Random(3)), 50))
    assert all(prompt == answer[::-1] + "=" for prompt, answer in rows)
    assert {len(answer) for _, answer in rows} == {3, 4, 5, 6}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_the_data_planes_batch_has_the_size_and_form_that_are_quoted() -> None:
    small, large = data_plane.make_batch(4 << 10), data_plane.make_batch(16 << 20)
    assert small.nbytes == pytest.approx(4 << 10, rel=0.1)
    assert large.nbytes == pytest.approx(16 << 20, rel=0.1)
    tokens = len(large.column("completion_ids").values)
    assert large.nbytes / tokens == pytest.approx(17, rel=0.02)
    assert data_plane.views(large) == 2 * large.num_rows + 5 * tokens


@pytest.mark.parametrize(("seconds", "share", "holds"), [(1e-3, 0.1, False), (1e-4, 0.9, True)])
def test_the_data_planes_goals_are_least_shares_and_most_milliseconds(
    seconds: float, share: float, holds: bool
) -> None:
    sizes = dict.fromkeys(data_plane.SIZES, data_plane.Timed(seconds=seconds, of_memcpy=share))
    found = data_plane.results({"shm, one copy": sizes, "shm, built in the slab": sizes})
    assert [r.holds for r in found if r.holds is not None] == [holds] * 4


@pytest.mark.parametrize(
    ("value", "holds"), [(0.5, [True, False]), (0.95, [True, True]), (1.5, [False, True])]
)
def test_the_data_planes_goals_beside_bare_zmq_are_a_most_and_a_least_share(
    monkeypatch: pytest.MonkeyPatch, value: float, holds: list[bool]
) -> None:
    monkeypatch.setattr(data_plane, "alternated", lambda *_: value)
    found = data_plane.side_by_side((), data_plane.ROUNDS)
    assert [(r.value, r.holds) for r in found] == [(value, each) for each in holds]
    assert not data_plane.side_by_side(("reshard",), data_plane.ROUNDS)


def test_a_part_has_its_seconds_without_those_of_parts_inside() -> None:
    """It begins at 0; messages last from 1 to 6, and kernels in them from 3 to 4."""
    ticks = iter([0.0, 1.0, 3.0, 4.0, 6.0, 6.5])
    watch = engine_parts.Stopwatch(clock=lambda: next(ticks))
    watch.around("messages", watch.around("kernels", lambda: None))()
    seconds = {"loop": 1.5, "messages": 4.0, "kernels": 1.0}
    assert watch.lap() == dict.fromkeys(engine_parts.PARTS, 0.0) | seconds
