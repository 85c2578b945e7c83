"""The figures of runs as Prometheus reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from engine.keep.flow.records import (
    CutFlow,
    EdgeFlow,
    Flow,
    Lost,
    ReplicaFlow,
    Tombstones,
    WeightFlow,
    WorkerFlow,
)
from engine.keep.flow.segments import LiveSegments, StepSegments
from engine.watch.prometheus import exposition
from tests.kit.files import save_jsonl
from tests.kit.watched import write_flows

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def a_run(tmp_path: Path, steps: int = 2) -> Path:
    """The folder of the run `first` with so many Steps."""
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"graph": "grpo"}))
    rows = [{"step": s, "reward/mean": s / 4, "loss/policy": None} for s in range(1, steps + 1)]
    save_jsonl(folder / "metrics.jsonl", *rows)
    write_flows(folder / "events", map(flow, range(1, steps + 1)))
    return folder


def flow(step: int, wall: float = 0.0) -> Flow:
    return Flow(
        step=step,
        start=step - 1.0,
        end=float(step),
        wall=wall or 100.0 + step,
        nodes={
            "rollout@gen": ReplicaFlow(busy=0.75, for_room=0.25, rows=8, tokens=40, version=step)
        },
        edges={"rollout->score": EdgeFlow(rows=8, bytes=1000, waiting_rows=3, age=0.5)},
        weights={
            "policy->rollout@gen": WeightFlow(
                offered=step, loaded=step - 1, loads=1, seconds=0.1, bytes=64
            )
        },
        cuts={"prompts": CutFlow(ready=2, wanted=4, outstanding=6, room=8, lags=[6, 2])},
        workers={"gen": WorkerFlow(memory=5000, peak=6000, outbox=70)},
    )


def samples(text: bytes) -> Samples:
    """Name and labels but run and graph -> value; whose run and graph are as expected."""
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("run"), labels.pop("graph")) == ("first", "grpo")
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def of(run: Path, name: str, **labels: str) -> float:
    """The figure of a run that has this name and these labels."""
    return samples(exposition([run]))[f"dataflow_{name}", frozenset(labels.items())]


GEN = {"node": "rollout", "worker": "gen"}


@pytest.mark.parametrize(("name", "labels", "value"), [
    ("node_seconds_total", GEN | {"state": "busy"}, 1.5),
    ("node_seconds_total", GEN | {"state": "idle"}, 0.0),
    ("node_tokens_total", GEN, 80.0),
    ("node_version", GEN, 2.0),
    ("edge_bytes_total", {"edge": "rollout->score"}, 2000.0),
    ("edge_waiting_rows", {"edge": "rollout->score"}, 3.0),
    ("weights_loads_total", GEN | {"model": "policy"}, 2.0),
    ("weights_lag_versions", GEN | {"model": "policy"}, 1.0),
    ("cut_ready_prompts", {"node": "prompts"}, 2.0),
    ("trained_rows_total", {"node": "prompts", "lag": "1"}, 4.0),
    ("worker_peak_bytes", {"worker": "gen"}, 6000.0),
    ("metric", {"metric": "reward/mean"}, 0.5),
    ("step", {}, 2.0),
])  # fmt: skip
def test_totals_and_newest_figures(
    tmp_path: Path, name: str, labels: dict[str, str], value: float
) -> None:
    assert of(a_run(tmp_path), name, **labels) == value


def test_waits_outside_are_a_state_and_live_episodes_a_gauge(tmp_path: Path) -> None:
    run = a_run(tmp_path, steps=1)
    waits = ReplicaFlow(busy=0.25, for_outside=0.75, outside={"environments": 0.75}, in_flight=6)
    write_flows(run / "events", iter([replace(flow(2), nodes={"rollout@gen": waits})]))
    assert of(run, "node_seconds_total", **GEN, state="for_outside") == 0.75
    assert of(run, "node_rows_in_flight", **GEN) == 6.0


def test_a_metric_without_a_number_has_no_figure(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        of(a_run(tmp_path), "metric", metric="loss/policy")


def test_counters_only_grow_and_gauges_are_of_the_last_second(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    before = samples(exposition([run]))
    assert samples(exposition([run])) == before
    write_flows(run / "events", iter([flow(3)]))
    live = LiveSegments(run / "events")
    live.write(flow(9, wall=500.0))
    live.close()
    assert of(run, "node_rows_total", **GEN) == 24.0
    assert of(run, "node_version", **GEN) == 9.0
    after = samples(exposition([run]))
    counters = [key for key in before if key[0].endswith("_total")]
    assert all(after[key] >= before[key] for key in counters)


def test_after_a_resume_that_cut_steps_off_they_begin_anew(tmp_path: Path) -> None:
    run = a_run(tmp_path, steps=4)
    assert of(run, "edge_rows_total", edge="rollout->score") == 32.0
    segments = StepSegments(run / "events")
    segments.truncate_after(1)
    segments.close()
    assert of(run, "edge_rows_total", edge="rollout->score") == 8.0


def test_a_torn_tail_counts_once_it_is_whole(tmp_path: Path) -> None:
    run = a_run(tmp_path, steps=3)
    (segment,) = (run / "events").glob("steps-*.seg")
    whole = segment.read_bytes()
    for data, rows in ((whole[:-5], 16.0), (whole, 24.0)):
        segment.write_bytes(data)
        assert of(run, "edge_rows_total", edge="rollout->score") == rows


def test_losses_and_rows_that_failed_are_counted(tmp_path: Path) -> None:
    run = a_run(tmp_path, steps=1)
    segments = StepSegments(run / "events")
    segments.write(Lost(step=1, wall=2.0, worker="gen", error="killed"))
    keys = [(0, 0, 0), (1, 0, 0)]
    segments.write(Tombstones(step=1, wall=2.0, node="score", keys=keys, error="x"))
    segments.close()
    assert of(run, "workers_lost_total", worker="gen") == 1.0
    assert of(run, "tombstones_total", node="score") == 2.0


def test_a_run_without_events_has_its_metrics(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"graph": "grpo"}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "reward/mean": 0.5}\n')
    assert samples(exposition({"first": tmp_path})) == {
        ("dataflow_step", frozenset()): 7.0,
        ("dataflow_metric", frozenset({("metric", "reward/mean")})): 0.5,
    }


def test_names_are_escaped_in_labels(tmp_path: Path) -> None:
    name = 'a"b\\c\nd'
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, name: 2.0}) + "\n")
    families = text_string_to_metric_families(exposition([tmp_path]).decode())
    found = [s.labels["metric"] for f in families for s in f.samples if "metric" in s.labels]
    assert found == [name]
