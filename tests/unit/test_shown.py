"""Control characters of data, names and errors are never shown as they are."""

from __future__ import annotations

import io
import logging
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.diff import diff
from dataflow.draw import draw
from dataflow.errors import DataError, Fault, GraphError, RunError
from dataflow.graph import Graph
from dataflow.model import Model
from dataflow.shown import printable
from engine.cli.peek import shown
from engine.cli.screen import say
from engine.observe.logs import logged
from engine.observe.progress import Progress
from operators.data import prompts
from operators.generate import generate
from operators.losses import supervised_loss
from operators.train import train

HOSTILE = "a\x1b[2J\x1b]0;title\x07b\x9bc\x7f\u202ed\u2028e\u2066f\rg\x00h\ud800i\U000e0041"
_RAW = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff\U000e0000-\U000e007f]"
)


@given(st.text())
def test_what_is_printable_stays_and_nothing_else_is_left(text: str) -> None:
    escaped = printable(text)
    assert not _RAW.search(escaped)
    assert printable(escaped) == escaped
    assert "\n" not in printable(text, keep="")
    if not _RAW.search(text) and text.isascii():
        assert escaped == text


def test_the_codes_of_characters() -> None:
    escaped = "\\x1b[31m\\x9b\\u202e\\U000e0041 \u00e9\n"
    assert printable("\x1b[31m\x9b\u202e\U000e0041 \u00e9\n") == escaped
    assert printable("a\nb\tc", keep="") == "a\\x0ab\\x09c"


def _graph() -> Graph:
    model = Model(f"m{HOSTILE}", f"base{HOSTILE}", trainable=True)
    source = prompts(f"data{HOSTILE}", batch=2, name=f"p{HOSTILE}")
    rollout = generate(model, source, max_tokens=4, stop=(HOSTILE,))
    name = f"t{HOSTILE}\n<&\"'|#"
    return Graph(f"g{HOSTILE}", train(model, rollout, loss=supervised_loss(), lr=1.0, name=name))


@pytest.mark.parametrize("form", ["text", "mermaid", "dot", "svg"])
def test_every_drawing_escapes_names_and_values(form: str) -> None:
    drawing = draw(_graph(), form)  # type: ignore[arg-type]
    assert not _RAW.search(drawing)
    if form == "svg":
        ET.fromstring(drawing)
    assert "x1b" in drawing


def test_differences_errors_and_rows_are_escaped() -> None:
    assert not _RAW.search(str(diff(_graph(), _graph().renamed(f"h{HOSTILE}"))))
    fault = Fault(rule="r", where=HOSTILE, problem=HOSTILE, fix=HOSTILE)
    for error in (GraphError(fault), RunError(HOSTILE), DataError(f"line\n{HOSTILE}")):
        assert not _RAW.search(str(error))
    assert "\n" in str(DataError("line\nline"))
    text = HOSTILE.replace("\ud800", "")
    table = pa.table({f"c{text}": [text, "a\nb"], "many": [[text], ["x"]]})
    assert not any(_RAW.search(line) or "\n" in line for line in shown(table))


def test_the_screen_the_log_and_the_progress_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say(HOSTILE)
    stream = io.StringIO()
    with Progress(3, title=HOSTILE, stream=stream) as progress:
        progress.update({"step": 1, f"eval/{HOSTILE}": 1.0, "time/step": 1.0})
    with logged(tmp_path / "log"):
        said = HOSTILE.replace("\ud800", "")  # pytest itself sends what it captures on as UTF-8
        logging.getLogger("engine.test").warning("it said %s", said)
    log = (tmp_path / "log").read_text(encoding="utf-8")
    texts = [*capsys.readouterr(), stream.getvalue(), log]
    assert not any(_RAW.search(text) for text in texts)
    assert sum("x1b" in text for text in texts) == 3  # pytest takes what the log shows
