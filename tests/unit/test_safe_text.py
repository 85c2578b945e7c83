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
from dataflow.safe_text import printable, shown_bytes, shown_number
from engine.cli.peek import describe_rows
from engine.cli.screen import say
from engine.keep.worker_logs import log_to_file
from engine.session.progress import Progress
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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (9.996, "10"),
        (99.94, "99.9"),
        (99.96, "100"),
        (999.4, "999"),
        (999.6, "1,000"),
        (1000.0, "1,000"),
        (123_456.7, "123,457"),
        (-99.96, "-100"),
        (-999.6, "-1,000"),
        (-5000.0, "-5,000"),
        (0.000_001_2, "1.2e-06"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_a_number_has_no_exponent_where_it_is_short(value: float, text: str) -> None:
    assert shown_number(value) == text


@given(st.floats(-1e15, 1e15), st.integers(2, 6))
def test_what_is_shown_of_a_number_is_near_it(value: float, digits: int) -> None:
    text = shown_number(value, digits)
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.51 * 10.0 ** (1 - digits))
    assert "e+" not in text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (round(99.94 * 1024), "99.9 KiB"),
        (round(99.96 * 1024), "100 KiB"),
        (round(1023.4 * 1024), "1023 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**30 - 1, "1.0 GiB"),
        (1 - 2**20, "-1.0 MiB"),
    ],
)
def test_a_size_is_rounded_before_its_unit_is_chosen(count: int, text: str) -> None:
    assert shown_bytes(count) == text


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
    assert not any(_RAW.search(line) or "\n" in line for line in describe_rows(table))


def test_the_screen_the_log_and_the_progress_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say(HOSTILE)
    stream = io.StringIO()
    with Progress(3, title=HOSTILE, stream=stream) as progress:
        progress.update({"step": 1, f"eval/{HOSTILE}": 1.0, "time/step": 1.0})
    with log_to_file(tmp_path / "log"):
        said = HOSTILE.replace("\ud800", "")  # pytest itself sends what it captures on as UTF-8
        logging.getLogger("engine.test").warning("it said %s", said)
    log = (tmp_path / "log").read_text(encoding="utf-8")
    texts = [*capsys.readouterr(), stream.getvalue(), log]
    assert not any(_RAW.search(text) for text in texts)
    assert sum("x1b" in text for text in texts) == 3  # pytest takes what the log shows
