"""The command line: targets, flags from signatures, exit codes; some commands as processes."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from dataflow.errors import CheckpointError, GraphError
from dataflow.model import linear
from dataflow.snapshot import to_json
from engine.cli import COMMANDS, main, usage
from engine.cli.flags import parse
from engine.cli.peek import describe_rows
from engine.cli.target import SourceError, UsageError, load_function, load_target
from engine.plan.options import RunOptions
from graphs.sft import sft
from tests.kit.episodes import episode_batch
from tests.kit.files import save_jsonl
from tests.kit.processes import COMMAND_LINE, ROOT, call_python

TINY = '''
from typing import Literal

from dataflow.errors import RunError
from dataflow.graph import Graph
from dataflow.model import Model, Number, linear
from operators.data import demonstrations
from operators.losses import supervised_loss
from operators.rewards import RewardFn
from operators.train import train


def exact(completions, answer):
    return [1.0 for _ in completions]


def length(completions):
    return [0.0 for _ in completions]


def tiny(base: str, data: str, *, batch: int = 4, lr: Number = 1e-5) -> Graph:
    """Imitate a few rows.

    Args:
        base: a model directory.
        data: rows to imitate,
            in JSONL.
        batch: rows in a Step.
    """
    policy = Model("policy", base, trainable=True)
    rows = demonstrations(data, batch=batch)
    return Graph("tiny", train(policy, rows, loss=supervised_loss(), lr=lr))


def larger(base: str, data: str, *, batch: int = 8, lr: Number = 1e-5, epochs: int = 2) -> Graph:
    policy = Model("policy", base, trainable=True)
    rows = demonstrations(data, batch=batch)
    return Graph("larger", train(policy, rows, loss=supervised_loss(), lr=lr, epochs=epochs))


def many(
    fn: RewardFn,
    *,
    other: RewardFn | None = None,
    known: RewardFn = exact,
    flag: bool = False,
    kind: Literal["a", "b"] = "a",
    clip: float | tuple[float, float] = 0.2,
    beta: Number = linear(1.0, 0.0, 10),
    rate: Number = 0.5,
    text: str | None = None,
) -> Graph:
    raise RunError(f"the run failed on purpose: {kind}")


def clashes(seed: int = 0) -> Graph:
    return Graph("clashes")


def unannotated(n) -> Graph:
    return Graph("unannotated")


def open_ended(**kw: int) -> Graph:
    return Graph("open_ended")


def unreadable(table: dict[str, int]) -> Graph:
    return Graph("unreadable")


def spoken(base: str, data: str, *, dialect: str = "northern") -> Graph:
    return tiny(base, data).renamed(dialect)


def interrupted() -> Graph:
    raise KeyboardInterrupt
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tiny_graphs.py and rows.jsonl, in which the command line is called."""
    (tmp_path / "tiny_graphs.py").write_text(TINY)
    rows = [{"prompt": f"{i}+{i}", "completion": f"{2 * i}"} for i in range(8)]
    save_jsonl(tmp_path / "rows.jsonl", *rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "tiny_graphs", raising=False)
    return tmp_path


TARGET = "tiny_graphs.py:tiny"
DATA = ["--base", "models/base", "--data", "rows.jsonl"]


class CommandOutput(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., CommandOutput]


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line in that folder."""
    return lambda *arguments: CommandOutput(main(list(arguments)), *capsys.readouterr())


def values(name: str, *flags: str) -> dict[str, Any]:
    return parse("draw", load_target(f"tiny_graphs.py:{name}"), (), flags)[0]


def test_the_flags_of_run_are_the_signature_and_the_run_options(command: Command) -> None:
    """Frozen: a flag appears only by a new parameter or a new field of run's or all options."""
    code, shown, _ = command("run", TARGET, "--help")
    assert code == 0
    names = {"base", "data", "batch", "lr", "help", "dialect", "set", "watch", "no-watch"}
    for field in dataclasses.fields(RunOptions):
        name = field.name.replace("_", "-")
        names |= {name, f"no-{name}"} if field.type == "bool" else {name}
    assert set(re.findall(r"(?<=[\s,]--)[a-z][a-z-]*", shown)) == names


