"""Checkpoints: committed whole or not at all, damage found, the cut exact."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.errors import CheckpointError, StorageError
from dataflow.schema import Rollout
from engine.keep.checkpoint.cut import Cut, SourceCut, read_waiting_rows, write_waiting_rows
from engine.keep.checkpoint.store import MANIFEST, CheckpointStore, StoredCheckpoint
from tests.kit.turns import example_count

_OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


def _fill(step: int) -> Callable[[Path], None]:
    def fill(directory: Path) -> None:
        (directory / "policy").mkdir()
        (directory / "policy/model.bin").write_bytes(bytes([step]) * 4096)
        (directory / "cut.json").write_text(f"step {step}")

    return fill


def _write(store: CheckpointStore, step: int) -> StoredCheckpoint:
    return store.write(step, _fill(step), {"step": step, "loss": 0.5})


def _stored(directory: Path, *steps: int, keep: int = 2) -> CheckpointStore:
    """A store with checkpoints of these Steps."""
    store = CheckpointStore(directory, keep)
    for step in steps:
        _write(store, step)
    return store


def _whole(found: StoredCheckpoint | None) -> int:
    """The Step of a checkpoint, whose files are those that were filled in."""
    assert (found.path / "policy/model.bin").read_bytes() == bytes([found.step]) * 4096
    assert (found.path / "cut.json").read_text() == f"step {found.step}"
    assert found.meta == {"step": found.step, "loss": 0.5}
    return found.step


def test_the_newest_are_kept_and_the_last_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.latest() is None
    for step in (3, 6, 9, 12):
        assert _whole(_write(store, step)) == step
    assert store.steps() == [9, 12]
    assert _whole(CheckpointStore(tmp_path).latest()) == 12
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_12", "step_9"]


def test_a_step_written_again_is_replaced_and_later_ones_go(tmp_path: Path) -> None:
    store = _stored(tmp_path, 3, 6)
    store.write(3, lambda directory: (directory / "new.txt").touch(), {})
    assert store.steps() == [3]
    assert [p.name for p in sorted((tmp_path / "step_3").iterdir())] == [MANIFEST, "new.txt"]
    assert store.read(3).meta == {}


def test_truncate_after_deletes_what_a_rollback_makes_again(tmp_path: Path) -> None:
    store = _stored(tmp_path, 3, 6, 9, keep=3)
    store.truncate_after(6)
    assert store.steps() == [3, 6]
    with pytest.raises(CheckpointError, match=r"step_9.*does not exist.*there are: 3, 6"):
        store.read(9)


def test_timed_ones_are_kept_apart(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step, timed in ((2, False), (3, True), (4, False), (5, True), (7, True), (8, True)):
        store.write(step, _fill(step), {"loss": 0.5}, timed=timed)
    assert store.steps() == [2, 4, 7, 8]
    assert store.read(8).meta == {"loss": 0.5, "timed": True}
    _write(store, 10)
    assert store.steps() == [4, 7, 8, 10]
    (tmp_path / "step_8" / MANIFEST).write_text("{")  # damaged, it counts among the others
    assert CheckpointStore(tmp_path, keep=2).steps() == [4, 7, 8, 10]
    assert _whole(CheckpointStore(tmp_path).latest()) == 10


def _bit_rot(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _meta_rot(path: Path) -> None:
    path.write_text(path.read_text().replace('"loss": 0.5', '"loss": 0.6'))


def _of_another_step(path: Path) -> None:
    path.write_bytes((path.parents[1] / "step_3" / MANIFEST).read_bytes())


MODEL = "policy/model.bin"
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated": (MODEL, lambda p: os.truncate(p, 100), "has 100 bytes, its manifest says 4096"),
    "grown": ("cut.json", lambda p: p.write_text("step 60000"), "has 10 bytes"),
    "bit rot": (MODEL, _bit_rot, "model.bin differs from its checksum"),
    "file missing": ("cut.json", Path.unlink, "cut.json is missing"),
    "manifest missing": (MANIFEST, Path.unlink, "manifest.json is missing"),
    "manifest torn": (MANIFEST, lambda p: os.truncate(p, 50), "cannot be read"),
    "manifest rot": (MANIFEST, _meta_rot, "manifest.json differs from its checksum"),
    "another step": (MANIFEST, _of_another_step, "manifest.json is of Step 3"),
    "not utf-8": (MANIFEST, lambda p: p.write_bytes(b'{"meta": {"\xff": 1}}'), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, harm, reason = DAMAGES[damage]
    store = _stored(tmp_path, 3, 6)
    harm(tmp_path / "step_6" / file)
    assert _whole(store.latest()) == 3
    assert reason in caplog.text
    assert "step_6" in caplog.text


def test_only_damaged_checkpoints_stop_the_run(tmp_path: Path) -> None:
    store = _stored(tmp_path, 3)
    _bit_rot(tmp_path / "step_3/cut.json")
    with pytest.raises(CheckpointError, match=r"found only damaged ones .step_3: cut.json differs"):
        store.latest()


def test_a_newer_format_is_refused_not_skipped(tmp_path: Path) -> None:
    store = _stored(tmp_path, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.keep.checkpoint.store.FORMAT", 2)
        _write(store, 6)
    with pytest.raises(CheckpointError, match="expected format 1 or less, found 2"):
        store.latest()


def _fork_and_die_at(operation: int, work: Callable[[], None], full: bool) -> bool:
    """Whether SIGKILL before the n-th file operation of `work` ended a forked child in it; of a
    full disk, whether its error ended the work.
    """
    child = os.fork()
    if child == 0:
        _work_until_killed(operation, work, full)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def _work_until_killed(operation: int, work: Callable[[], None], full: bool) -> NoReturn:
    done = count(1)
    fsync = os.fsync

    def tick(event: str, _: object) -> None:
        if event in _OPERATIONS and next(done) == operation:
            if full:
                raise OSError
            os.kill(os.getpid(), signal.SIGKILL)

    def counted_fsync(file: int) -> None:
        tick("open", None)
        fsync(file)

    os.fsync = counted_fsync
    sys.addaudithook(tick)  # cannot be taken back, hence the child
    try:
        work()
        os._exit(0)
    except StorageError:
        os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("new", [9, 6], ids=["new step", "same step"])
def test_stopped_at_any_file_operation_a_checkpoint_is_whole_or_absent(
    tmp_path: Path, new: int, full: bool
) -> None:
    for operation in count(1):
        directory = tmp_path / f"killed_at_{operation}"
        store = _stored(directory, 3, 6)
        killed = _fork_and_die_at(operation, lambda store=store: _write(store, new) and None, full)
        # Nobody opens the store again once a disk is full.
        assert not full or 6 in store.steps()
        # Also before a new store clears up nothing half-written has a final name.
        for step in store.steps():
            assert _whole(store.read(step)) == step
        reopened = CheckpointStore(directory)
        assert _whole(reopened.latest()) in (6, new)
        assert all(name.name.startswith("step_") for name in directory.iterdir())
        assert _whole(_write(reopened, 12)) == 12
        if not killed:
            assert operation > 15, "the kill points are not reached"
            return


def test_all_is_durable_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(file: int) -> None:
        events.append(os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), tmp_path))
        fsync(file)

    def recorded_rename(source: Path, target: Path) -> None:
        events.append(f"rename {target.name}")
        rename(source, target)

    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    _write(store, 3)
    *before, manifest, policy, folder, renamed, after = events
    temp = ".tmp-step_3"
    assert sorted(before) == [f"{temp}/cut.json", f"{temp}/policy/model.bin"]
    assert (manifest, policy, folder) == (f"{temp}/{MANIFEST}", f"{temp}/policy", temp)
    assert (renamed, after) == ("rename step_3", ".")


def test_an_error_of_a_kernel_is_passed_on_and_cleared_up(tmp_path: Path) -> None:
    def fill(directory: Path) -> None:
        (directory / "half").write_bytes(b"half")
        raise ValueError("the kernel's own")

    with pytest.raises(ValueError, match="the kernel's own"):
        CheckpointStore(tmp_path).write(6, fill, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("fill", "told"), [
    (lambda directory: (directory / "link").symlink_to(directory), "found a link"),
    (lambda directory: (directory / "link").symlink_to("nowhere"), "found a link"),
    (lambda directory: (directory / MANIFEST).touch(), "store's own"),
], ids=["a link", "a broken link", "a manifest"])  # fmt: skip
def test_links_and_the_manifests_name_are_refused(
    tmp_path: Path, fill: Callable[[Path], None], told: str
) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=told):
        store.write(1, fill, {})
    assert store.steps() == []


@st.composite
def source_cuts(draw: st.DrawFn) -> SourceCut:
    """A cut in which every made position has one fate."""
    watermark = draw(st.integers(0, 2**40))
    fates = draw(st.lists(st.sampled_from(["retired", "running", "finished", "both"]), max_size=12))
    rows = {"running": (), "finished": (), "retired": ()}
    for position, fate in enumerate(fates, start=watermark):
        if fate == "retired":
            rows["retired"] += (position,)
        if fate in ("running", "both"):
            rows["running"] += ((position, 0, draw(st.integers(0, 5))),)
        if fate in ("finished", "both"):
            rows["finished"] += ((position, draw(st.integers(1, 7)), 0),)
    return SourceCut(next=watermark + len(fates), watermark=watermark, **rows)


@settings(max_examples=example_count(60))
@given(
    st.builds(
        Cut,
        step=st.integers(0, 2**40),
        seed=st.integers(-(2**63), 2**63 - 1),
        graph=st.text(max_size=8),
        sources=st.dictionaries(st.text(max_size=5), source_cuts(), max_size=3),
    )
)
def test_a_cut_is_read_back_exactly(cut: Cut) -> None:
    assert Cut.from_json(cut.to_json()) == cut
    backwards = replace(cut, sources=dict(reversed([*cut.sources.items()])))
    assert backwards.to_json() == cut.to_json()


LOST = "2 made positions are neither retired, running nor finished"
TWICE = SourceCut(next=4, watermark=3, retired=(3,), finished=((3, 0, 0),))
CONTRADICTIONS = {
    "lost": (SourceCut(next=5, watermark=3), LOST),
    "trained twice": (TWICE, "has running or finished"),
    "below": (SourceCut(next=3, watermark=3, running=((2, 0, 0),)), "below the watermark"),
    "beyond": (SourceCut(next=3, watermark=3, finished=((3, 0, 0),)), "at or above next=3"),
    "twice": (SourceCut(next=1, finished=((0, 1, 0), (0, 1, 1))), "listed twice"),
    "order": (SourceCut(next=2, retired=(1, 0)), "do not ascend"),
    "watermark": (SourceCut(next=2, watermark=3), "watermark 3 is not within 0..2"),
    "negative": (SourceCut(next=1, running=((0, 0, -1),)), "negative part"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_cut_that_contradicts_itself_is_refused_both_ways(case: str) -> None:
    source, problem = CONTRADICTIONS[case]
    with pytest.raises(CheckpointError, match=f"source 'prompts': .*{problem}"):
        Cut(step=2, seed=0, graph="g", sources={"prompts": source}).to_json()


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"step": 1}', b'{"step": "1", "seed": 0, "graph": "g"}', b"\xff"]
)
def test_bytes_that_are_no_cut_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="cut: expected"):
        Cut.from_json(data)


def test_a_cut_of_another_format_or_seed_is_refused() -> None:
    cut = Cut(step=2, seed=7, graph="abc")
    with pytest.raises(CheckpointError, match="expected format 1, found 2"):
        Cut.from_json(cut.to_json().replace(b'"format":1', b'"format":2'))
    with pytest.raises(CheckpointError, match=r"expected seed 8, found 7. Fix: seed=7"):
        cut.must_continue(seed=8)
    cut.must_continue(seed=7)


def _rollout(lengths: list[int]) -> Batch:
    """Rows of so many tokens, every second one without a reward."""
    count = len(lengths)
    columns = {
        "completion_ids": [list(range(length)) for length in lengths],
        "sampler_logprobs": [[-0.5] * length for length in lengths],
        "completion": [f"text {i}" for i in range(count)],
        "reward/exact": pa.array(([1.0, None] * count)[:count], pa.float32()),
    }
    return Batch.make(Keys.of(range(5, 5 + count), [1] * count, [2] * count), columns, Rollout)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 5), max_size=6))
def test_rows_are_read_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int]
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rollout.arrow"
    rows = _rollout(lengths)
    write_waiting_rows(path, rows)
    again = read_waiting_rows(path)
    assert again.keys.rows() == rows.keys.rows()
    assert again.records.equals(rows.records)
    assert again.records.schema.equals(rows.records.schema)


UNREADABLE = r"rollout\.arrow: expected rows as an Arrow file"


def test_rows_that_are_not_there_or_cut_short_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollout.arrow"
    with pytest.raises(CheckpointError, match=UNREADABLE):
        read_waiting_rows(path)
    write_waiting_rows(path, _rollout([2, 3]))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=UNREADABLE):
        read_waiting_rows(path)


def _write_arrow(path: Path, records: pa.RecordBatch) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, records.schema) as writer:
        writer.write_batch(records)


def test_offsets_that_point_outside_are_refused(tmp_path: Path) -> None:
    # Only a full validation looks at offsets in the middle.
    offsets = pa.array([0, 90, 2], pa.int64())
    wild = pa.LargeListArray.from_arrays(offsets, pa.array([1, 2], pa.int32()))
    records = pa.RecordBatch.from_arrays([wild], names=["completion_ids"])
    path = tmp_path / "rollout.arrow"
    _write_arrow(path, Batch(Keys.of([1, 2]), records).with_keys())
    with pytest.raises(CheckpointError, match=UNREADABLE):
        read_waiting_rows(path)


@pytest.mark.parametrize("names", [["x", "y", "z"], ["key.position", "key.sample", "key.attempt"]])
def test_a_file_without_proper_keys_is_refused(tmp_path: Path, names: list[str]) -> None:
    path = tmp_path / "rollout.arrow"
    records = pa.RecordBatch.from_arrays([pa.array([1], pa.int16())] * 3, names=names)
    _write_arrow(path, records)
    with pytest.raises(CheckpointError, match=r"expected rows with keys key.position"):
        read_waiting_rows(path)
