"""The keyboard alone reaches all that the page has."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.watched import Watched

_TABBABLE = """() => {
  const all = document.querySelectorAll("a[href], button, input, select, summary, [tabindex]");
  const open = (e) => e.checkVisibility() && !e.disabled && e.tabIndex >= 0;
  let n = 0;
  for (const each of all) if (open(each)) each.dataset.tab = String((n += 1));
  return n;
}"""
_FOCUSED = "() => document.activeElement?.dataset?.tab ?? null"
_MISSED = """(seen) => [...document.querySelectorAll("[data-tab]")]
  .filter((each) => !seen.includes(each.dataset.tab))
  .map((each) => each.outerHTML.slice(0, 120))"""


def _focused(page: Page) -> str:
    return page.evaluate(
        "() => document.activeElement.dataset.node ?? document.activeElement.dataset.edge ?? ''"
    )


@pytest.mark.parametrize(
    "way",
    [
        (),
        ("run", "steady"),
        ("run", "steady", "sample", "60,train_policy,239,1"),
        ("compare", "steady,fast"),
    ],
)
def test_tab_reaches_every_control(wide: Watched, way: tuple[str, ...]) -> None:
    page = wide.go(*way)
    wide.settle()
    count = page.evaluate(_TABBABLE)
    assert count > 5
    page.evaluate("() => document.activeElement.blur()")
    seen = []
    for _ in range(count + 3):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(_FOCUSED))
    assert page.evaluate(_MISSED, seen) == []


def test_the_skip_link_leads_to_the_content(steady: Page) -> None:
    steady.evaluate("() => document.activeElement.blur()")
    steady.keyboard.press("Tab")
    assert steady.evaluate("() => document.activeElement.className") == "skip"
    steady.keyboard.press("Enter")
    assert steady.evaluate("() => document.activeElement.id") == "main"


def test_arrows_follow_edges_and_enter_looks_inside(steady: Page) -> None:
    expect(steady.locator('g.node[data-node="prompts"]')).to_be_visible()
    steady.keyboard.press("g")
    steady.keyboard.press("Home")
    first = _focused(steady)
    steady.keyboard.press("ArrowDown")
    edge = _focused(steady)
    assert edge.startswith(f"{first}->")
    steady.keyboard.press("ArrowDown")
    assert _focused(steady) == edge.partition("->")[2]
    steady.keyboard.press("ArrowUp")
    assert _focused(steady).endswith(f"->{edge.partition('->')[2]}")
    steady.keyboard.press("ArrowUp")
    steady.keyboard.press("Enter")
    panel = steady.get_by_role("complementary", name="Details")
    expect(panel).to_be_visible()
    steady.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    assert _focused(steady)


def test_rows_of_samples_are_walked_and_opened(steady: Page) -> None:
    expect(steady.locator(".samples .body .row").first).to_be_visible()
    steady.keyboard.press("r")
    steady.keyboard.press("ArrowDown")
    steady.keyboard.press("ArrowDown")
    steady.keyboard.press("Enter")
    expect(steady.locator("#panel .talk")).to_be_visible()
    steady.keyboard.press("Escape")
    expect(steady.locator(":focus")).to_have_attribute("aria-rowindex", "4")


def test_a_question_mark_shows_the_keys(steady: Page) -> None:
    steady.keyboard.press("?")
    dialog = steady.get_by_role("dialog", name="Keys")
    expect(dialog).to_be_visible()
    expect(dialog).to_contain_text("look inside")
    steady.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_letters_typed_into_a_field_are_no_keys(steady: Page) -> None:
    steady.keyboard.press("/")
    steady.keyboard.type("gtw")
    expect(steady.get_by_label("Search samples")).to_have_value("gtw")
    assert steady.evaluate("() => document.documentElement.dataset.theme ?? 'auto'") == "auto"


def test_the_theme_is_kept(steady: Page) -> None:
    steady.get_by_role("button", name="Theme").click()
    steady.get_by_role("button", name="Theme").click()
    assert steady.evaluate("() => document.documentElement.dataset.theme") == "dark"
    steady.reload()
    assert steady.evaluate("() => document.documentElement.dataset.theme") == "dark"