@pytest.mark.parametrize(
    ("target", "dialect", "name"),
    [(TARGET, "verl", "tiny (dialect=verl)"), ("tiny_graphs.py:spoken", "southern", "southern")],
)
def test_a_dialect_is_a_flag_of_every_graph_that_has_no_such_parameter(
    command: Command, target: str, dialect: str, name: str
) -> None:
    code, shown, _ = command("draw", target, *DATA, "--dialect", dialect)
    assert (code, shown.splitlines()[0].split("  ")[0]) == (0, name)


def test_help_shows_what_the_docstring_says(command: Command) -> None:
    code, shown, _ = command("check", TARGET, "--help")
    assert code == 0
    assert "Imitate a few rows." in shown
    assert "rows to imitate, in JSONL. (required)" in shown
    assert "rows in a Step. (default: 4)" in shown
    assert "Args:" not in shown


def test_every_kind_of_parameter_can_be_given(folder: Path) -> None:
    functions = "--fn tiny_graphs:exact,tiny_graphs:length --other tiny_graphs.py:length --flag"
    numbers = "--kind b --clip 0.2 0.28 --beta 0.5 --rate 0 --text hello"
    given = values("many", *functions.split(), *numbers.split())
    exact, length = given.pop("fn")
    assert (exact.__name__, length.__name__) == ("exact", "length")
    assert given == {
        "other": length,  # one module, whichever way it is named
        "flag": True,
        "kind": "b",
        "clip": (0.2, 0.28),
        "beta": 0.5,
        "rate": 0.0,
        "text": "hello",
    }


def test_defaults_are_those_of_the_function_and_left_to_it_where_no_text_can_say_them(
    folder: Path,
) -> None:
    given = values("many", "--fn", "tiny_graphs:exact")
    assert (given["clip"], given["other"], given["beta"]) == (0.2, None, linear(1.0, 0.0, 10))
    assert given.keys() == {"fn", "other", "flag", "kind", "clip", "beta", "rate", "text"}


