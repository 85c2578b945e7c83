"""The shipped graphs: each is one short function that checks, plans, and is a file to copy."""

from __future__ import annotations

import ast
import inspect
import re
from itertools import chain
from pathlib import Path

import pytest

from dataflow.check import check
from dataflow.errors import GraphError
from dataflow.snapshot import from_json, to_json
from engine.cli import main
from engine.cli.graphs import shipped_graphs, summary
from engine.plan.cluster import Cluster
from engine.plan.explain import explain
from engine.plan.options import RunOptions, make_placing
from engine.plan.planner import make_plan
from tests.kit import algorithms
from tests.kit.processes import ROOT, call_python
from tests.kit.tiny_runs import save_tiny_inputs

GPU = 80 * 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    save_tiny_inputs(made)
    return made


def parameters(name: str) -> list[str]:
    return list(inspect.signature(algorithms.function_of(name)).parameters)


@pytest.mark.parametrize("name", algorithms.NAMES)
def test_each_is_a_file_of_its_own_with_one_short_function_that_says_what_it_is(name: str) -> None:
    tree = ast.parse(shipped_graphs()[name].read_text())
    imported = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not [module for module in imported if module.startswith("graphs")]
    function = [n for n in tree.body if isinstance(n, ast.FunctionDef)][-1]
    assert function.name == name
    assert function.end_lineno - function.body[1].lineno < 16
    doc = inspect.getdoc(algorithms.function_of(name)) or ""
    told = re.findall(r"^    (\w+(?:, \w+)*):", doc.partition("Args:\n")[2], re.MULTILINE)
    assert set(", ".join(told).split(", ")) == set(parameters(name))
    assert 20 < len(summary(shipped_graphs()[name])) <= 96


@pytest.mark.long
@pytest.mark.parametrize("name", algorithms.NAMES)
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_each_has_a_plan_on_any_number_of_devices(name: str, gpus: int, folder: Path) -> None:
    graph = algorithms.small(name, folder)
    cluster = Cluster(cores=2 * gpus, memory=256 * 2**30, gpus=(GPU,) * gpus)
    for workers in ("auto", "apart"):
        asked = make_placing(RunOptions(workers=workers))
        plan = make_plan(check(graph), seed=0, placing=asked, cluster=cluster)
        assert {node.name for node in plan.nodes} <= {node.name for node in graph.nodes}
        assert set(chain(*plan.devices.values())) <= set(range(gpus))
        assert name in explain(plan)


@pytest.mark.parametrize("name", algorithms.NAMES)
def test_each_is_read_back_and_with_a_lag_is_bound_by_it(name: str, folder: Path) -> None:
    graph = algorithms.small(name, folder)
    assert from_json(to_json(graph)) == graph
    assert check(graph).warnings == ()
    checked = check(algorithms.lagging(graph, 2))
    assert set(checked.bound.values()) == {2 if algorithms.generates(graph) else 0}


REWARDED = [name for name in algorithms.NAMES if "reward_fn" in parameters(name)]
UNIFORM = [name for name in algorithms.NAMES if "drop_uniform" in parameters(name)]
EVALUATION = {"eval_prompts", "eval_rollout", "eval_score", "evaluate"}


@pytest.mark.parametrize("name", REWARDED)
def test_each_with_a_reward_function_takes_held_out_prompts(name: str, folder: Path) -> None:
    assert parameters(name)[-2:] == ["eval_data", "eval_every"]
    test = str(folder / "test.parquet")
    plain = {node.name for node in algorithms.small(name, folder).nodes}
    graph = algorithms.small(name, folder, eval_data=test, eval_every=7)
    assert {node.name for node in graph.nodes} - plain == EVALUATION
    assert graph.node("eval_prompts").params["shuffle"] is False
    greedy = {"temperature": 0.0, "n": 1, "max_tokens": algorithms.NUMBERS["max_tokens"]}
    assert greedy.items() <= graph.node("eval_rollout").params.items()
    assert graph.node("evaluate").params["every"] == 7
    assert graph.node("evaluate").origin.file.endswith(f"{name}.py")
    check(graph)
    with pytest.raises(GraphError, match="evaluation on training data"):
        check(algorithms.small(name, folder, eval_data=str(folder / "train.parquet")))
    with pytest.raises(
        GraphError, match=r"expected eval_every to be left at 50.*found 7\. Fix: eval_data="
    ):
        algorithms.small(name, folder, eval_every=7)


def test_the_others_have_no_reward_function_of_whole_answers() -> None:
    others = {"agent", "agent_turns", "distill", "dpo", "process_reward", "sft"}
    assert set(algorithms.NAMES) - set(REWARDED) == others


@pytest.mark.parametrize("name", UNIFORM)
def test_groups_of_equal_rewards_can_be_dropped(name: str, folder: Path) -> None:
    assert parameters(name)[-3] == "drop_uniform"
    plain = {node.name for node in algorithms.small(name, folder).nodes}
    graph = algorithms.small(name, folder, drop_uniform=True)
    assert {node.name for node in graph.nodes} - plain == {"mixed_groups", "select"}
    assert graph.node("select").params["refill"] is False
    check(graph)


def test_they_can_be_where_equal_rewards_make_every_advantage_0(folder: Path) -> None:
    """A baseline over the group, no penalty in the reward, no mean over the Step after it, and
    nobody else who learns from the groups.
    """
    other = {"kl_in_reward", "whiten", "select", "baseline_advantage", "ranks"}
    for name in REWARDED:
        operators = {node.operator.name for node in algorithms.small(name, folder).nodes}
        alone = "group_advantage" in operators and not operators & other
        assert alone == (name in UNIFORM), name


def test_the_page_of_algorithms_is_what_its_script_writes(tmp_path: Path) -> None:
    done = call_python("scripts/algorithms.py", str(tmp_path))
    assert done.returncode == 0, done.stderr
    made = {file.relative_to(tmp_path) for file in tmp_path.rglob("*.*")}
    assert made == {Path("algorithms.md"), *(Path(f"drawings/{n}.svg") for n in shipped_graphs())}
    for name in made:
        assert (ROOT / "docs" / name).read_text() == (tmp_path / name).read_text(), name


def test_the_command_lists_them_and_prints_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graphs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, (name, file) in zip(lines, shipped_graphs().items(), strict=True):
        assert (line.split()[0], line.endswith(summary(file))) == (name, True)
    assert main(["graphs", "grpo"]) == 0
    assert capsys.readouterr().out == shipped_graphs()["grpo"].read_text()


def test_a_name_that_none_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graphs", "gprpo"]) == 2
    error = capsys.readouterr().err
    assert error == "dataflow graphs: no graph 'gprpo'. Fix: dataflow graphs grpo.\n"
