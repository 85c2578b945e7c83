"""The benchmark of what keeps devices busy: its ratios, its lines, and how they join a file.

Owns: the arithmetic of the comparisons. Does not own: runs, profiles, predictions.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.flow import COMPARISONS, FlowComparison, keep_others, results
from benchmarks.flow_runs import WARM, FlowSide, FlowTurns, usual_seconds
from benchmarks.report import SideResult, machine, write_json


def of_name(name: str) -> FlowComparison:
    """The comparison of this name."""
    (comparison,) = [each for each in COMPARISONS if each.name == name]
    return comparison


def three_turns(folder: Path) -> FlowTurns:
    """Steps of 200 ms that take 160, 100 and 125, where simulate says 150 for 240."""
    return FlowTurns(
        replaced=[0.2, 0.2, 0.2],
        tried=[0.16, 0.1, 0.125],
        replaced_expected=0.24,
        tried_expected=0.15,
        tried_folders=[folder],
    )


def values_of(lines: list[SideResult]) -> dict[str, float]:
    return {line.name: line.value for line in lines}


def test_a_gain_is_the_median_of_the_turns_and_stands_beside_what_is_predicted(tmp_path: Path):
    values = values_of(results(of_name("slots"), three_turns(tmp_path)))
    assert values["slots: measured"] == pytest.approx(1.6)
    assert values["slots: predicted"] == pytest.approx(1.6)
    assert values["slots: measured / predicted"] == pytest.approx(1.0)
    assert values["slots: gain of what is predicted"] == pytest.approx(1.0)
    assert values["slots: measured, least"] == pytest.approx(1.25)


def test_what_a_reward_leaves_is_what_a_step_takes_longer(tmp_path: Path):
    row = '{"step": 9, "time/step": 0.5, "time/score": 0.05}\n'
    (tmp_path / "metrics.jsonl").write_text(row)
    turns = FlowTurns(
        replaced=[0.49],
        tried=[0.5],
        replaced_expected=0.4,
        tried_expected=0.4,
        tried_folders=[tmp_path],
    )
    lines = results(of_name("reward_lag"), turns)
    values = values_of(lines)
    assert values["reward_lag: left"] == pytest.approx(0.02)
    assert values["reward_lag: the reward's own time"] == pytest.approx(0.1)
    assert values["reward_lag: left, predicted"] == 0.0


def test_long_and_short_steps_that_take_turns_count_by_their_mean():
    assert usual_seconds([1.0, 3.0, 1.0, 3.0]) == 2.0


@pytest.mark.parametrize(("value", "least"), [(0.5, True), (1.5, True), (0.5, False), (1.5, False)])
def test_lines_of_other_comparisons_stay_as_they_are(tmp_path: Path, value: float, least: bool):
    path = tmp_path / "flow.json"
    other = SideResult(name="spread: measured", value=value, unit="ratio", goal=1.0, least=least)
    again = SideResult(name="slots: measured", value=1.0, unit="ratio")
    write_json(path, [other, again], machine())
    assert keep_others(path, ["slots"]) == [other]
    assert keep_others(tmp_path / "none.json", ["slots"]) == []


def test_a_run_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One that was cut off is."""
    side = FlowSide.__new__(FlowSide)
    object.__setattr__(side, "name", "slots")
    lines = [f'{{"step": {step}, "time/step": 0.5}}\n' for step in range(1, WARM + 5)]
    folder = tmp_path / "slots-0"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(lines))
    assert side.run_turn(tmp_path, 0, 4) == folder
    with pytest.raises(AttributeError):  # it has no graph to run
        side.run_turn(tmp_path, 0, 5)
