"""What the page's server answers about episodes: their turns, messages and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.keep.reader.sample_rows import PART
from engine.keep.samples import SampleWriter
from tests.kit.episodes import episode_batch, episode_samples
from tests.kit.page_client import PageClient, served
from tests.kit.watched import sample_rows, watched_run

ROWS = episode_batch(rows=4, turns=3)
LONG = episode_batch(rows=1, turns=120, longest=60)
KEY = "node=train_policy&position=10&sample=0"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageClient]:
    """Step 1 has episodes, Step 2 a long one in full, Step 3 rows that are none."""
    root = tmp_path_factory.mktemp("episodes")
    run = watched_run(root / "a", samples=0)
    writer = SampleWriter(run / "samples")
    writer.write(1, episode_samples(1, ROWS))
    writer.write(2, episode_samples(2, LONG, full=True))
    writer.write(3, sample_rows(3, 2))
    with served(root) as client:
        yield client


def asked(page: PageClient, question: str, step: int, more: str = "") -> Any:
    return page.json(f"/api/runs/a/{question}?step={step}&{KEY}{more}")


def test_a_sample_that_is_an_episode_has_its_first_messages_and_no_tokens(page: PageClient) -> None:
    sample = asked(page, "sample", 1)
    assert sample["tokens"] is None
    assert sample["episode"]["turns"] == 3
    assert len(sample["episode"]["page"]["messages"]) == 7
    assert sample["others"] == {}
    listed = page.json("/api/runs/a/samples?step=1")["rows"]
    turns = {(row["position"], row["sample"]): row["turns"] for row in listed}
    keys = [(position, sample) for position, sample, _ in ROWS.keys.rows()]
    assert [turns[key] for key in keys] == ROWS.lengths("turn_end").tolist()


def test_other_samples_are_as_they_were(page: PageClient) -> None:
    sample = page.json("/api/runs/a/sample?step=3&node=train_policy&position=6&sample=0")
    assert "episode" not in sample
    assert [token["id"] for token in sample["tokens"]] == [1, 2, 3]
    assert "turn" not in sample["tokens"][0]


def test_messages_come_in_pages(page: PageClient) -> None:
    first = asked(page, "conversation", 2)
    assert (first["from"], first["total"], len(first["messages"])) == (0, 241, 40)
    last = asked(page, "conversation", 2, "&from=240")
    assert [message["turn"] for message in last["messages"]] == [119]
    answer = page.ask("/api/runs/a/conversation?step=3&node=train_policy&position=6&sample=0")
    assert answer.status == 404
    assert "is no episode" in answer.json()["error"]


def test_tokens_come_in_parts_with_their_turns(page: PageClient) -> None:
    turns = LONG.ragged("turn")[0].tolist()
    ids = LONG.ragged("completion_ids")[0].tolist()
    part = asked(page, "tokens", 2)
    assert (part["total"], len(part["tokens"])) == (len(ids), PART)
    assert [token["turn"] for token in part["tokens"]] == turns[:PART]
    some = asked(page, "tokens", 2, "&from=30&to=50")["tokens"]
    assert [token["id"] for token in some] == ids[30:50]
    assert [token["turn"] for token in some] == turns[30:50]
    assert all(token["difference"] is not None for token in some)
    assert asked(page, "tokens", 2, f"&from={len(ids)}")["tokens"] == []


def test_a_brief_sample_knows_the_turns_of_its_tokens(page: PageClient) -> None:
    tokens = asked(page, "tokens", 1)["tokens"]
    assert [token["turn"] for token in tokens] == ROWS.ragged("turn")[0].tolist()
    assert [token["mask"] for token in tokens] == ROWS.ragged("completion_mask")[0].tolist()


def test_a_key_without_a_sample_is_refused(page: PageClient) -> None:
    answer = page.ask("/api/runs/a/tokens?step=1&node=train_policy&position=10")
    assert answer.status == 400
    assert page.ask("/api/runs/a/tokens?step=9&" + KEY).status == 404
