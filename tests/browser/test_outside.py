"""A node that waits for environments, with episodes in flight, in the page's graph and panel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect

from dataflow.snapshot import to_json
from engine.keep.flow.records import Flow, ReplicaFlow
from tests.browser.watched import watched
from tests.kit.graphs import small_grpo
from tests.kit.page_client import served
from tests.kit.watched import flow, watched_run, write_flows


def waiting_flow(step: int) -> Flow:
    usual = flow(step)
    rollout = ReplicaFlow(
        busy=0.3, for_outside=0.7, outside={"environments": 0.7}, in_flight=12, rows=16
    )
    return msgspec.structs.replace(usual, nodes=usual.nodes | {"rollout@gen": rollout})


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """Of two runs, in the first of which rollout waits for environments."""
    for name in ("waits", "usual"):
        ended = {"state": "finished", "reason": "done"}
        run = watched_run(tmp_path / name, samples=0, events=name == "usual", ended=ended)
        (run / "graph.json").write_text(to_json(small_grpo()))
    write_flows(tmp_path / "waits" / "events", (waiting_flow(step) for step in range(1, 7)))
    with served(tmp_path) as server, watched(browser, server) as shown:
        yield shown.go("run", "waits")


def test_the_graph_shows_the_wait_and_what_is_in_flight(page: Page) -> None:
    rollout = page.locator('g.node[data-node="rollout"]')
    expect(rollout).to_contain_text("outside 70 %")
    expect(rollout).to_contain_text("12 live")
    expect(page.locator(".legend .of-outside")).to_be_visible()
    expect(page.locator(".said")).to_contain_text("rollout waits 70 % for environments")
    rollout.click()
    panel = page.locator("#panel")
    expect(panel).to_contain_text("waited for environments")
    expect(panel).to_contain_text("12 rows in flight")


def test_a_run_that_waits_for_nothing_outside_has_no_such_line_in_its_legend(page: Page) -> None:
    page.goto(page.url.replace("waits", "usual"))
    expect(page.locator('g.node[data-node="rollout"]')).to_contain_text("no room 70 %")
    expect(page.locator(".legend .of-outside")).to_be_hidden()