@pytest.mark.parametrize("name, message", [
    ("clashes", r"parameter 'seed' has the name of a run option. Fix: "),
    ("unannotated", r"'n' cannot be a flag: graph functions annotate every parameter"),
    ("open_ended", r"parameter '\*\*kw: int' cannot be a flag"),
    ("unreadable", r"parameter 'table' is dict\[str, int\], which no flag can give. Fix: "),
])  # fmt: skip
def test_signatures_that_can_be_no_flags_are_refused(folder: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse("run", load_target(f"tiny_graphs.py:{name}"), (RunOptions,), [])


@pytest.mark.parametrize("text, message", [
    ("tiny_graphs", r"its graph.json. Fix: tiny_graphs:tiny or tiny_graphs:larger"),
    ("tiny_graphs.py", r"expected module.* Fix: tiny_graphs\.py:tiny or tiny_graphs\.py:larger"),
    ("tiny_graf", r"TARGET .tiny_graf.: expected module.* Fix: my_module:my_graph, or my_file\."),
    ("tiny_graphs:tinny", r"no function 'tinny' in tiny_graphs. Fix: tiny_graphs:tiny\."),
    ("tiny_graphs:zzz", r"Fix: one of: exact, length, tiny, larger,"),
    ("tiny_graph.py:tiny", r"no file 'tiny_graph.py'. Fix: tiny_graphs.py\."),
    ("tiny_grafs:tiny", r"no module 'tiny_grafs'"),
    ("graphs.grpp:grpo", r"no module 'graphs.grpp'"),
    ("missing.json", r"no file 'missing.json'"),
])  # fmt: skip
def test_targets_that_are_not_there(folder: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_target(text)


@pytest.mark.parametrize("text,told", [
    ("x = 1\ndef f(:\n", "2 .*raised SyntaxError: invalid syntax"),
    ("import no_such\n", "1 .*raised ModuleNotFoundError: No module named 'no_such'"),
    ("import json\njson.loads('{')\n", "2 .*raised JSONDecodeError: Expecting property name"),
])  # fmt: skip
def test_what_a_users_module_raises_is_one_line_with_its_place(
    folder: Path, text: str, told: str
) -> None:
    (folder / "broken_1.py").write_text(text)
    with pytest.raises(SourceError, match=rf"broken_1\.py:{told}") as caught:
        load_target("broken_1:f")
    assert "\n" not in str(caught.value)


def test_what_a_graph_function_raises_is_one_line_with_its_place(folder: Path) -> None:
    (folder / "raises_2.py").write_text("def f():\n    return {}['x']\n")
    with pytest.raises(SourceError, match=r"raises_2\.py:2 .*raised KeyError: 'x'\. Fix: "):
        load_target("raises_2:f").graph()


def test_an_error_that_nobody_expected_is_a_line_and_has_a_traceback_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def failing(_: object) -> int:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr("engine.cli.check.main", failing)
    code, _, shown = command("check", "x")
    assert code == 4
    assert shown.startswith("internal error: ZeroDivisionError: of ours (test_cli.py:")
    assert shown.count("\n") == 1
    with pytest.raises(ZeroDivisionError):
        main(["check", "x", "--traceback"])


def test_a_full_disk_behind_standard_output_is_said(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMAND_LINE, "--version"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300
        )
    assert done.returncode == 3
    told = "standard output could not be written: No space left on device. Fix: "
    assert done.stderr.startswith(told)
    assert done.stderr.count("\n") == 1


def test_a_users_module_that_exits_does_not_end_the_command_as_if_it_were_done(
    folder: Path, command: Command
) -> None:
    (folder / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    code, _, shown = command("check", "leaves.py:graph")
    assert code == 2
    assert "leaves.py:2 " in shown
    assert "found sys.exit(0). Fix: " in shown


def test_a_file_that_has_another_modules_name_is_refused(folder: Path) -> None:
    (folder / "json.py").write_text("def f(): ...\n")
    with pytest.raises(
        UsageError, match=r"Python has another module 'json' .*Fix: give the file another name"
    ):
        load_target("json.py:f")


def test_a_file_in_a_package_is_imported_by_its_whole_name(folder: Path) -> None:
    package = folder / "my_package/inner"
    package.mkdir(parents=True)
    for init in (package, package.parent):
        (init / "__init__.py").write_text("")
    (package / "rewards.py").write_text("def f(completions): return [0.0 for _ in completions]\n")
    function = load_function("my_package/inner/rewards.py:f", "--fn")
    assert function.__module__ == "my_package.inner.rewards"


def test_a_snapshot_is_a_target_without_flags(folder: Path, command: Command) -> None:
    (folder / "graph.json").write_text(to_json(sft("models/base", "rows.jsonl")))
    code, shown, _ = command("diff", "graph.json", TARGET, *DATA)
    assert code == 0
    assert "batch: 128 -> 4" in shown


DRAW_MANY = ["draw", "tiny_graphs.py:many"]
DIFF = ["diff", TARGET, "tiny_graphs.py:larger", *DATA]
NO_ENDING = "x.png has no ending of .txt, .mmd, .md, .dot, .gv, .svg. Fix: give --form too."
FOLDER_FIRST = "resume: expected the run's folder first. Fix: dataflow resume runs/NAME [flags]."
TARGET_FIRST = "check: expected TARGET first, found nothing. Fix: dataflow check TARGET [flags]."
NO_FLAG = "no graph function takes '--epohs'. Fix: see --help."
NODE_NEXT = "expected a node's name after TARGET. Fix: dataflow peek TARGET NODE [flags]."


@pytest.mark.parametrize("arguments, code, last", [
    (["--help"], 0, ""),
    ([], 2, ""),
    (["check"], 2, f"dataflow {TARGET_FIRST}"),
    (["peek", TARGET], 2, f"dataflow peek: {NODE_NEXT}"),
    (["resume"], 2, f"dataflow {FOLDER_FIRST}"),
    (["draw", "tiny_graphs.py:interrupted"], 130, "interrupted"),
    ([*DRAW_MANY, "--fn", "tiny_graphs:exact"], 3, "the run failed on purpose: a"),
    (["draw", TARGET, *DATA, "--out", "x.png"], 2, f"dataflow draw: {NO_ENDING}"),
    ([*DIFF, "--epohs", "3"], 2, f"dataflow diff: {NO_FLAG}"),
])  # fmt: skip
def test_exit_codes_and_the_last_line(
    command: Command, arguments: list[str], code: int, last: str
) -> None:
    """More in tests/mistakes/options.py."""
    ended = command(*arguments)
    assert (ended.code, (ended.err.splitlines() or [""])[-1]) == (code, last)


@pytest.mark.parametrize("arguments, code, told", [
    (["check", TARGET, "--base", "b", "--data", "row.jsonl"], 1, "row.jsonl"),
    (["check", TARGET, *DATA, "--dialect", "southern"], 2, ""),
    (["draw", TARGET, "--base", "b"], 2, "--data"),
    (["peek", TARGET, "demonstration", *DATA], 1, "Fix: 'demonstrations'."),
], ids=["wrong graph", "no dialect", "missing flag", "wrong node"])  # fmt: skip
def test_exit_codes_and_what_the_last_line_names(
    command: Command, arguments: list[str], code: int, told: str
) -> None:
    ended = command(*arguments)
    assert ended.code == code
    assert told in (ended.err if code == 2 else ended.err.splitlines()[-1])


def test_traceback_raises() -> None:
    with pytest.raises(UsageError):
        main(["--traceback", "chek"])


@pytest.mark.parametrize(("name", "form", "start"), [
    ("g.svg", [], "<svg"),
    ("g.mmd", [], "---"),
    ("g.dot", [], "digraph"),
    ("g.txt", [], "tiny"),
    ("g.txt", ["--form", "dot"], "digraph"),
])  # fmt: skip
def test_draw_takes_its_form_from_the_file(
    folder: Path, command: Command, name: str, form: list[str], start: str
) -> None:
    assert command("draw", TARGET, *DATA, "--out", name, *form).code == 0
    assert (folder / name).read_text().startswith(start)


def test_diff_gives_a_flag_to_whoever_has_it(command: Command) -> None:
    shown = command(*DIFF, "--epochs", "3").out
    assert "epochs: 1 -> 3" in shown
    assert "batch: 4 -> 8" in shown
    code, shown, _ = command(*DIFF, "--batch", "2", "--epochs", "1")
    assert code == 0
    assert "no difference" in shown


def test_every_command_has_a_line_of_help() -> None:
    """That it has a module: test_narrow.py shows the help of each."""
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\w", usage(), re.MULTILINE)


def test_a_failed_run_is_told_from_a_wrong_graph() -> None:
    from engine.cli import _FAILED_RUN

    assert issubclass(CheckpointError, _FAILED_RUN)
    assert not issubclass(GraphError, _FAILED_RUN)


SHOWING = (
    ["check", TARGET, *DATA],
    ["draw", TARGET, *DATA, "--form", "svg"],
    ["diff", TARGET, "graphs.sft:sft", *DATA],
)
CALL = f"""
import sys
from engine.cli import main
for words in {SHOWING}:
    assert main(words) == 0
heavy = {{"torch", "transformers", "vllm"}} & set(sys.modules)
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""


@pytest.mark.usefixtures("own_interpreters")
def test_showing_a_graph_imports_no_torch(folder: Path) -> None:
    done = call_python("-c", CALL, cwd=folder)
    assert done.returncode == 0, done.stderr
    for part in ("+-> train_policy", "</svg>", "batch: 4 -> 128"):
        assert part in done.stdout


def test_peek_shows_text_as_it_is_and_lists_with_their_length() -> None:
    row = {"completion": "a\nb", "ids": [1, 2, 3], "reward": 0.1234567890, "long": "x" * 500}
    lines = list(describe_rows(pa.Table.from_pylist([row])))
    values = ["  completion  a\\nb", "  ids         [3] 1 2 3", "  reward      0.123457"]
    assert lines[:4] == ["row 0", *values]
    assert lines[4].endswith("xxx...")
    assert len(lines[4]) < 120


def test_peek_shows_a_conversation_message_by_message() -> None:
    table = episode_batch(rows=1, turns=20).records.select(["messages", "finish"])
    lines = list(describe_rows(pa.Table.from_batches([table])))
    assert lines[:4] == [
        "row 0",
        "  messages  41 messages",
        "            system: You may search.",
        "            user: What is the word?",
    ]
    assert lines[4].strip() == "assistant: turn 0 says so; calls search(query=word 0)"
    assert lines[-2].strip() == "... 17 more"
    assert lines[-1].startswith("  finish ")
    table = pa.table({"messages": ["no messages"]})
    assert list(describe_rows(table)) == ["row 0", "  messages  no messages"]
