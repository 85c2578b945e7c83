"""What the page's server keeps of growing files: columns, Flows, samples; how it notices cuts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.keep.flow.segments import StepSegments
from engine.keep.reader.flow_index import FlowIndex
from engine.keep.reader.metric_index import MetricIndex
from engine.keep.reader.open_folder import OpenFolder, RunRoot
from engine.keep.reader.run_summary import last_row
from engine.keep.reader.sample_index import SampleIndex, SampleQuery
from engine.keep.samples import SampleWriter
from engine.watch.critical_path import critical_path
from engine.watch.pace import BYTES_A_SECOND, Pace
from engine.watch.series import thinned_series
from engine.watch.token_texts import read_vocabulary
from tests.kit.turns import example_count
from tests.kit.watched import flow, sample_rows, watched_run, write_flows

WRITES = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(1, 5)),
        st.tuples(st.just("cut"), st.integers(0, 12)),
        st.tuples(st.just("tear"), st.integers(1, 20)),
        st.tuples(st.just("amend"), st.just(0)),
        st.tuples(st.just("look"), st.just(0)),
    ),
    max_size=30,
)


def lines_of(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@contextmanager
def run_of(root: Path, rows: list[dict[str, Any]]) -> Iterator[OpenFolder]:
    """A run that has these metrics alone."""
    run = watched_run(root / "a", steps=1, samples=0, events=False)
    (run / "metrics.jsonl").write_text(lines_of(rows))
    with RunRoot(root).open("a") as folder:
        yield folder


class MetricFile:
    """A metrics.jsonl that grows and is cut as by a run."""

    def __init__(self, path: Path) -> None:
        self.path, self.made = path, 0
        self.rows: list[dict[str, Any]] = []

    def change(self, how: str, count: int) -> None:
        if how == "grow":
            for _ in range(count):
                self.made += 1
                more = {"eval/x": 1.0} if self.made % 7 == 0 else {}
                step = len(self.rows) + 1
                self.rows.append({"step": step, "a": self.made / 3, **more})
        elif how == "cut":
            self.rows = self.rows[:count]
        elif how == "amend" and self.rows:
            self.made += 1
            self.rows[-1] = {**self.rows[-1], "eval/x": self.made}
        torn = '{"step": 99, "a": 0.25}'[:count] if how == "tear" else ""
        path = self.path.with_name("new") if how == "amend" else self.path
        path.write_text(lines_of(self.rows) + torn)
        path.rename(self.path)


@given(writes=WRITES)
@settings(max_examples=example_count(60), deadline=None)
def test_columns_are_those_of_the_file_whatever_happens_to_it(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[str, int]]
) -> None:
    root = tmp_path_factory.mktemp("runs")
    file, index = MetricFile(root / "a" / "metrics.jsonl"), MetricIndex()
    with run_of(root, []) as folder:
        for how, count in [*writes, ("look", 0)]:
            if how != "look":
                file.change(how, count)
                os.utime(file.path, ns=(1, file.path.stat().st_mtime_ns + 1 + file.made))
                continue
            found = thinned_series(index, folder, ["a", "eval/x"])
            assert found["steps"] == [row["step"] for row in file.rows]
            for name, values in found["series"].items():
                assert values == [row.get(name) for row in file.rows]
            assert index.last == (file.rows[-1] if file.rows else {})
            assert last_row(folder) == index.last


@given(
    values=st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=400),
    points=st.integers(2, 60),
)
@settings(max_examples=example_count(60), deadline=None)
def test_thinned_curves_keep_every_extreme(
    tmp_path_factory: pytest.TempPathFactory, values: list[float | None], points: int
) -> None:
    rows = [{"step": at + 1, "x": value} for at, value in enumerate(values)]
    with run_of(tmp_path_factory.mktemp("runs"), rows) as folder:
        found = thinned_series(MetricIndex(), folder, ["x"], points=points)
    shown, known = found["series"]["x"], [v for v in values if v is not None]
    assert len(shown) == len(found["steps"]) <= max(points, 2)
    assert found["steps"] == sorted(found["steps"])
    kept = [value for value in shown if value is not None]
    assert (min(kept), max(kept)) == (min(known), max(known)) if known else not kept


@given(
    sizes=st.lists(st.integers(10, 120_000), min_size=1, max_size=80),
    waits=st.lists(st.floats(0.0, 0.5), min_size=80, max_size=80),
)
def test_no_client_gets_more_than_its_share(sizes: list[int], waits: list[float]) -> None:
    now, sent = 0.0, list[tuple[float, int]]()
    pace = Pace(lambda: now)
    for size, wait in zip(sizes, waits, strict=False):
        now += wait
        if pace.may_send():
            pace.count_sent(size)
            sent.append((now, size))
    for at, (begin, _) in enumerate(sent):
        for end, (until, last) in enumerate(sent[at:], at + 1):
            passed = until - begin
            assert end - at <= passed * 5 + 1 + 1e-6
            before_last = sum(size for _, size in sent[at:end]) - last
            assert before_last <= BYTES_A_SECOND * passed + 1e-3


def test_a_resume_cuts_flows(tmp_path: Path) -> None:
    run = watched_run(tmp_path / "a", steps=9)
    index = FlowIndex()
    with RunRoot(tmp_path).open("a") as folder:
        assert [f.step for f in index.between(folder, 3, 7)] == [3, 4, 5, 6, 7]
        segments = StepSegments(run / "events")
        segments.truncate_after(4)
        segments.write(flow(5, seconds=3.0))
        segments.close()
        assert [f.step for f in index.between(folder, 3, 7)] == [3, 4, 5]
        newest, total = index.newest(folder), index.total(folder, 0, 99)
        assert newest is not None
        assert total is not None
        assert newest.nodes["score@data"].busy == pytest.approx(2.7)
        assert total.end - total.start == pytest.approx(7.0)


def test_sums_over_many_segments_are_those_of_all_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.keep.flow.segments._LARGEST", 2000)
    run = watched_run(tmp_path / "a", events=False)
    write_flows(run / "events", (flow(step) for step in range(1, 301)))
    index = FlowIndex()
    with RunRoot(tmp_path).open("a") as folder:
        assert len(index.refresh(folder)) > 20
        for first, last in ((1, 300), (2, 299), (7, 7), (100, 220), (250, 999)):
            found = index.total(folder, first, last)
            assert found is not None
            assert found.nodes["score@data"].rows == 16 * (min(last, 300) - first + 1)
            assert found.step == min(last, 300)
        assert index.total(folder, 301, 400) is None


def test_samples_that_a_resume_makes_anew_are_read_anew(tmp_path: Path) -> None:
    run = watched_run(tmp_path / "a", steps=3)
    index = SampleIndex()
    with RunRoot(tmp_path).open("a") as folder:
        assert index.choose(folder, SampleQuery()).total == 12
        writer = SampleWriter(run / "samples")
        writer.truncate_after(1)
        assert index.choose(folder, SampleQuery()).total == 4
        writer.write(2, sample_rows(2, 7))
        assert index.choose(folder, SampleQuery()).total == 11


def test_very_many_files_are_indexed_over_several_questions(tmp_path: Path) -> None:
    watched_run(tmp_path / "a", steps=20, samples=2, events=False)
    now = [0.0]

    def clock() -> float:
        now[0] += 0.3
        return now[0]

    index = SampleIndex(clock)
    with RunRoot(tmp_path).open("a") as folder:
        first = index.choose(folder, SampleQuery())
        assert 0 < first.read < first.files == 20
        assert first.rows[0][0] == "step_000020.parquet"
        known = [index.choose(folder, SampleQuery(q="alpha")).read for _ in range(40)]
        assert known[-1] == 20
        assert index.choose(folder, SampleQuery(q="alpha")).total == 20


def test_the_bounding_path_leads_from_who_works_to_the_trainer() -> None:
    assert critical_path(flow(1), ["train_policy"]) == ["score", "train_policy"]
    assert critical_path(flow(1), ["nobody"]) == []


def test_token_texts_of_both_kinds_of_vocabularies() -> None:
    byte_level = {
        "model": {"vocab": {"\u0120a": 0, "\u00c3": 1, "\u00a4": 2}},
        "added_tokens": [{"id": 3, "content": "<end>"}],
    }
    marked = {"model": {"vocab": [["\u2581b", 0.0], ["<0x0A>", 0.0], ["\u4f60", 0.0]]}}
    for document, texts in (
        (byte_level, [" a", "", "\u00e4", "<end>", "<9>"]),
        (marked, [" b", "\n", "\u4f60", "<3>", "<9>"]),
    ):
        known = read_vocabulary(json.dumps(document).encode())
        assert known is not None
        assert known.texts([0, 1, 2, 3, 9]) == texts
    assert read_vocabulary(b'{"model": 3}') is None


def test_steps_and_values_keep_their_precision(tmp_path: Path) -> None:
    rows = [{"step": s, "x": 1 / s} for s in range(1, 3000)]
    index = MetricIndex()
    with run_of(tmp_path, rows) as folder:
        column = dict(index.columns(folder, ["x"]))["x"]
        assert np.array_equal(column, [row["x"] for row in rows])
        assert index.row(folder, 2999) == rows[-1]
        assert index.row(folder, 3000) == {}
