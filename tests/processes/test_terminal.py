"""What is printed while a bar is on a terminal: above it, named, and the bar whole."""

from __future__ import annotations

import logging
import sys

import pytest

from operators.kernels.scoring_output import Output, hear_function
from tests.kit.terminals import on_terminal, screen

PRINTS = """
import sys
from engine.session.progress import Progress
from operators.kernels.scoring_output import Output, hear_function

def look(step):
    print("looks at step", step)
    sys.stderr.write("half a ")
    sys.stderr.write("line\\nand no end")
    print("long " * 30)

output = Output("look")
with Progress(3, title="grpo") as progress:
    for step in (1, 2, 3):
        with hear_function(output):
            look(step)
        output.add(f"another process, step {step}\\n".encode())
        progress.update({"step": step, "reward/mean": step / 4, "time/step": 1.0})
"""
FIGURES = "reward 0.750  s/step 1.00  eta 0s"


@pytest.mark.parametrize("columns", [60, 100])
@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}])
def test_prints_go_above_the_bar_and_leave_it_whole(columns: int, env: dict[str, str]) -> None:
    written = on_terminal(PRINTS, columns=columns, env=env)
    *above, bar, figures, after = screen(written, columns)
    assert bar.startswith("grpo ")
    assert bar.endswith(" 3/3")
    assert (figures, after) == (FIGURES, "")
    assert not any("/3" in line for line in above)
    text = " ".join(" ".join(above).split())
    for step in (1, 2, 3):
        assert f"reward 'look' printed: looks at step {step} reward" in text
        assert f"reward 'look' printed: another process, step {step}" in text
    assert text.count("reward 'look' printed: half a line") == 3
    assert text.count("long") == 90
    assert ("\x1b[38" in written or "\x1b[3" in written.replace("\x1b[3K", "")) is not bool(env)


def test_lines_of_a_function_in_this_process_are_named_and_others_pass(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    output = Output("look")
    if sys.gettrace() is not None:
        pytest.skip("a debugger or a coverage tool traces this thread, and such output passes")
    with hear_function(output):
        print("one")
        logging.getLogger("elsewhere").warning("a record")
        print("two", file=sys.stderr, end="")
    print("after")
    own = [r.getMessage() for r in caplog.records if r.name != "elsewhere"]
    assert own == ["reward 'look' printed: one", "reward 'look' printed: two"]
    assert capsys.readouterr().out == "after\n"


def test_what_a_debugger_says_passes(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.gettrace()
    with hear_function(Output("look")):
        sys.settrace(lambda *_: None)
        print("(Pdb)")
        sys.settrace(before)
    assert capsys.readouterr().out == "(Pdb)\n"


STOPS = """
from operators.kernels.scoring_output import Output, hear_function

def look():
    print("before")
    breakpoint()
    return 1

with hear_function(Output("look")):
    look()
print("after")
"""


def test_a_breakpoint_in_a_function_of_this_process_talks_to_the_user() -> None:
    written = on_terminal(STOPS, columns=200, typed="p 6 * 7\ncontinue\n")
    lines = [line.strip() for line in written.splitlines()]
    assert "reward 'look' printed: before" in lines
    assert any(line.startswith("> <string>(") for line in lines), written
    assert "42" in [line.removeprefix("(Pdb) ") for line in lines]
    assert lines[-1] == "after"
    assert not any("printed: >" in line or "printed: (Pdb)" in line for line in lines)
