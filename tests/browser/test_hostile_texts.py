"""What a model or a user's data wrote, and a spoilt file: the rest of the page stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from playwright.sync_api import Browser, Page, expect

from dataflow.snapshot import to_json
from engine.keep.samples import SampleWriter
from tests.browser.watched import watched
from tests.kit.graphs import small_grpo
from tests.kit.page_client import served
from tests.kit.watched import sample_rows, watched_run

DEEP = '[{"role":' + "[" * 30_000
HALF = '[{"role":"user","content":"\\ud800"}]'
ODD = [
    {"role": "user", "content": ["parts"], "tool_calls": 5},
    {"role": "assistant", "content": None, "tool_calls": [None, {"function": {"name": "add"}}]},
]
MANY = [{"role": "user", "content": "again"}] * 70


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    run = watched_run(tmp_path / "a", samples=4, ended={"state": "finished", "reason": "done"})
    (run / "graph.json").write_text(to_json(small_grpo()))
    texts = [DEEP, HALF, json.dumps(ODD), json.dumps(MANY)]
    rows = sample_rows(6, 4)
    for name in ("prompt", "completion"):
        rows = rows.set_column(rows.column_names.index(name), name, pa.array(texts))
    SampleWriter(run / "samples").write(6, rows)
    (run / "samples" / "step_000003.parquet").write_bytes(b"PAR1")
    with served(tmp_path) as server, watched(browser, server) as shown:
        yield shown.go("run", "a")


def test_all_other_samples_are_listed_and_the_damaged_file_is_named(page: Page) -> None:
    expect(page.locator(".samples .damaged")).to_contain_text("step_000003.parquet is damaged")
    expect(page.locator(".samples [role=status]")).to_have_text("20 samples")
    expect(page.locator(".samples .body")).to_contain_text('[{"role":[[[[')
    page.get_by_label("Search samples").fill("ud800")
    expect(page.locator(".samples [role=status]")).to_have_text("1 sample")
    expect(page.locator(".samples .damaged")).to_be_visible()


def test_messages_of_odd_forms_are_shown(page: Page) -> None:
    rows = page.locator(".samples .body .row")
    panel = page.locator("#panel")
    for number, words in enumerate(("[[[[", "ud800", "calls add", "... 70 in all")):
        rows.nth(number).click()
        expect(panel).to_contain_text(words)
