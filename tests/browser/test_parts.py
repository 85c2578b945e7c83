"""A run whose Step is trained in parts, and one whose rows wait for slots."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser, expect

from engine.keep.flow.records import Flow
from engine.keep.flow.segments import read_steps
from engine.protocol.progress import PoolProgress, StreamProgress
from tests.browser.synthetic import FINISHED, Made, make
from tests.browser.watched import watched
from tests.kit.page_client import served
from tests.kit.watched import write_flows
from tests.unit.test_run_progress import POOL, STREAM


def a_run(
    root: Path, name: str, streams: dict[str, StreamProgress], pools: dict[str, PoolProgress]
) -> None:
    """A run whose Steps have these."""
    make(root, Made(name=name, steps=3, ended=FINISHED))
    folder = root / "runs" / name / "events"
    flows: list[Flow] = []
    for record in list(read_steps(folder)):
        if isinstance(record, Flow):
            flows.append(msgspec.structs.replace(record, streams=streams, pools=pools))
    shutil.rmtree(folder)
    write_flows(folder, iter(flows))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("of parts")
    a_run(root, "streamed", {"prompts": STREAM}, {})
    a_run(root, "late", {}, {"rollout": POOL})
    a_run(root, "plain", {}, {})
    return root / "runs"


def test_parts_pools_and_neither(browser: Browser, runs: Path) -> None:
    with served(runs) as server, watched(browser, server) as run_page:
        section = run_page.page.get_by_role("region", name="Rows on their way")
        run_page.go("run", "streamed")
        expect(section).to_contain_text("40 of 64 rows have ended, watermark 312 tokens")
        expect(section).to_contain_text("1 of 3 parts summed")
        rows = section.locator("tbody tr")
        expect(rows).to_have_count(4)
        expect(rows.nth(1)).to_contain_text("training")
        expect(rows.nth(3)).to_contain_text("waits for the watermark")
        run_page.go("run", "late")
        expect(section).to_contain_text("5 rows wait for a slot")
        expect(section.locator("tbody tr").first).to_have_text("gen0989")
        run_page.go("run", "plain")
        expect(run_page.page.locator(".graph")).to_be_visible()
        expect(section).to_be_hidden()
