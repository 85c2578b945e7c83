"""What the page shows of runs that have ended, from their folders alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from dataflow.snapshot import from_json
from tests.browser.synthetic import SCRIPT
from tests.browser.watched import Watched

AXIS = ".axis .track"


def _answer(page: Page, path: str) -> dict:
    return page.evaluate("(path) => fetch(path).then((answer) => answer.json())", path)


def _select(page: Page, first: int, last: int) -> None:
    page.get_by_label("First Step selected").fill(str(first))
    page.get_by_label("Last Step selected").fill(str(last))
    page.get_by_label("Last Step selected").press("Enter")


def test_the_list_of_runs_has_all_and_opens_one(wide: Watched) -> None:
    page = wide.go()
    rows = page.locator(".runs tbody tr")
    expect(rows).to_have_count(4)
    expect(rows.filter(has_text="steady")).to_contain_text("60 of 60")
    expect(rows.filter(has_text="lost")).to_contain_text("ended without a word")
    page.get_by_role("link", name="steady").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("steady")


def test_the_graph_is_drawn_with_each_node_and_edge(steady: Page, runs: Path) -> None:
    graph = from_json((runs / "steady" / "graph.json").read_text())
    for node in graph.nodes:
        expect(steady.locator(f'g.node[data-node="{node.name}"]')).to_be_visible()
    drawn = {(p.node.name, node.name) for node in graph.nodes for p in node.inputs.values()}
    expect(steady.locator("g.edge.data")).to_have_count(len(drawn))


def test_what_the_plan_leaves_out_and_what_goes_beside_an_edge(steady: Page, runs: Path) -> None:
    planned = json.loads((runs / "steady" / "plan.json").read_text())
    assert "reference" not in {node["name"] for node in planned["nodes"]}
    left_out = steady.locator('g.node[data-node="reference"]')
    expect(left_out).to_contain_text("left out, nothing reads it")
    steady.locator('g.edge[data-edge="rollout->score"]').focus()
    steady.keyboard.press("Enter")
    steady.locator("#panel .beside button").click()
    expect(steady.locator("#panel h2")).to_contain_text("prompts \u2192 score")
    expect(steady.locator("#panel")).to_contain_text("answer")


def test_a_node_shows_what_it_did_and_what_bounds_the_step(steady: Page) -> None:
    trained = steady.locator('g.node[data-node="train_policy"]')
    trained.scroll_into_view_if_needed()
    expect(trained).to_contain_text(re.compile(r"no rows \d+ %"))
    expect(steady.locator('g.node[data-node="score"]')).to_contain_text(re.compile(r"busy \d+ %"))
    expect(steady.locator("g.node.critical").filter(has_text="score")).to_have_count(1)
    expect(steady.locator('g.edge[data-edge="rollout->score"]')).to_contain_text("14 rows")


def test_the_first_sentence_says_who_waits_for_whom(steady: Page) -> None:
    first, *_ = _answer(steady, "/api/runs/steady/flow?from=1&to=60")["sentences"]
    expect(steady.locator(".said .first")).to_have_text(f"{first}.")
    assert re.match(r"train_policy waits \d+ % for score", first)


def test_an_edge_shows_its_schema_and_its_rows(steady: Page) -> None:
    steady.locator('g.edge[data-edge="rollout->score"]').focus()
    steady.keyboard.press("Enter")
    panel = steady.get_by_role("complementary", name="Details")
    expect(panel.get_by_role("heading", level=2)).to_contain_text("rollout")
    expect(panel.get_by_role("region", name="Newest rows").locator("tbody tr")).to_have_count(16)
    expect(panel).to_contain_text("completion_ids")
    expect(panel).to_contain_text("the recorded samples, Step 60")


def test_a_node_shows_its_parameters_estimate_log_and_errors(wide: Watched) -> None:
    page = wide.go("run", "broken", "node", "score")
    panel = page.get_by_role("complementary", name="Details")
    for words in ("grpo.py:", "estimate", "measured", "step 23 is done"):
        expect(panel).to_contain_text(words)
    expect(panel).to_contain_text("LookupError: a prompt that begins with a")
    expect(panel).to_contain_text("position 92, sample 0, attempt 0")


def test_replicas_are_folded_in_the_graph_and_listed_in_the_panel(steady: Page) -> None:
    expect(steady.locator('g.node[data-node="rollout"]')).to_have_count(1)
    steady.locator('g.node[data-node="rollout"]').click()
    expect(steady.locator("#panel .replica")).to_have_count(3)
    expect(steady.locator("#panel")).to_contain_text("waited for train_policy")


def test_a_selection_of_steps_reaches_every_view(steady: Page) -> None:
    expect(steady.locator("#figures-of")).to_have_text("Figures of all 60 Steps")
    expect(steady.locator(".samples [role=status]")).to_have_text("960 samples")
    _select(steady, 11, 20)
    expect(steady.locator("#figures-of")).to_have_text("Figures of Steps 11 to 20")
    expect(steady.locator(".samples [role=status]")).to_have_text("160 samples of Steps 11 to 20")
    expect(steady.locator(".lane .band").first).to_be_visible()
    steady.locator("main").press("Escape")
    expect(steady.locator("#figures-of")).to_have_text("Figures of all 60 Steps")


def test_a_brush_over_a_curve_selects_steps_and_a_double_click_clears(steady: Page) -> None:
    plot = steady.locator(f"{AXIS} .u-over").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    x, y = box["x"], box["y"] + 20
    steady.mouse.move(x + box["width"] * 0.25, y)
    steady.mouse.down()
    steady.mouse.move(x + box["width"] * 0.5, y, steps=4)
    steady.mouse.up()
    expect(steady.get_by_label("First Step selected")).to_have_value(re.compile(r"1[4-7]"))
    expect(steady.get_by_label("Last Step selected")).to_have_value(re.compile(r"(29|3[0-2])"))
    steady.mouse.dblclick(x + 40, y)
    expect(steady.get_by_label("First Step selected")).to_have_value("")


def test_curves_zoom_to_the_selection_and_back(steady: Page) -> None:
    _select(steady, 11, 20)
    with steady.expect_response(re.compile(r"/series\?.*from=11.*to=20")):
        steady.get_by_role("button", name="Zoom to it").click()
    steady.get_by_role("button", name="All Steps (now 11 to 20)").click()
    expect(steady.get_by_role("button", name="All Steps")).to_be_disabled()


def test_metrics_can_be_searched_and_chosen(steady: Page) -> None:
    expect(steady.locator(f"{AXIS} h3").first).to_have_text("Reward")
    steady.get_by_role("button", name="Metrics").click()
    steady.get_by_label("Search metrics").fill("grad_norm")
    steady.get_by_label("optim/grad_norm").check()
    expect(steady.locator(AXIS).filter(has_text="optim/grad_norm")).to_have_count(1)


def test_what_a_model_wrote_is_text(wide: Watched) -> None:
    page = wide.go("run", "steady", "sample", "60,train_policy,239,1")
    expect(page.locator("#panel .assistant .body")).to_contain_text(SCRIPT)
    expect(page.locator(".samples .body")).to_contain_text(SCRIPT)
    assert page.locator("main script, aside script").count() == 0


def test_a_sample_is_a_conversation_with_coloured_tokens_and_its_group(wide: Watched) -> None:
    page = wide.go("run", "steady", "sample", "60,train_policy,239,1")
    panel = page.locator("#panel")
    expect(panel.locator(".talk > li")).to_have_count(5)
    expect(panel.get_by_text("calls add")).to_be_visible()
    expect(panel.locator(".token.below")).to_have_count(len(SCRIPT))
    marks = panel.locator(".version-mark")
    expect(marks.first).to_have_attribute("data-version", "v59")
    expect(marks.last).to_have_attribute("data-version", "v60")
    panel.get_by_label("Colour tokens by").select_option("difference")
    expect(panel.locator(".token.above").first).to_be_visible()
    expect(panel.locator(".near").first.locator("button")).to_have_count(4)
    panel.locator(".near").first.locator("button").first.click()
    expect(panel.get_by_role("heading", level=2)).to_contain_text("sample")
    panel.get_by_text(re.compile(r"All \d+ tokens as a table")).click()
    expect(panel.get_by_role("region", name="Tokens").locator("tbody tr").first).to_be_visible()


def test_samples_are_searched_filtered_and_ordered(steady: Page) -> None:
    steady.get_by_label("Search samples").fill("alert(1)")
    expect(steady.locator(".samples [role=status]")).to_have_text("4 samples")
    steady.get_by_label("Search samples").fill("")
    steady.get_by_label("Order").select_option("best")
    best = _answer(steady, "/api/runs/steady/samples?order=best&limit=1")["rows"][0]
    expect(steady.locator(".samples .body .row").first).to_contain_text(best["completion"][:30])
    steady.get_by_label("Samples of Step").fill("7")
    expect(steady.locator(".samples [role=status]")).to_have_text("16 samples")


def test_of_many_samples_only_those_in_sight_are_elements(steady: Page) -> None:
    expect(steady.locator(".samples [role=status]")).to_have_text("960 samples")
    assert steady.locator(".samples .body .row").count() < 40
    steady.locator(".samples .list").evaluate("(list) => (list.scrollTop = list.scrollHeight)")
    expect(steady.locator('.samples .body .row[aria-rowindex="961"]')).to_be_visible()
    assert steady.locator(".samples .body .row").count() < 40


@pytest.mark.parametrize(
    "name, words",
    [
        ("broken", "KernelError: score: LookupError: a prompt that begins with a"),
        ("lost", "ended without a word"),
    ],
)
def test_a_broken_run_says_how_it_ended(wide: Watched, name: str, words: str) -> None:
    page = wide.go("run", name)
    expect(page.locator(".how")).to_contain_text(words)
    expect(page.locator(".track").first).to_be_visible()


def test_two_runs_are_compared(wide: Watched) -> None:
    page = wide.go()
    page.get_by_label("Compare steady").check()
    page.get_by_label("Compare fast").check()
    page.get_by_role("button", name="Compare 2 runs").click()
    expect(page.locator(".run-keys li")).to_have_count(2)
    expect(page.get_by_role("region", name="First difference")).to_contain_text("Step 1")
    expect(page.locator("main")).to_contain_text("lr: 0.001 -> 0.002")
    expect(page.locator(f"{AXIS} .lines li").first).to_be_visible()
    expect(page.locator(f"{AXIS} canvas").nth(5)).to_be_attached()  # some come later


def test_an_unknown_run_is_told(wide: Watched) -> None:
    wide.away = True  # the browser notes the answer 404 on its console
    page = wide.page
    page.goto(f"{wide.server.base}#/run/nothing")
    expect(page.locator("main")).to_contain_text("cannot be opened")
    wide.faults = [fault for fault in wide.faults if "404" not in fault]


def test_no_rule_of_the_page_needs_an_inline_style(steady: Page) -> None:
    """The page would work under a policy without 'unsafe-inline'."""
    assert steady.locator("style").count() == 0
