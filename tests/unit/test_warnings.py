"""Right graphs that look wrong: each is warned of by name, once, and refused with --strict.

`GOLDEN=write pytest tests/unit/test_warnings.py` writes the golden messages anew; read the
difference first.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dataflow.check import check
from dataflow.errors import GraphError, GraphWarning, RunError
from dataflow.graph import Graph
from engine import api
from engine.cli import main
from engine.coordinator.core import Coordinator, Settings
from engine.coordinator.messages import SourceOpened, Warn
from engine.observe.warned import Warned
from engine.options import RunOptions
from engine.plan.explain import explain
from engine.plan.planner import make_plan
from engine.simulate.behaviour import Outcomes, Timing
from engine.simulate.workers import Simulation
from tests.kit.plans import CLUSTER, save_tiny_header
from tests.right_graphs import RIGHT
from tests.unit.test_check import graphs_of, headers
from tests.unit.test_coordinator import PLAN
from tests.wrong_graphs import doubtful

GOLDEN = Path(__file__).parent.parent / "golden" / "warnings"
DOUBTFUL = graphs_of(doubtful)


@pytest.mark.parametrize("make", DOUBTFUL, ids=lambda f: f.__name__)
def test_a_doubtful_graph_is_warned_of_with_this_message(make: Callable[[], Graph]) -> None:
    found = check(make(), headers).warnings
    golden, message = GOLDEN / f"{make.__name__}.txt", "".join(f"{warning}\n" for warning in found)
    if os.environ.get("GOLDEN") == "write":
        golden.write_text(message, encoding="ascii")
    assert len(found) == 1
    assert message == golden.read_text(encoding="ascii")


def test_every_golden_warning_has_its_graph() -> None:
    assert {file.stem for file in GOLDEN.glob("*.txt")} == {make.__name__ for make in DOUBTFUL}


@pytest.mark.parametrize("make", RIGHT, ids=lambda f: f.__name__)
def test_a_right_graph_is_not_warned_of(make: Callable[[], Graph]) -> None:
    assert check(make(), headers).warnings == ()


def test_a_port_that_is_not_read_counts_for_no_warning() -> None:
    """A reference whose beta is 0 is the trained policy; a policy gradient of weight 0 has no
    update.
    """
    rollout = doubtful.sampled()
    reference = doubtful.logprobs(doubtful.policy, rollout, name="reference")
    loss = doubtful.clipped_policy_loss(doubtful.compared(rollout), reference=reference, beta=0.0)
    known = check(doubtful.graph(doubtful.updated(rollout, loss)), headers)
    assert known.warnings == ()
    assert len(known.notes) == 1


def test_no_example_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parent.parent.parent / "examples"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    before, seen = set(sys.modules), 0
    for file in sorted(folder.glob("*.py")):
        if "\ndef graph(" in file.read_text(encoding="utf-8"):
            graph = importlib.import_module(file.stem).graph()
            assert api.plan(graph, RunOptions()).warnings == (), file.name
            seen += 1
    for name in {n for n in set(sys.modules) - before if (folder / f"{n}.py").is_file()}:
        del sys.modules[name]
    assert seen >= 8


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Graph:
    """One that is warned of once, on a model and data that are there."""
    save_tiny_header(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "2+2", "answer": "4"}\n' * 64)
    monkeypatch.setattr(doubtful, "DATA", str(data))
    monkeypatch.setattr(doubtful, "policy", replace(doubtful.policy, base=str(tmp_path / "tiny")))
    monkeypatch.setattr("tests.wrong_graphs.parts.policy", doubtful.policy)
    return doubtful.greedy_sampling_of_several_answers()


def test_strict_refuses_what_is_warned_of(graph: Graph) -> None:
    planned = api.plan(graph, RunOptions())
    assert [w.rule for w in planned.warnings] == ["greedy_group"]
    with pytest.raises(GraphError, match=r"rollout'.*the same answer.*Fix: .*\[greedy_group\]"):
        api.plan(graph, RunOptions(strict=True))


def test_explain_has_the_warnings_and_the_plan_file_too(graph: Graph) -> None:
    planned = api.plan(graph, RunOptions())
    text = " ".join(explain(planned).split())
    assert "warnings (errors with --strict) doubtful.py:" in text
    assert text.count("[greedy_group]") == 1
    assert '"rule": "greedy_group"' in planned.to_json()


@pytest.mark.parametrize("command", ["check", "explain"])
def test_the_command_line_shows_and_refuses(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_tiny_header(tmp_path)
    (tmp_path / "two.jsonl").write_text('{"prompt": "2+2", "answer": "4"}\n' * 2)
    flags = [
        "graphs.grpo:grpo",
        "--base",
        str(tmp_path / "tiny"),
        "--data",
        str(tmp_path / "two.jsonl"),
    ]
    flags += ["--reward-fn", "tests.right_graphs:exact"]
    assert main([command, *flags]) == 0
    shown = capsys.readouterr().out
    assert shown.count("[large_batch]") == 1
    assert "batch=64 is larger than its 2 rows" in " ".join(shown.split())
    assert main([command, *flags, "--strict"]) == 1
    assert "[large_batch]" in capsys.readouterr().err
    assert main([command, *flags, "--batch", "2", "--strict"]) == 0


def test_a_plan_that_predicts_an_hour_a_step_is_warned_of(graph: Graph) -> None:
    checked = check(graph)
    assert not [
        w for w in make_plan(checked, seed=0, cluster=CLUSTER).warnings if w.rule == "slow_step"
    ]
    longer = graph.map(
        lambda n: n.changed(params=n.params | {"batch": 2_000_000}) if n.name == "prompts" else n
    )
    large = replace(CLUSTER, memory=2**50)
    (found,) = [
        w for w in make_plan(check(longer), seed=0, cluster=large).warnings if w.rule == "slow_step"
    ]
    assert "hours at the greatest lengths" in found.problem
    assert found.origin is not None


# While it runs


def test_a_selection_that_keeps_nothing_is_warned_of_in_each_empty_step() -> None:
    keep = replace(PLAN.node("keep"), refill=False)
    plan = replace(PLAN, nodes=tuple(keep if n.name == "keep" else n for n in PLAN.nodes))
    outcomes = Outcomes(keep={"keep": 0.0})
    run = Simulation(
        plan, Settings(steps=2), rows={"prompts": 50}, timing=Timing(), outcomes=outcomes
    )
    run.begin()
    assert run.run() is not None
    found = [i.warning for _, i in run.history.instructions if isinstance(i, Warn)]
    assert [w.rule for w in found] == ["empty_step", "empty_step"]
    assert str(found[0]).startswith(
        "keep: step 1 has no row to train, and its weights stay as they are: 'keep' kept none of"
        " its 2 prompts"
    )


def test_a_source_that_opens_with_fewer_rows_than_a_batch_is_warned_of(graph: Graph) -> None:
    plan = make_plan(check(graph), seed=0, cluster=CLUSTER)
    for rows, names in ((63, ["large_batch"]), (64, [])):
        it = Coordinator(plan, Settings(steps=1))
        it.start()
        said = it.handle(SourceOpened(node="prompts", rows=rows), 0.0)
        assert [i.warning.rule for i in said if isinstance(i, Warn)] == names


def warning(rule: str, where: str = "rollout") -> GraphWarning:
    return GraphWarning(rule=rule, where=where, problem="it looks wrong", fix="another one")


def test_each_is_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    warned = Warned()
    with caplog.at_level(logging.WARNING):
        for each in (warning("a"), warning("a"), warning("b"), warning("a", "other")):
            warned.show(each)
    assert [r.getMessage() for r in caplog.records] == [
        "warning: rollout: it looks wrong. Fix: another one. [a]",
        "warning: rollout: it looks wrong. Fix: another one. [b]",
        "warning: other: it looks wrong. Fix: another one. [a]",
    ]


def test_in_a_strict_run_it_is_an_error() -> None:
    with pytest.raises(RunError, match=r"rollout: it looks wrong\. Fix: another one\. \[a\]"):
        Warned(strict=True).show(warning("a"))
