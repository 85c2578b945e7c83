"""--set on the command line: what it edits, which flag it names instead, the help page of nodes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataflow.graph import Graph
from dataflow.program import Program
from dataflow.snapshot import from_json, to_json
from engine.cli import main
from engine.cli.owners import owners
from engine.cli.settings import nodes_page
from engine.cli.target import Target, load_target
from graphs.dapo import dapo
from tests.kit import algorithms
from tests.kit.comparison import require_golden
from tests.kit.files import save_jsonl
from tests.kit.rewards import exact

TWO = '''
from dataflow.errors import RunError
from dataflow.graph import Graph
from dataflow.model import Model, Number
from dataflow.program import Program
from operators.advantage import group_advantage
from operators.data import prompts
from operators.generate import generate
from operators.losses import clipped_policy_loss
from operators.reward import reward
from operators.rewards import RewardFn
from operators.train import evaluate, train


def exact(completions, answer):
    return [1.0 for _ in completions]


def two(
    base: str = "models/base",
    data: str = "rows.jsonl",
    reward_fn: RewardFn = exact,
    *,
    max_tokens: int = 32,
    heat: float = 1.0,
    every: int = 5,
    eval_limit: int | None = None,
    lr: Number = 1e-6,
) -> Graph:
    """Train and evaluate."""
    if every > 6:
        raise RunError("too seldom")
    policy = Model("policy", base, trainable=True)
    rollout = generate(
        policy, prompts(data, batch=4), n=2, max_tokens=max_tokens, temperature=heat,
        name="rollout",
    )
    advantage = group_advantage(rollout, reward(reward_fn, rollout, name="score"))
    held = generate(
        policy, prompts(data, name="held"), max_tokens=eval_limit or max_tokens * 2,
        name="eval_rollout",
    )
    trained = train(policy, rollout, loss=clipped_policy_loss(advantage), lr=lr)
    grade = reward(reward_fn, held, name="grade")
    watched = evaluate(policy, grade, every=every, allow_train_data=True)
    return Graph("two", trained, watched)


def picky(*, every: int = 5) -> Graph:
    if every != 5:
        raise RunError("only 5")
    return two(every=every)


def phases(*, max_tokens: int = 32) -> Program:
    return Program((two(max_tokens=max_tokens), 2), (two(max_tokens=8).renamed("later"), 3))
'''
T = "two_graphs.py:two"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "two_graphs.py").write_text(TWO)
    (tmp_path / "models").mkdir()
    save_jsonl(tmp_path / "rows.jsonl", *[{"prompt": "a", "answer": "b"}] * 8)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "two_graphs", raising=False)
    return tmp_path


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: str) -> tuple[int, str, str]:
        code, output = main(list(arguments)), capsys.readouterr()
        return code, output.out, output.err

    return call


def test_several_values_and_several_flags_edit_one_graph(command: Command) -> None:
    values = ["--set", "eval_rollout.temperature=0.7", "score.timeout=3", "--max-tokens", "64"]
    code, shown, error = command("draw", T, *values, "--set=train_policy.epochs=2")
    assert (code, error) == (0, "")
    text = " ".join(shown.split())
    assert "temperature=0.7)" in text
    assert "reward(exact, timeout=3)" in text
    assert "epochs=2" in text
    assert "max_tokens=64" in text


def test_a_value_that_the_function_gives_names_its_flag(command: Command) -> None:
    code, _, error = command("check", T, "--set", "rollout.max_tokens=64")
    assert code == 2
    assert error == (
        "--set 'rollout.max_tokens=64': rollout.max_tokens is given by the graph function's own"
        " parameter max_tokens. Fix: --max-tokens 64.\n"
    )


@pytest.mark.parametrize("setting, flag", [
    ("rollout.temperature=0.5", "--heat"),
    ("eval_rollout.max_tokens=5", "--max-tokens 5"),
    ("evaluate.every=3", "--every 3"),
    ("train_policy.lr=cosine(1e-6, 9)", "--lr 'cosine(1e-6, 9)'"),
    ("prompts.data=x.jsonl", "--data x.jsonl"),
    ("score.fn=x", "--reward-fn"),
    ("rollout.policy=x", "--base"),
])  # fmt: skip
def test_a_flag_is_found_by_what_it_changes(command: Command, setting: str, flag: str) -> None:
    code, _, error = command("draw", T, "--set", setting)
    assert code == 2
    assert error.endswith(f" Fix: {flag}.\n")


def test_a_function_that_refuses_other_values_owns_what_has_its_name(command: Command) -> None:
    code, _, error = command("draw", "two_graphs.py:picky", "--set", "evaluate.every=4")
    assert (code, error.rpartition("Fix: ")[2]) == (2, "--every 4.\n")


def owned(name: str, **changes: Any) -> dict[str, str]:
    """NODE.PARAM -> the parameter of a shipped graph's function that gives its value."""
    function, folder = algorithms.function_of(name), Path("nowhere")
    given: dict[str, Any] = {}

    def kept(**arguments: Any) -> Graph:
        given.update(arguments)
        return function(**arguments)

    kept.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(algorithms, "function_of", lambda name: kept)
        made = algorithms.small(name, folder, **changes)
    return owners(Target(text=name, function=function), given, made)


