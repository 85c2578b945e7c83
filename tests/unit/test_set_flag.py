"""--set on the command line: what it edits, which flag it names instead, the help page of nodes."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dataflow.graph import Graph
from dataflow.snapshot import to_json
from engine.cli import main
from engine.cli.owners import find_owners
from engine.cli.set_flag import nodes_page
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
T, PICKY, PHASES = (f"two_graphs.py:{name}" for name in ("two", "picky", "phases"))
Command = Callable[[str], tuple[int, str, str]]


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
    """Runs a command: its exit status, and each stream with single blanks."""

    def call(line: str) -> tuple[int, str, str]:
        code, output = main(shlex.split(line)), capsys.readouterr()
        return code, " ".join(output.out.split()), " ".join(output.err.split())

    return call


@pytest.fixture
def snapshot(folder: Path) -> None:
    """The graph as `graph.json` in the working directory."""
    (folder / "graph.json").write_text(to_json(load_target(T).graph()))


@pytest.mark.usefixtures("snapshot")
@pytest.mark.parametrize("line, parts", [
    (
        f"draw {T} --set eval_rollout.temperature=0.7 score.timeout=3 --max-tokens 64"
        " --set=train_policy.epochs=2",
        ["temperature=0.7)", "reward(exact, timeout=3)", "epochs=2", "max_tokens=64"],
    ),
    (f"draw {T} --lr 'cosine(1e-6, 100)'", ["lr=cosine 1e-6..0 in 100"]),
    (
        f"diff {T} {T} --set rollout.top_k=5 --set score.timeout=3",
        ["top_k: 0 -> 5", "timeout: 30 -> 3"],
    ),
    (f"diff {T} graph.json --set rollout.max_tokens=64", ["max_tokens: 32 -> 64"]),
    ("run graph.json --help", ["max_tokens=32 a whole number >= 1"]),
])  # fmt: skip
def test_a_command_shows_the_edited_graph(command: Command, line: str, parts: list[str]) -> None:
    """Of a diff, the second one."""
    code, shown, _ = command(line)
    assert code == 0
    for part in parts:
        assert part in shown


def test_help_shows_the_nodes_as_they_are_edited(command: Command) -> None:
    code, shown, error = command(f"run {T} --help --set rollout.top_k=5 --max-tokens=9")
    assert (code, error) == (0, "")
    flags, page, nodes = shown.partition("nodes, and what --set NODE.PARAM=VALUE may change")
    assert page
    assert "--steps" in flags
    assert "top_k=5" in nodes
    assert "max_tokens=9" in nodes


def test_a_value_that_the_function_gives_names_its_flag(command: Command) -> None:
    code, _, error = command(f"check {T} --set rollout.max_tokens=64")
    assert code == 2
    assert error == (
        "--set 'rollout.max_tokens=64': rollout.max_tokens is given by the graph function's own"
        " parameter max_tokens. Fix: --max-tokens 64."
    )


@pytest.mark.long
@pytest.mark.parametrize("line, fix", [
    (f"{T} --set rollout.temperature=0.5", "--heat"),
    (f"{T} --set eval_rollout.max_tokens=5", "--max-tokens 5"),
    (f"{T} --set evaluate.every=3", "--every 3"),
    (f"{T} --set 'train_policy.lr=cosine(1e-6, 9)'", "--lr 'cosine(1e-6, 9)'"),
    (f"{T} --set prompts.data=x.jsonl", "--data x.jsonl"),
    (f"{T} --set score.fn=x", "--reward-fn"),
    (f"{T} --set rollout.policy=x", "--base"),
    (f"{T} --set rolout.top_p=0.5", "rollout.top_p=..."),
    (f"{PICKY} --set evaluate.every=4", "--every 4"),  # it refuses all other values
    (f"{PHASES} --set 1/rollout.max_tokens=5", "--max-tokens 5"),
])  # fmt: skip
def test_a_setting_that_cannot_be_names_what_can(command: Command, line: str, fix: str) -> None:
    code, _, error = command(f"draw {line}")
    assert (code, error.rpartition("Fix: ")[2]) == (2, f"{fix}.")


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
    return find_owners(Target(text=name, function=function), given, made)


@pytest.mark.long
@pytest.mark.parametrize("name", algorithms.NAMES)
def test_every_parameter_of_a_shipped_graph_but_its_models_gives_some_value(name: str) -> None:
    found, taken = owned(name), inspect.signature(algorithms.function_of(name)).parameters
    elsewhere = {*algorithms.MODELS, "adapter", "eval_data", "eval_every", "drop_uniform"}
    assert set(found.values()) >= taken.keys() - elsewhere
    assert not {path.rpartition(".")[2] for path in found} & {"top_p", "timeout"}


def test_the_flags_of_an_evaluation_give_its_values() -> None:
    found = owned("grpo", eval_data="test.jsonl", eval_every=7)
    assert found["evaluate.every"] == "eval_every"
    assert found["eval_prompts.data"] == "eval_data"
    assert "eval_rollout.temperature" not in found


@pytest.mark.parametrize(("name", "node"), [("run", ""), ("peek", "rollout")])
def test_what_runs_is_the_edited_graph(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str, node: str
) -> None:
    class Stopped(BaseException):
        pass

    stop = Mock(side_effect=Stopped)
    monkeypatch.setattr(f"engine.session.calls.{name}", stop)
    with pytest.raises(Stopped):
        command(f"{name} {T} {node} --set rollout.top_p=0.5")
    (graph, *_) = stop.call_args.args
    assert graph.node("rollout").params["top_p"] == 0.5


def test_the_help_page_of_a_shipped_graph_lists_its_nodes() -> None:
    given = {"base": "models/base", "data": "train.jsonl", "reward_fn": exact}
    target = Target(text="graphs.dapo:dapo", function=dapo)
    require_golden("cli/dapo_nodes.txt", nodes_page(target, given, target.graph(given)) + "\n")


def test_help_without_the_required_flags_says_how_to_see_the_nodes(command: Command) -> None:
    code, shown, _ = command("check graphs.dapo:dapo --help")
    assert code == 0
    assert "--max-tokens" in shown
    assert shown.endswith(
        "--help with the required flags lists the nodes, and what --set may change: dataflow"
        " check graphs.dapo:dapo --base BASE --data DATA --reward-fn MODULE:FUNCTION --help"
    )


@pytest.mark.parametrize("flag, says", [
    (
        "--lr fast",
        "expected a number, or a schedule, found 'fast'. Fix: 1e-6 or 'cosine(1e-6, 100)'",
    ),
    (
        "--lr 'cosine(1e-6)'",
        "cosine: missing a required argument: 'stop'. Fix: cosine(start, stop,",
    ),
    ("--lr 'cosine(1e-6, 0.5)'", "cosine: expected steps to be a whole number >= 0, found 0.5"),
    ("--lr none", "expected a number, or a schedule, found 'none'"),
    ("--set", "expected NODE.PARAM=VALUE, found nothing"),
])  # fmt: skip
def test_a_text_that_is_no_value_names_its_flag(command: Command, flag: str, says: str) -> None:
    code, _, error = command(f"check {T} {flag}")
    assert code == 2
    told = " ".join(error.replace("\u2502", " ").split())
    assert says in told
    assert flag.split()[0] in told
