"""A run that goes on: its numbers move, and a server that was away comes back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, expect

from engine.plan.options import RunOptions
from tests.browser.watched import Watched, watched
from tests.kit.killable_run import killable_run
from tests.kit.page_client import served
from tests.kit.processes import go_on, wait_for
from tests.kit.tiny_runs import save_tiny_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    save_tiny_inputs(folder)
    return folder


def _step(fact: Locator) -> int:
    words = fact.inner_text()
    match = re.search(r"Step (\d+)", words)
    assert match is not None, words
    return int(match[1])


@pytest.fixture
def live(browser: Browser, inputs: Path, tmp_path: Path) -> Iterator[tuple[Watched, object]]:
    """A page of a real run in a process of its own, held after its second Step."""
    options = RunOptions(steps=2000, runs=tmp_path, name="now", threads=1, progress=False)
    with killable_run("small", inputs, options, "hold=2") as process:
        wait_for(process, "step 2")
        with served(tmp_path) as server, watched(browser, server) as live_page:
            live_page.go("run", "now")
            yield live_page, process


def test_counters_move_while_a_run_goes_on(live) -> None:
    live_page, process = live
    page = live_page.page
    fact = page.locator(".headline .fact").first
    expect(page.locator(".pill")).to_have_text("running")
    expect(fact).to_contain_text("Step 2 of")
    go_on(process)
    expect(fact).not_to_contain_text("Step 2 of", timeout=20_000)
    seen = _step(fact)
    expect(fact).not_to_contain_text(f"Step {seen} of")
    assert _step(fact) > seen > 2
    expect(page.locator(".track").first).to_be_visible()
    expect(page.get_by_role("button", name="Live")).to_have_attribute("aria-pressed", "true")
    process.terminate()
    expect(page.locator(".pill")).to_have_text("interrupted", timeout=30_000)
    expect(page.locator(".how")).to_contain_text("interrupted")


def test_a_page_finds_its_server_again(browser: Browser, live, tmp_path: Path) -> None:
    """Killed, and started anew with another token: its new address in any tab is enough."""
    live_page, process = live
    page = live_page.page
    fact = page.locator(".headline .fact").first
    expect(fact).to_contain_text("Step 2 of")
    live_page.away = True
    live_page.server.process.kill()
    live_page.server.process.wait()
    banner = page.get_by_role("status").filter(has_text="does not answer")
    expect(banner).to_be_visible(timeout=15_000)
    expect(page.locator(".said .first")).to_be_visible()
    with served(tmp_path, "--port", live_page.server.port) as again:
        expect(page.locator("#banner")).to_contain_text("another token", timeout=15_000)
        page.context.new_page().goto(again.entry)
        expect(page.locator("#banner")).to_be_hidden(timeout=15_000)
        go_on(process)
        expect(fact).not_to_contain_text("Step 2 of")
