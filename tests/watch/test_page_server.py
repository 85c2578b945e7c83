"""`dataflow watch`: every question that the page asks, of runs in any state."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataflow.snapshot import to_json
from engine.keep.flow.records import Tombstones
from engine.keep.flow.segments import LiveSegments, StepSegments
from engine.keep.run_folder import RunFolder
from tests.kit.graphs import small_grpo
from tests.kit.page_client import PageClient, served
from tests.kit.processes import ended
from tests.kit.watched import SMALL, flow, watched_run

DONE = {"state": "finished", "reason": "all steps are done"}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageClient]:
    root = tmp_path_factory.mktemp("runs")
    watched_run(root / "done", ended=DONE)
    watched_run(root / "old", events=False, samples=0, ended={"state": "failed", "reason": "no"})
    (root / "done" / "graph.json").write_text(to_json(small_grpo()))
    rows = Tombstones(step=6, wall=1.0, node="score", keys=[(4, 1, 0)], error="ValueError: \x1b")
    segments = StepSegments(root / "done" / "events")
    segments.write(rows)
    segments.close()
    broken = watched_run(root / "broken", steps=2)
    for name in ("plan.json", "options.json", "ended.json", "graph.json"):
        (broken / name).write_text('{"half')
    with open(broken / "metrics.jsonl", "a") as file:
        file.write('no row\n{"step": 3, "reward/mea')
    (broken / "samples" / "step_000002.parquet").write_bytes(b"PAR1 no table")
    with open(broken / "events" / "steps-000001.seg", "ab") as file:
        file.write(b"\x10\0\0\0torn")
    with served(root) as client:
        yield client


def test_all_runs_are_listed_with_their_ends(page: PageClient) -> None:
    runs = {run["name"]: run for run in page.json("/api/runs")}
    assert {name: run["state"] for name, run in runs.items()} == {
        "done": "finished", "old": "failed", "broken": "ended"
    }  # fmt: skip
    assert (runs["done"]["step"], runs["done"]["steps"], runs["done"]["reward"]) == (6, 6, 0.6)
    assert runs["old"]["reason"] == "no"


def test_a_run_is_described(page: PageClient) -> None:
    run = page.json("/api/runs/done")
    assert [node["name"] for node in run["nodes"]] == ["rollout", "score", "train_policy"]
    assert run["edges"][0]["id"] == "rollout->score"
    assert run["nodes"][0]["estimate"] == {
        "bytes": {"outbox": 1000}, "total": 1000, "seconds": 0.5
    }  # fmt: skip
    assert run["workers"][0] == {"name": "gen", "host": "", "devices": [], "nodes": ["rollout"]}
    assert run["metrics"] == ["loss/x", "reward/mean"]
    score = next(node for node in run["nodes"] if node["name"] == "score")
    assert score["call"].startswith("reward(")


def test_the_drawing_is_the_products_own(page: PageClient) -> None:
    answer = page.ask("/api/runs/done/drawing")
    assert answer.headers["content-type"].startswith("image/svg+xml")
    assert b"<svg" in answer.body
    assert b"train_policy" in answer.body


def test_curves_have_the_steps_that_are_asked_for(page: PageClient) -> None:
    found = page.json("/api/runs/done/series?names=reward/mean,none&from=2&to=3")
    assert found == {
        "steps": [2, 3],
        "series": {"reward/mean": [0.2, 0.3], "none": [None, None]},
    }


def test_flows_of_several_steps_are_added(page: PageClient) -> None:
    last = page.json("/api/runs/done/flow")
    assert last["flow"]["step"] == 6
    assert last["sentences"][0] == "train_policy waits 75 % for score"
    assert last["critical"] == ["score", "train_policy"]
    assert last["plan"]["score@data"] == 1000
    three = page.json("/api/runs/done/flow?from=2&to=4")["flow"]
    assert three["step"] == 4
    assert three["nodes"]["score@data"]["rows"] == 48
    assert page.json("/api/runs/done/flow?from=90")["flow"] is None


def test_lanes_add_up_to_the_whole_time(page: PageClient) -> None:
    lanes = page.json("/api/runs/done/lanes?points=3")["workers"]
    assert set(lanes) == {"gen", "data", "train"}
    assert lanes["gen"]["steps"] == [2, 4, 6]
    assert lanes["gen"]["busy"]["rollout"] == pytest.approx([0.3] * 3, abs=1e-4)
    assert lanes["train"]["waits"] == pytest.approx([0.75] * 3, abs=1e-4)
    for lane in lanes.values():
        shares = [*lane["busy"].values(), lane["waits"], lane["idle"]]
        assert [sum(each) for each in zip(*shares, strict=True)] == pytest.approx([1.0] * 3)


def test_samples_in_every_order(page: PageClient) -> None:
    def keys(query: str) -> list[tuple[int, int]]:
        rows = page.json(f"/api/runs/done/samples?{query}")["rows"]
        return [(row["step"], round(row["reward"] * 10)) for row in rows]

    assert [step for step, _ in keys("limit=5")] == [6, 6, 6, 6, 5]
    assert keys("order=best&limit=1")[0][1] == 9
    assert keys("order=worst&limit=1")[0][1] == 1
    assert {step for step, _ in keys("step=3")} == {3}
    assert keys("order=mismatch") == []
    assert page.json("/api/runs/done/samples?finish=length")["total"] == 12
    assert page.json("/api/runs/done/samples?node=nobody")["total"] == 0


def test_samples_are_searched_whatever_their_case(page: PageClient) -> None:
    found = page.json("/api/runs/done/samples?q=GAMMA&limit=2&offset=1")
    assert (found["total"], len(found["rows"])) == (6, 2)
    assert all(row["completion"].startswith("gamma") for row in found["rows"])
    assert page.json("/api/runs/done/samples?q=(x")["total"] == 0


def test_a_sample_in_full_its_group_and_equal_prompts(page: PageClient) -> None:
    key = "step=3&node=train_policy&position=6"
    row = page.json(f"/api/runs/done/sample?{key}&sample=1")
    assert row["completion"] == "gamma <script>3.2</script>"
    assert [token["id"] for token in row["tokens"]] == [1, 2, 3]
    group = page.json(f"/api/runs/done/group?{key}")["rows"]
    assert [(r["position"], r["sample"]) for r in group] == [(6, 0), (6, 1)]
    same = page.json(f"/api/runs/done/same?{key}")
    assert (same["total"], {r["prompt"] for r in same["rows"]}) == (12, {"always"})
    assert page.ask(f"/api/runs/done/sample?{key}&sample=9").status == 404


def test_an_edge_shows_rows(page: PageClient) -> None:
    edge = page.json("/api/runs/done/edge?id=rollout-%3Escore")
    assert (edge["from"], edge["step"], edge["bytes_per_row"]) == ("samples", 6, 100)
    assert edge["columns"] == [{"name": "completion", "type": "string"}]
    assert edge["rows"][0]["completion"] == "alpha <script>6.0</script>"
    assert page.ask("/api/runs/done/edge?id=a-%3Eb").status == 404


def test_a_node_has_its_errors_and_its_log(page: PageClient) -> None:
    node = page.json("/api/runs/done/node/score")
    assert node["errors"][0]["key"] == [4, 1, 0]
    assert node["errors"][0]["error"] == "ValueError: \\x1b"
    assert page.json("/api/runs/done/node/rollout")["log"] == ["one", "red \\x1b[31m line"]
    assert page.json("/api/runs/done/node/rollout")["measured"]["bytes"] == 2 << 20
    assert page.json("/api/runs/done/log?worker=gen&lines=1")["lines"] == ["red \\x1b[31m line"]
    assert page.ask("/api/runs/done/log?worker=nobody").status == 404


def test_an_old_run_has_no_events_and_no_samples(page: PageClient) -> None:
    assert page.json("/api/runs/old/flow")["flow"] is None
    assert page.json("/api/runs/old/lanes") == {"workers": {}}
    assert page.json("/api/runs/old/samples")["total"] == 0
    assert page.json("/api/runs/old/edge?id=rollout-%3Escore")["rows"] == []
    assert page.json("/api/runs/old/node/rollout")["figures"] == {}
    assert page.ask("/api/runs/old/drawing").status == 404


def test_of_a_broken_run_all_that_is_whole_is_shown(page: PageClient) -> None:
    run = page.json("/api/runs/broken")
    assert len(run["problems"]) == 2
    assert page.json("/api/runs/broken/series?names=reward/mean")["steps"] == [1, 2]
    assert page.json("/api/runs/broken/flow")["flow"]["step"] == 2
    assert page.json("/api/runs/broken/samples")["total"] == 4


def test_runs_are_compared(page: PageClient) -> None:
    found = page.json("/api/compare?runs=done,old,broken")
    assert found["runs"] == ["done", "old", "broken"]
    assert found["first"] is None
    steps = {"option": "--steps", "values": {"done": 6, "old": 6, "broken": None}}
    assert steps in found["options"]
    assert page.ask("/api/compare?runs=done").status == 400


@pytest.mark.parametrize(
    "query",
    ["series?from=x", "series?to=-1", "samples?order=up", "sample?step=1", "lanes?from=1e3"],
)
def test_wrong_questions_are_answered_by_what_was_expected(page: PageClient, query: str) -> None:
    answer = page.ask(f"/api/runs/done/{query}")
    assert answer.status == 400
    assert "expected" in answer.json()["error"]


def test_a_stream_shows_what_changes(tmp_path: Path) -> None:
    run = watched_run(tmp_path / "live", steps=2)
    with served(tmp_path) as page, page.stream("live") as events:
        first = dict(next(events) for _ in range(3))
        assert first["state"] == {"state": "ended", "reason": "", "step": 2}
        assert first["step"]["metrics"]["reward/mean"] == 0.2
        assert first["flow"]["sentences"][0] == "train_policy waits 75 % for score"
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"step": 3, "reward/mean": null}\n')
        assert next(data for kind, data in events if kind == "step")["step"] == 3
        live = LiveSegments(run / "events")
        live.write(flow(3, wall=2e9))
        live.close()
        assert next(data for kind, data in events if kind == "flow")["flow"]["wall"] == 2e9
        (run / "ended.json").write_text(json.dumps(DONE))
        said = next(data for kind, data in events if kind == "state" and data["state"] != "ended")
        assert said == {**DONE, "step": 3}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_open_streams(tmp_path: Path, number: int) -> None:
    watched_run(tmp_path / "a", steps=1)
    with served(tmp_path) as page, page.stream("a") as events:
        next(events)
        page.process.send_signal(number)
        assert page.process.wait(20) == 0
        assert page.process.stderr is not None
        assert page.process.stderr.read() == ""


def test_its_url_is_of_loopback_and_the_run_that_is_named_opens_first(tmp_path: Path) -> None:
    watched_run(tmp_path / "a", steps=1)
    with served(tmp_path, tmp_path / "a") as page:
        answer = page.ask(f"/?token={page.token}")
        assert (answer.status, answer.headers["location"]) == (303, "/#a")
        listening = Path(f"/proc/{page.process.pid}/net/tcp").read_text()
        assert f"0100007F:{page.port:04X} 00000000:0000 0A" in listening
        assert ended(page.process.pid, 0) is False


def test_running_runs_are_told_to_prometheus(tmp_path: Path) -> None:
    run = watched_run(tmp_path / "busy", steps=3)
    watched_run(tmp_path / "done", steps=3, ended=DONE)
    with RunFolder.open_existing(run), served(tmp_path) as page:
        assert page.json("/api/runs/busy")["state"] == "running"
        answer = page.ask("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        text = answer.body.decode()
        assert 'dataflow_step{graph="small",run="busy"} 3.0' in text
        assert "done" not in text
        (run / "metrics.jsonl").rename(run / "moved")
        os.mkfifo(run / "metrics.jsonl")
        assert "busy" not in page.ask("/metrics").body.decode()


def test_plans_that_are_no_plans_are_problems(tmp_path: Path) -> None:
    run = watched_run(tmp_path / "a", steps=1)
    with served(tmp_path) as page:
        for text in ("[]", "{}", '{"phases": 3}', '{"nodes": [{"name": 1}]}', json.dumps([SMALL])):
            (run / "plan.json").write_text(text)
            os.utime(run / "plan.json", ns=(1, len(text)))
            assert page.ask("/api/runs/a").status == 200
            assert page.ask("/api/runs/a/flow").status == 200
            assert page.ask("/api/runs/a/node/rollout").status == 404
