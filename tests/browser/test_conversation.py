"""An episode in the page: a conversation by turns, all of it text, and quick if it is long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from playwright.sync_api import Browser, Page, expect

from dataflow.snapshot import to_json
from engine.keep.samples import SampleWriter
from tests.browser.axe import serious_faults
from tests.browser.watched import NARROW, Watched, watched
from tests.kit.episodes import episode_batch, episode_samples
from tests.kit.graphs import small_grpo
from tests.kit.page_client import served
from tests.kit.watched import watched_run

SCRIPT = "<script>document.title = 'taken'</script><img src=x onerror=alert(1)>"
LONG_TURNS = 150


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two Steps of episodes: short ones, and one of very many turns."""
    folder = tmp_path_factory.mktemp("episodes")
    run = watched_run(folder / "a", samples=0, ended={"state": "finished", "reason": "done"})
    (run / "graph.json").write_text(to_json(small_grpo()))
    writer = SampleWriter(run / "samples")
    writer.write(1, with_scripts(episode_samples(1, episode_batch(rows=4, turns=3))))
    many = episode_batch(rows=1, turns=LONG_TURNS, longest=200)
    writer.write(2, episode_samples(2, many, full=True))
    return folder


def with_scripts(table: pa.Table) -> pa.Table:
    """What everybody says is HTML that would act if it were one."""
    texts: list[str] = []
    for text in table.column("messages").to_pylist():
        messages = json.loads(text)
        for message in messages:
            message["content"] += SCRIPT
        messages[2]["tool_calls"][0]["function"]["arguments"]["query"] = SCRIPT
        texts.append(json.dumps(messages))
    place = table.column_names.index("messages")
    return table.set_column(place, "messages", pa.array(texts))


@pytest.fixture
def shown(browser: Browser, root: Path) -> Iterator[Watched]:
    with served(root) as server, watched(browser, server) as page:
        yield page


def open_sample(shown: Watched, key: str) -> Page:
    page = shown.go("run", "a", "sample", key)
    expect(page.locator("#panel .conversation")).to_be_visible()
    return page


def test_each_turn_says_who_wrote_it_and_what_it_took(shown: Watched) -> None:
    page = open_sample(shown, "1,train_policy,10,0")
    talk = page.locator("#panel .talk > li")
    expect(talk).to_have_count(7)
    heads = ["system", "user", "turn 1, assistant", "tool search", "turn 2, assistant"]
    for place, words in enumerate(heads):
        expect(talk.nth(place).locator(".who")).to_have_text(words)
    expect(talk.nth(2)).to_contain_text("model ")
    expect(talk.nth(2)).to_contain_text("environment ")
    expect(talk.nth(4)).to_contain_text("reward +")
    expect(talk.nth(2).locator(".call")).to_contain_text("calls search")
    expect(talk.nth(2).locator(".call dt")).to_have_text("query")
    facts = page.get_by_role("region", name="Episode").or_(page.locator("#panel section").nth(1))
    expect(facts).to_contain_text("final reward")
    expect(facts).to_contain_text("words_left")


def test_what_anybody_says_is_text(shown: Watched) -> None:
    page = open_sample(shown, "1,train_policy,10,0")
    expect(page.locator("#panel .talk .body").nth(2)).to_have_text(f"turn 0 says so{SCRIPT}")
    expect(page.locator("#panel .call dd").first).to_have_text(SCRIPT)
    assert page.locator("#panel script, #panel img").count() == 0
    assert page.title() != "taken"


def test_tokens_of_a_turn_come_when_they_are_opened(shown: Watched) -> None:
    page = open_sample(shown, "1,train_policy,10,0")
    turn = page.locator("#panel .talk > li").nth(2)
    assert page.locator("#panel .token").count() == 0
    turn.get_by_text("6 tokens").click()
    expect(turn.locator(".token")).to_have_count(6)
    expect(turn.locator(".token.unmasked")).to_have_count(0)
    answer = page.locator("#panel .talk > li").nth(3)
    answer.get_by_text("1 token").click()
    expect(answer.locator(".token.unmasked")).to_have_count(1)


def test_all_tokens_have_marks_of_turns(shown: Watched) -> None:
    page = open_sample(shown, "1,train_policy,10,0")
    whole = page.locator("#panel section", has=page.get_by_role("heading", name="Tokens"))
    whole.locator("summary").click()
    marks = whole.locator(".turn-mark")
    expect(marks).to_have_count(3)
    expect(marks.first).to_have_attribute("data-turn", "turn 1")
    expect(whole.locator(".token.unmasked").first).to_be_visible()


def test_of_a_long_episode_a_page_is_shown_at_a_time(shown: Watched) -> None:
    page = open_sample(shown, "2,train_policy,10,0")
    talk = page.locator("#panel .talk > li")
    expect(talk).to_have_count(40)
    total = 2 + 2 * LONG_TURNS - 1
    pager = page.get_by_role("group", name="Messages").first
    expect(pager).to_contain_text(f"Messages 1 to 40 of {total}")
    pager.get_by_role("button", name="Last").click()
    expect(pager).to_contain_text(f"to {total} of {total}")
    expect(talk.last.locator(".who")).to_have_text(f"turn {LONG_TURNS}, assistant")
    page.get_by_role("button", name="First").first.click()
    expect(talk.first.locator(".who")).to_have_text("system")


def test_tokens_of_a_long_episode_come_in_parts(shown: Watched) -> None:
    page = open_sample(shown, "2,train_policy,10,0")
    whole = page.locator("#panel section", has=page.get_by_role("heading", name="Tokens"))
    whole.locator("summary").first.click()
    expect(whole.locator(".token")).to_have_count(2000)
    expect(whole.get_by_label("Colour tokens by").first).to_be_visible()
    whole.get_by_role("button", name="more tokens").click()
    expect(whole.locator(".token")).to_have_count(4000)


def test_the_list_of_samples_tells_how_many_turns_there_were(shown: Watched) -> None:
    page = shown.go("run", "a")
    expect(page.locator(".samples .body .row").first).to_contain_text(f"{LONG_TURNS} turns")


def test_a_conversation_can_be_read_by_all_and_is_no_wider_than_a_narrow_screen(
    browser: Browser, root: Path
) -> None:
    with served(root) as server, watched(browser, server, width=NARROW, scheme="dark") as shown:
        page = open_sample(shown, "1,train_policy,10,0")
        page.locator("#panel .talk summary").first.click()
        shown.settle()
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW
        assert serious_faults(shown) == []
