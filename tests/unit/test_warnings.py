"""Valid graphs that look wrong: one named warning each, and refused with --strict.

`GOLDEN=write pytest tests/unit/test_warnings.py` writes the golden messages anew; read the
difference first.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dataflow.check import check
from dataflow.errors import GraphWarning, RunError
from dataflow.graph import Graph
from dataflow.set_expressions import edited
from engine import api
from engine.cli import main
from engine.coordinator.coordinator import Coordinator, Settings
from engine.plan.cluster import Cluster
from engine.plan.explain import explain
from engine.plan.options import RunOptions
from engine.plan.planner import make_plan
from engine.protocol.messages import SourceOpened, Warn
from engine.run.simulated_workers.behaviour import Outcomes
from engine.session.run_log import RunLog
from graphs.grpo import grpo
from tests.kit.comparison import golden_names, require_golden
from tests.kit.files import save_jsonl
from tests.kit.plans import CLUSTER, save_tiny_header
from tests.kit.rewards import brief, exact
from tests.kit.simulations import simulation
from tests.right_graphs import RIGHT, offline_dpo
from tests.unit.test_check import graphs_of, headers
from tests.unit.test_coordinator import PLAN
from tests.wrong_graphs import data_names, doubtful, doubtful_tables, implausible, off_policy

MODULES = (doubtful, doubtful_tables, data_names, off_policy, implausible)
DOUBTFUL = [make for module in MODULES for make in graphs_of(module)]
SUM = {"prompt": "2+2", "answer": "4"}


@pytest.mark.parametrize("make", DOUBTFUL, ids=lambda f: f.__name__)
def test_a_doubtful_graph_is_warned_of_with_this_message(make: Callable[[], Graph]) -> None:
    (warning,) = check(make(), headers).warnings
    require_golden(f"warnings/{make.__name__}.txt", f"{warning}\n")


def test_every_golden_warning_has_its_graph() -> None:
    assert golden_names("warnings") == {make.__name__ for make in DOUBTFUL}


@pytest.mark.parametrize("make", RIGHT, ids=lambda f: f.__name__)
def test_a_right_graph_is_not_warned_of(make: Callable[[], Graph]) -> None:
    assert check(make(), headers).warnings == ()


@pytest.mark.parametrize(
    ("column", "rules"), [("promt", ["misspelt_column"]), ("prompt_id", []), ("prompt", [])]
)
def test_pairs_with_a_column_that_is_almost_a_prompt_are_warned_of(
    column: str, rules: list[str]
) -> None:
    """They are taken for pairs that begin with their prompt."""
    columns = dict.fromkeys((column, "chosen", "rejected"), pa.utf8())
    warnings = check(offline_dpo(), lambda data, split: columns).warnings
    assert [warning.rule for warning in warnings] == rules


@pytest.mark.parametrize(("settings", "rules"), [
    (["score.weights=1,0.2"], ["other_weights"]),
    (["score.weights=1,0.2", "eval_score.weights=1,0.2"], []),
    (["score.weights=2,2"], []),
    (["score.weights=-1,-1"], ["other_weights"]),
    (["score.weights=1,0"], ["other_weights"]),
])  # fmt: skip
def test_a_setting_that_leaves_the_evaluation_with_other_weights_is_warned_of(
    settings: list[str], rules: list[str]
) -> None:
    """Not with a multiple of them, which ranks alike."""
    fns: Any = [exact, brief]
    graph = grpo("models/tiny", "data/train.parquet", fns, eval_data="data/test.parquet")
    warnings = check(edited(graph, settings), headers).warnings
    assert [warning.rule for warning in warnings] == rules


def test_a_port_that_is_not_read_counts_for_no_warning() -> None:
    """A reference whose beta is 0 is the policy; a policy gradient of weight 0 has no update."""
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
    for name in set(sys.modules) - before:
        if (folder / f"{name}.py").is_file():
            del sys.modules[name]
    assert seen >= 8


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Graph:
    """One that is warned of once, on a model and data that are there."""
    save_tiny_header(tmp_path)
    monkeypatch.setattr(doubtful, "DATA", save_jsonl(tmp_path / "data.jsonl", *[SUM] * 64))
    monkeypatch.setattr(doubtful, "policy", replace(doubtful.policy, base=str(tmp_path / "tiny")))
    monkeypatch.setattr("tests.wrong_graphs.parts.policy", doubtful.policy)
    return doubtful.greedy_sampling_of_several_answers()


def test_explain_has_the_warnings_and_the_plan_file_too(graph: Graph) -> None:
    planned = api.plan(graph, RunOptions())
    assert [w.rule for w in planned.warnings] == ["greedy_group"]
    assert '"rule": "greedy_group"' in planned.to_json()
    text = " ".join(explain(planned).split())
    assert "warnings (errors with --strict) doubtful.py:" in text
    assert text.count("[greedy_group]") == 1


@pytest.mark.parametrize("command", ["check", "explain"])
def test_the_command_line_shows_and_refuses(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_header(tmp_path)
    data = save_jsonl(tmp_path / "two.jsonl", SUM, SUM)
    flags = ["graphs.grpo:grpo", "--base", str(tmp_path / "tiny"), "--data", data]
    flags += ["--reward-fn", "tests.right_graphs:exact"]
    assert main([command, *flags]) == 0
    shown = capsys.readouterr().out
    assert shown.count("[large_batch]") == 1
    assert "batch=64 is larger than its 2 rows" in " ".join(shown.split())
    assert main([command, *flags, "--strict"]) == 1
    assert "[large_batch]" in capsys.readouterr().err
    assert main([command, *flags, "--batch", "2", "--strict"]) == 0


def slow_steps(graph: Graph, cluster: Cluster) -> list[GraphWarning]:
    plan = make_plan(check(graph), seed=0, cluster=cluster)
    return [warning for warning in plan.warnings if warning.rule == "slow_step"]


@pytest.mark.long
def test_a_plan_that_predicts_an_hour_a_step_is_warned_of(graph: Graph) -> None:
    assert slow_steps(graph, CLUSTER) == []
    longer = graph.map(
        lambda n: n.changed(params=n.params | {"batch": 2_000_000}) if n.name == "prompts" else n
    )
    (slow,) = slow_steps(longer, replace(CLUSTER, memory=2**50))
    assert "hours at the greatest lengths" in slow.problem
    assert slow.origin is not None


# While it runs


def test_a_selection_that_keeps_nothing_is_warned_of_in_each_empty_step() -> None:
    keep = replace(PLAN.node("keep"), refill=False)
    plan = replace(PLAN, nodes=tuple(keep if n.name == "keep" else n for n in PLAN.nodes))
    run = simulation(plan, settings=Settings(steps=2), outcomes=Outcomes(keep={"keep": 0.0}))
    assert run.run() is not None
    warnings = [i.warning for _, i in run.history.instructions if isinstance(i, Warn)]
    assert [w.rule for w in warnings] == ["empty_step", "empty_step"]
    told = "keep: step 1 has no row to train, and its weights stay as they are: 'keep' kept none"
    assert str(warnings[0]).startswith(f"{told} of its 2 prompts")


@pytest.mark.parametrize(("rows", "rules"), [(63, ["large_batch"]), (64, [])])
def test_a_source_that_opens_with_fewer_rows_than_a_batch_is_warned_of(
    graph: Graph, rows: int, rules: list[str]
) -> None:
    coordinator = Coordinator(make_plan(check(graph), seed=0, cluster=CLUSTER), Settings(steps=1))
    coordinator.start()
    instructions = coordinator.handle(SourceOpened(node="prompts", rows=rows), 0.0)
    assert [i.warning.rule for i in instructions if isinstance(i, Warn)] == rules


def warning(rule: str, where: str = "rollout") -> GraphWarning:
    return GraphWarning(rule=rule, where=where, problem="it looks wrong", fix="another one")


def test_each_is_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog()
    with caplog.at_level(logging.WARNING):
        for each in (warning("a"), warning("a"), warning("b"), warning("a", "other")):
            log.warn(each)
    assert [record.getMessage() for record in caplog.records] == [
        "warning: rollout: it looks wrong. Fix: another one. [a]",
        "warning: rollout: it looks wrong. Fix: another one. [b]",
        "warning: other: it looks wrong. Fix: another one. [a]",
    ]


def test_in_a_strict_run_it_is_an_error() -> None:
    with pytest.raises(RunError, match=r"rollout: it looks wrong\. Fix: another one\. \[a\]"):
        RunLog(strict=True).warn(warning("a"))