@pytest.mark.parametrize("name", algorithms.NAMES)
def test_every_parameter_of_a_shipped_graph_but_its_models_gives_some_value(name: str) -> None:
    found, taken = owned(name), inspect.signature(algorithms.function_of(name)).parameters
    elsewhere = {*algorithms.MODELS, "eval_data", "eval_every", "drop_uniform"}
    assert set(found.values()) >= taken.keys() - elsewhere
    assert not {path.rpartition(".")[2] for path in found} & {"top_p", "timeout"}


def test_the_flags_of_an_evaluation_give_its_values() -> None:
    found = owned("grpo", eval_data="test.jsonl", eval_every=7)
    assert found["evaluate.every"] == "eval_every"
    assert found["eval_prompts.data"] == "eval_data"
    assert "eval_rollout.temperature" not in found


def test_a_wrong_setting_is_a_wrong_command_line(command: Command) -> None:
    code, _, error = command("draw", T, "--set", "rolout.top_p=0.5")
    assert (code, error) == (2, "--set 'rolout.top_p=0.5': no node 'rolout'."
                                " Fix: rollout.top_p=....\n")  # fmt: skip
    assert command("draw", T, "--set", "rollout.top_p=2")[0] == 2


def test_the_check_runs_after_the_edit(command: Command) -> None:
    code, shown, error = command("check", T, "--set", "rollout.max_lag=1")
    assert (code, error) == (0, "")
    plain = command("check", T)[1]
    assert shown != plain
    assert command("check", T, "--set", "rollout.max_lag=0")[1] == plain
    code, _, error = command("check", T, "--set", "rollout.n=1")
    assert code == 1
    assert "a group baseline needs n >= 2" in error


def test_diff_shows_an_edit_of_its_second_graph(folder: Path, command: Command) -> None:
    code, shown, _ = command("diff", T, T, "--set", "rollout.top_k=5", "--set", "score.timeout=3")
    assert code == 0
    assert "top_k: 0 -> 5" in shown
    assert "timeout: 30 -> 3" in shown
    code, _, error = command("diff", T, T, "--set", "rollout.max_tokens=5", "--max-tokens", "9")
    assert (code, error.rpartition("Fix: ")[2]) == (2, "--max-tokens 5.\n")


def test_a_snapshot_is_edited_too(folder: Path, command: Command) -> None:
    made = load_target(T).graph()
    assert isinstance(made, Graph)
    (folder / "graph.json").write_text(to_json(made))
    code, shown, _ = command("diff", T, "graph.json", "--set", "rollout.max_tokens=64")
    assert code == 0
    assert "max_tokens: 32 -> 64" in shown


def test_a_program_is_edited_by_phase(command: Command) -> None:
    target = "two_graphs.py:phases"
    code, _, error = command("draw", target, "--set", "rollout.top_k=5")
    assert (code, error.rpartition("Fix: ")[2]) == (
        2, "1/rollout.top_k=... or 2/rollout.top_k=....\n"
    )  # fmt: skip
    code, shown, _ = command("diff", target, target, "--set", "later/rollout.max_tokens=64")
    assert "max_tokens: 8 -> 64" in shown
    code, _, error = command("draw", target, "--set", "1/rollout.max_tokens=5")
    assert (code, error.rpartition("Fix: ")[2]) == (2, "--max-tokens 5.\n")


