"""`dataflow report`: one file that says what a run did, and runs and loads nothing."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dataflow.snapshot import to_json
from engine.cli import main
from engine.keep.flow.records import Tombstones
from engine.keep.flow.segments import StepSegments
from engine.keep.samples import SampleWriter
from engine.watch.report import make_report
from engine.watch.run_questions import ServedRuns
from tests.kit.episodes import episode_batch, episode_samples
from tests.kit.graphs import small_grpo
from tests.kit.watched import watched_run

EVIL = '<script>alert("x")</script>'


class Page(HTMLParser):
    """The tags of a page with their attributes, its headings and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self.words = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["h2"]:
            self.headings.append(data)
        if self.open[-1:] != ["style"]:
            self.words += data


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = watched_run(tmp_path / "runs" / "a", ended={"state": "failed", "reason": f"no {EVIL}"})
    (run / "graph.json").write_text(to_json(small_grpo()))
    (run / "command.txt").write_text(f"dataflow run {EVIL} \u2028 x\n")
    versions = {"python": "3.11", "packages": {"torch": EVIL}, "git": {"commit": EVIL}}
    (run / "versions.json").write_text(json.dumps(versions))
    change = {"step": 2, "where": "node", "what": EVIL, "old": "1", "new": "2"}
    (run / "changes.json").write_text(json.dumps({"changes": [change]}))
    segments = StepSegments(run / "events")
    row = Tombstones(step=6, wall=1.0, node="score", keys=[(4, 1, 0)], error=EVIL)
    segments.write(row)
    segments.close()
    return run


@pytest.fixture
def page(run: Path) -> Page:
    return Page(make_report(ServedRuns(run.parent), "a", now=0.0))


def test_a_report_has_all_parts_and_no_script(page: Page) -> None:
    assert page.headings == [
        "Graph",
        "Curves",
        "Who waits for whom",
        "Nodes",
        "Samples: the newest",
        "Samples: the best",
        "Samples: the worst",
        "Changes that a resume accepted",
        "Errors",
        "Options",
    ]
    for words in (
        "train_policy waits 75 % for score",
        "1970-01-01 00:00:00 UTC",
        f"failed: no {EVIL}",
        "gamma <script>6.2</script>",
        "\\u2028",
    ):
        assert words in page.words
    names = [name for name, _ in page.tags]
    assert {"script", "link", "iframe", "object", "embed", "base", "form"}.isdisjoint(names)
    assert names.count("svg") >= 3


def test_a_report_asks_nobody(page: Page) -> None:
    policy = next(a for name, a in page.tags if a.get("http-equiv"))
    assert str(policy["content"]).startswith("default-src 'none'")
    for _, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name not in ("src", "href") or str(value).startswith(("#", "data:"))
    assert re.findall(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", page.text) == []


def test_the_command_writes_the_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "runs/a"]) == 0
    assert main(["report", "a"]) == 0
    assert "report of a in a.html" in capsys.readouterr().out
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    for name in ("b", "runs"):
        assert main(["report", name]) == 2
        assert f"no run {name!r} in 'runs'" in capsys.readouterr().err


def test_of_a_run_that_left_little_there_is_a_report(tmp_path: Path) -> None:
    run = tmp_path / "bare"
    run.mkdir()
    (run / "versions.json").write_text("{}")
    page = Page(make_report(ServedRuns(tmp_path), "bare", now=0.0))
    assert page.headings == ["Errors"]
    assert "graph.json: no such file" in page.words


def test_of_an_episode_its_messages_are_in_the_report(tmp_path: Path) -> None:
    run = watched_run(tmp_path / "a", samples=0)
    table = episode_samples(1, episode_batch(rows=1, turns=2))
    SampleWriter(run / "samples").write(1, table)
    page = Page(make_report(ServedRuns(tmp_path), "a", now=0.0))
    assert "2 turns" in page.words
    assert "tool search: found 0" in page.words
    assert "calls search(query=word 0)" in page.words
