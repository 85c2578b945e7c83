"""`--relayout` as a table, what is refused, and the file that keeps layouts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dataflow.errors import PlanError, RunError
from engine.keep.layouts_file import LAYOUTS, KeptSwitch, encode_layouts, read_layouts
from engine.plan.layout_table import RunLayout, measured_table
from engine.plan.options import (
    AUTO,
    RunOptions,
    decode_options,
    encode_options,
    on_this_host,
)
from engine.plan.relayout_option import read_relayout
from engine.replay.recorded_run import list_other_layouts


def test_options_come_on_top_of_those_of_lower_numbers() -> None:
    relayout = {"4000": "tensor.train_policy=2", "1000": "replicas.rollout=2, threads=1"}
    options = RunOptions(relayout=relayout, replicas={"score": 3})
    table = read_relayout(options)
    assert table is not None
    assert [bucket.start for bucket in table.buckets] == [0, 1000, 4000]
    assert [bucket.best for bucket in table.buckets] == [0, 1, 2]
    first, second, third = table.layouts
    assert (first.changes, first.text) == ({}, "")
    replicas = {"score": 3, "rollout": "2"}
    assert second.changes == {"replicas": replicas, "threads": 1}
    assert third.changes == {**second.changes, "tensor": {"train_policy": 2}}
    assert third.text == "replicas.rollout=2,threads=1,tensor.train_policy=2"
    assert table.lines() == [
        "at first: layout 0, the run's own options",
        "from 1000 live tokens on: layout 1, replicas.rollout=2,threads=1",
        f"from 4000 live tokens on: layout 2, {third.text}",
    ]
    restored, _ = decode_options(encode_options(options), {})
    assert restored.relayout == relayout
    assert read_relayout(RunOptions()) is None


@pytest.mark.parametrize(("relayout", "problem"), [
    ({"many": "threads=1"}, r"expected a number of live tokens, 1 or more, found 'many'. Fix: 16"),
    ({"0": "threads=1"}, "1 or more, found '0'"),
    ({"10": "threads=1", "010": "threads=2"}, "found 10 twice. Fix: 10=threads=1,threads=2"),
    ({"10": "threads"}, "expected OPTION.NODE=VALUE, found 'threads'"),
    ({"10": "seed=1"}, "expected an option that a running run may change, found 'seed'"),
    ({"10": "stream=off"}, "found 'stream'"),
    ({"10": "tensr.rollout=2"}, "found 'tensr'. Fix: tensor"),
    ({"10": "tensor=2"}, "tensor: expected tensor.NODE, found tensor=2"),
    ({"10": "tensor.rollout=two"}, "expected a whole number, found 'two'"),
])  # fmt: skip
def test_what_means_nothing_is_refused(relayout: dict[str, str], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        read_relayout(RunOptions(relayout=relayout))


def test_what_runs_in_this_process_has_one_layout() -> None:
    """As a rerun does, which looks for the layout of its Step elsewhere."""
    assert on_this_host(RunOptions(relayout=AUTO)).relayout == {}
    restored, _ = decode_options(encode_options(RunOptions(relayout=AUTO)), {})
    assert restored.relayout == AUTO
    assert read_relayout(restored) is None


def test_a_measured_table_begins_half_way_and_fits_up_to_what_was_measured() -> None:
    layouts = (RunLayout(), RunLayout(text="two", changes={"replicas": {"rollout": 2}}))
    grid = {1024: (1.0, 2.0), 4096: (2.0, 1.99), 16384: (math.inf, 5.0)}
    table = measured_table(layouts, grid, switch_seconds=3.0)
    assert [bucket.start for bucket in table.buckets] == [0, 2048, 8192]
    assert [bucket.best for bucket in table.buckets] == [0, 0, 1], "alike: the smaller one"
    assert (table.fits(0, 4096), table.fits(0, 4097), table.fits(1, 1e9)) == (True, False, True)


def test_a_table_is_kept_with_what_was_switched(tmp_path: Path) -> None:
    layouts = (RunLayout(), RunLayout(text="two", changes={"replicas": {"rollout": 2}}))
    grid = {1024: (1.0, 2.0), 4096: (math.inf, 1.0)}
    table = measured_table(layouts, grid, switch_seconds=3.0, begins=2000.0).close(0, "lost")
    switch = KeptSwitch(step=3, before=0, layout=1, reason="they grew", forced=True)
    (tmp_path / LAYOUTS).write_text(encode_layouts(table, 1, (switch,)))
    restored = read_layouts(tmp_path)
    assert restored is not None
    assert (restored.table(), restored.present, restored.switches) == (table, 1, (switch,))


def test_a_rerun_says_that_a_step_had_another_layout(tmp_path: Path) -> None:
    table = measured_table((RunLayout(), RunLayout(text="two")), {1: (2.0, 1.0)})
    switches = (
        KeptSwitch(step=3, before=0, layout=1, reason="they grew"),
        KeptSwitch(step=5, before=1, layout=0, reason="they shrank"),
    )
    assert list_other_layouts(tmp_path, 4) == []
    (tmp_path / LAYOUTS).write_text(encode_layouts(table, 0, switches))
    others = [list_other_layouts(tmp_path, step) for step in range(3, 7)]
    assert others == [[], *[["layout: 1 then, 0 now"]] * 2, []]


def test_a_folder_without_layouts_has_none(tmp_path: Path) -> None:
    assert read_layouts(tmp_path) is None


@pytest.mark.parametrize("change", [
    ('"present": 1', '"present": 2'),
    ('"replicas"', '"replica"'),
    ('"best": 1', '"best": -1'),
    ('"layouts"', '"other"'),
])  # fmt: skip
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, change: tuple[str, str]) -> None:
    layouts = (RunLayout(), RunLayout(text="two", changes={"replicas": {"rollout": 2}}))
    text = encode_layouts(measured_table(layouts, {1: (2.0, 1.0)}), 1, ())
    assert change[0] in text
    (tmp_path / LAYOUTS).write_text(text.replace(*change))
    with pytest.raises(RunError, match=r"layouts.json: expected .*Fix: restore it"):
        read_layouts(tmp_path)