@pytest.mark.parametrize("name", ["run", "peek"])
def test_what_runs_is_the_edited_graph(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen: list[Graph | Program] = []

    class Stopped(BaseException):
        pass

    def stop(graph: Graph, *arguments: Any) -> None:
        seen.append(graph)
        raise Stopped

    monkeypatch.setattr(f"engine.api.{name}", stop)
    node = ["rollout"] if name == "peek" else []
    with pytest.raises(Stopped):
        command(name, T, *node, "--set", "rollout.top_p=0.5")
    (graph,) = seen
    assert isinstance(graph, Graph)
    assert graph.node("rollout").params["top_p"] == 0.5
    assert from_json(to_json(graph)) == graph


def test_the_help_page_of_a_shipped_graph_lists_its_nodes() -> None:
    given = {"base": "models/base", "data": "train.jsonl", "reward_fn": exact}
    target = Target(text="graphs.dapo:dapo", function=dapo)
    require_golden("cli/dapo_nodes.txt", nodes_page(target, given, target.graph(**given)) + "\n")


def test_the_help_page_of_a_snapshot_lists_its_nodes(folder: Path, command: Command) -> None:
    made = load_target(T).graph()
    assert isinstance(made, Graph)
    (folder / "graph.json").write_text(to_json(made))
    code, shown, error = command("run", "graph.json", "--help")
    assert (code, error) == (0, "")
    assert "  max_tokens=32           a whole number >= 1\n" in shown


def test_help_shows_the_nodes_as_they_are_edited(command: Command) -> None:
    code, shown, error = command("run", T, "--help", "--set", "rollout.top_k=5", "--max-tokens=9")
    assert (code, error) == (0, "")
    flags, page, nodes = shown.partition("nodes, and what --set NODE.PARAM=VALUE may change")
    assert page
    assert "--steps" in flags
    assert "  top_k=5" in nodes
    assert "  max_tokens=9" in nodes


def test_help_without_the_required_flags_says_how_to_see_the_nodes(command: Command) -> None:
    code, shown, _ = command("check", "graphs.dapo:dapo", "--help")
    assert code == 0
    assert "--max-tokens" in shown
    assert shown.endswith(
        "--help with the required flags lists the nodes, and what --set may change:\n  dataflow"
        " check graphs.dapo:dapo --base BASE --data DATA --reward-fn MODULE:FUNCTION --help\n"
    )


@pytest.mark.parametrize("text, says", [
    ("fast", "expected a number, or a schedule, found 'fast'. Fix: 1e-6 or 'cosine(1e-6, 100)'"),
    ("cosine(1e-6)", "cosine: missing a required argument: 'stop'. Fix: cosine(start, stop,"),
    ("cosine(1e-6, 0.5)", "cosine: expected steps to be a whole number >= 0, found 0.5"),
    ("none", "expected a number, or a schedule, found 'none'"),
])  # fmt: skip
def test_a_text_that_is_no_schedule_names_its_flag(command: Command, text: str, says: str) -> None:
    code, _, error = command("check", T, "--lr", text)
    assert code == 2
    told = " ".join(line.strip("\u2502 ") for line in error.splitlines())
    assert says in told
    assert "--lr" in told


def test_a_number_may_be_a_schedule_as_text(command: Command) -> None:
    code, shown, error = command("draw", T, "--lr", "cosine(1e-6, 100)")
    assert (code, error) == (0, "")
    assert "lr=cosine 1e-6..0 in 100" in " ".join(shown.split())
    code, shown, _ = command("diff", T, T, "--lr", "warmup(5, 1e-5)")
    assert (code, "changed" in shown) == (0, False)


def test_a_set_flag_without_a_value_is_refused(command: Command) -> None:
    code, _, error = command("check", T, "--set")
    assert code == 2
    assert "expected NODE.PARAM=VALUE, found nothing" in error
