"""A profile of a machine that others use: what is measured again, kept, and refused. No kernel runs
here; the loads are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import RunError
from engine.cli import main
from engine.cli.profile import describe_profile
from engine.plan.cost.devices import device
from engine.plan.cost.process_memory import ImportedMemory
from engine.plan.cost.profile import ProfileCell
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.predict.profile import profiler as profiling
from engine.predict.profile.child import ChildResult
from engine.predict.profile.predictions import make_longest
from engine.predict.profile.profiler import MadeProfile, ProfileRequest, measure_profile
from engine.predict.profile.short_run import ShortRun
from engine.predict.profile.side_by_side import Crowding
from tests.kit.graphs import grpo_graph
from tests.kit.plans import placed

pytestmark = pytest.mark.usefixtures("tiny")


@dataclass
class MadeUpLoad:
    """Shares of wanted cores that others have, by what is measured: one a try. used: cores that
    they use in each short run. tries: how often each was measured.
    """

    rates: tuple[float, ...] = (0.0,)
    cells: float = 0.0
    beside: float = 0.0
    used: tuple[float, ...] = (0.0,)
    tries: dict[str, int] = field(default_factory=dict)

    def child(self, task: Callable[..., Iterator[Any]], *, title: str, **_: Any) -> ChildResult:
        number = self.tries[title] = self.tries.get(title, 0) + 1
        if title == "rates":
            known = replace(device("cpu"), source=f"try {number}")
            return ChildResult(outputs=((self.rates[number - 1], known),))
        if title == "imports":
            return ChildResult(outputs=(ImportedMemory(anonymous=number << 20, files=0),))
        if title == "a short run":
            return ChildResult(outputs=(ShortRun(message=float(number)),))
        work = task.args[1]  # type: ignore[attr-defined]
        return ChildResult(outputs=tuple(map(self._measured, work.cells)))

    def _measured(self, cell: ProfileCell) -> Any:
        waited = self.cells > 0.05
        seconds = {"seconds": 1.0, "cpu": 1.0, "by_cpu": waited, "others": self.cells}
        return make_longest(replace(cell, **seconds))


def profile_under(
    load: MadeUpLoad, monkeypatch: pytest.MonkeyPatch, *, accept: bool = False
) -> MadeProfile:
    """A profile of a small graph on two cores, with one thread for each kernel."""
    load.tries.clear()
    used = iter(load.used)
    monkeypatch.setattr(profiling.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(profiling.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(profiling, "run_in_child", load.child)
    monkeypatch.setattr(profiling.Others, "cores", lambda _: next(used, load.used[-1]))
    crowding = Crowding(slower=1.1, others=load.beside, by_cpu=True)
    monkeypatch.setattr(
        profiling, "measure_crowding", lambda works, *_, **how: [crowding] * len(works)
    )
    graph = grpo_graph()
    plan: Plan = placed(graph, cores=2, threads=1, workers="one")
    request = ProfileRequest(quick=True, accept_busy=accept)
    return measure_profile(graph, [plan], RunOptions(), request, lambda text: None)


def test_rates_and_the_short_run_are_tried_again_and_the_quietest_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = MadeUpLoad(rates=(0.2, 0.1, 0.15), used=(1.2, 0.7, 0.9))
    made = profile_under(load, monkeypatch)
    assert (load.tries["rates"], load.tries["a short run"]) == (3, 3)
    assert made.profile.device.source == "try 2"
    assert made.profile.message == 2.0
    assert not made.compared, "others used more than half a core in each"
    assert made.profile.load.share == 0.1
    assert not made.profile.load.quiet


def test_what_is_quiet_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    load = MadeUpLoad()
    made = profile_under(load, monkeypatch)
    assert (load.tries["rates"], load.tries["a short run"]) == (1, 1)
    assert made.compared
    assert made.profile.load.quiet
    assert made.profile.load.all_cores == 2


WORTHLESS: Mapping[str, MadeUpLoad] = {
    "rates of the machine": MadeUpLoad(rates=(0.3,) * 3),
    "rollout": MadeUpLoad(cells=0.9),
    "rollout beside busy cores": MadeUpLoad(beside=0.9),
    "a short run": MadeUpLoad(used=(1.4,) * 3),
}


@pytest.mark.parametrize("what", WORTHLESS)
def test_too_much_load_is_an_error_unless_it_is_accepted(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = WORTHLESS[what]
    with pytest.raises(RunError, match=rf"^profile: {what}: expected others to have at most "):
        profile_under(load, monkeypatch)
    made = profile_under(load, monkeypatch, accept=True)
    assert made.profile.load.share >= 0.3


def test_the_command_says_how_busy_the_machine_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made = profile_under(MadeUpLoad(cells=0.5, used=(1.5,)), monkeypatch, accept=True)
    told = list(describe_profile(made, Path("here.json")))
    expected = "others used 1.5 of 2 cores, and had up to 50 % of those that a measurement wanted"
    assert f"meanwhile {expected}" in told
    assert any("others disturbed the short run" in line for line in told)
    sizes = [line for line in told if " rows of " in line]
    assert all("others had 50 % of its cores, so CPU seconds count" in line for line in sizes)


def test_the_command_of_a_busy_machine_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = MadeUpLoad(cells=0.9)
    monkeypatch.setattr(profiling, "run_in_child", load.child)
    out = tmp_path / "here.json"
    words = ("--base", "tiny", "--data", "data.jsonl", "--threads", "1", "--quick")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert main(["profile", "graphs.sft:sft", *words, "--out", str(out)]) == 3
    said = capsys.readouterr().err
    assert "found 90 %" in said
    assert "--busy accept" in said
    assert not out.exists()
