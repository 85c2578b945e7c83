"""Every command on a screen of 60 columns, and without colours. Paths and names may be longer."""

from __future__ import annotations

import pyarrow as pa
import pytest

from dataflow.check import check
from dataflow.draw import draw
from dataflow.errors import GraphError
from engine.cli import COMMANDS, main
from engine.cli.peek import describe_rows
from engine.plan.explain import explain
from tests.kit.comparison import require_golden
from tests.kit.plans import planned
from tests.kit.terminals import on_terminal, screen
from tests.right_graphs import RIGHT
from tests.unit.test_draw import GRAPHS
from tests.wrong_graphs.rows import mean_over_its_own_rows

pytestmark = pytest.mark.usefixtures("tiny")
NARROW = 60


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(NARROW))


def too_wide(text: str) -> list[str]:
    """Lines that are wider and could have been broken: with a second word, and where rails leave
    room for words.
    """
    wide = [(line, line.lstrip(" |")) for line in text.splitlines() if len(line) > NARROW]
    room = NARROW - 12
    return [line for line, said in wide if len(said.split()) > 1 and len(line) - len(said) <= room]


@pytest.mark.parametrize("name", GRAPHS)
def test_golden(name: str) -> None:
    """It says all that the wide one says, draw/NAME.txt."""
    require_golden(f"draw/{name}_60.txt", draw(GRAPHS[name](), width=NARROW))


def test_drawings_of_all_right_graphs_fit() -> None:
    assert not [make for make in RIGHT if too_wide(draw(make(), width=NARROW))]


def test_all_plans_fit_and_say_the_same() -> None:
    for make in RIGHT:
        plan = planned(make())
        narrow = explain(plan, width=NARROW)
        assert not too_wide(narrow)
        assert narrow.split() == explain(plan).split()


TARGET = ["graphs.sft:sft", "--base", "tiny", "--data", "no/such/file.parquet"]


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        *([name, "--help"] for name in COMMANDS),
        ["run", "graphs.grpo:grpo", "--help"],
        ["run", *TARGET, "--help"],
        ["graphs"],
        ["check", "graphs.grpo:grpo"],
        ["check", *TARGET],
        ["draw", *TARGET],
        ["explain", *TARGET],
        ["diff", "graphs.sft:sft", "graphs.grpo:grpo", *TARGET[1:], "--reward-fn", "a:b"],
        ["no_such_command"],
    ],
    ids=lambda given: " ".join(given)[:40],
)
def test_what_a_command_prints_fits(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(words)
    out = capsys.readouterr()
    assert out.out + out.err
    assert not too_wide(out.out + out.err)


def test_the_faults_of_a_graph_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tests.wrong_graphs.rows:mean_over_its_own_rows"]) == 1
    error = capsys.readouterr().err
    assert not too_wide(error)
    with pytest.raises(GraphError) as caught:
        check(mean_over_its_own_rows())
    assert error.split() == str(caught.value).split()


def test_peek_cuts_values_to_what_is_left() -> None:
    row = {"text": "word " * 40, "ids": list(range(100)), "number": 0.5}
    lines = list(describe_rows(pa.Table.from_pylist([row])))
    assert max(map(len, lines)) == NARROW
    assert [line.split()[0] for line in lines] == ["row", "text", "ids", "number"]


HELP = "from engine.cli import main; main(['run', '--help'])"


@pytest.mark.long
def test_without_colours_nothing_has_one() -> None:
    assert "\x1b[" in on_terminal(HELP, columns=NARROW)
    written = on_terminal(HELP, columns=NARROW, env={"NO_COLOR": "1"})
    assert "\x1b" not in written
    assert "usage: dataflow run" in written
    assert not too_wide("\n".join(screen(written, 10_000)))
