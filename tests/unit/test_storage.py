"""What cannot be written: one message for every writer, the first cause last, what was whole stays
whole.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dataflow.errors import RunError, StorageError
from dataflow.shown import shown_bytes
from dataflow.storage import free_bytes, replace_text, storage_error, write_where_asked
from engine.attempts import _closed
from engine.channels.shm.outbox import SlabOutbox
from engine.channels.shm.slabs import SlabPool
from engine.checkpoint.best import BestVersions
from engine.checkpoint.room import warn_of_room
from engine.checkpoint.safe import telling_what_is_safe
from engine.checkpoint.store import CheckpointStore
from engine.launch.keyfile import make_keys
from engine.launch.worker_process import KINDS, failure
from engine.observe.logs import LogFile, logged
from engine.observe.runfolder import RunFolder
from engine.observe.samples import SamplesBehind, SampleWriter
from engine.observe.sinks import JsonLines
from engine.observe.trace import Trace, read_trace
from engine.observe.views import View
from engine.plan.plan import Plan, PlannedModel
from tests.torture.faults import Faults, installed

ROOT = Path(__file__).resolve().parents[2]
_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "number,needed,told",
    [
        (
            errno.ENOSPC,
            2048,
            (
                r"^/x/a: it could not be written: the disk is full \(needs 2\.0 KiB, .* free\)\."
                r" Fix: free "
            ),
        ),
        (errno.EDQUOT, 0, r"the quota of this user is used up \(.* free\)\. Fix: "),
        (
            errno.EFBIG,
            10,
            r"larger than is allowed \(needs 10 B, .*\)\. Fix: raise the limit \(ulimit -f\)",
        ),
        (
            errno.EIO,
            10,
            r"the disk fails \(Input/output error\) \(needs 10 B\)\. Fix: look at the disk",
        ),
        (errno.EROFS, 0, r"the file system is read-only\. Fix: "),
        (errno.ENOTDIR, 0, r"a part of the path is a file, not a folder\. Fix: "),
        (errno.ENODEV, 0, r"could not be written: No such device\. Fix: "),
    ],
)
def test_an_error_says_what_where_why_and_how_much(number: int, needed: int, told: str) -> None:
    error = storage_error("it", Path("/x/a"), OSError(number, os.strerror(number)), needed)
    with pytest.raises(StorageError, match=told):
        raise error
    assert "\n" not in str(error)


def test_sizes_as_they_are_shown() -> None:
    assert [shown_bytes(n) for n in (0, 1023, 1024, 3 << 29, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "5.0 TiB",
    ]
    assert free_bytes(Path("/nowhere/at/all")) == free_bytes(Path("/"))


# --- every writer, a fault at every call ----------------------------------------------------------


def _table() -> pa.Table:
    return pa.table({"prompt": ["a"], "completion": ["b"], "position": [0], "sample": [0]})


def _metrics(folder: Path) -> JsonLines:
    run = RunFolder.seen(folder)
    lines = JsonLines()
    lines.open(run, {})
    return lines


def _append(folder: Path) -> None:
    lines = _metrics(folder)
    with _closed(lines):
        lines.write(2, {"a": 2.0})


def _amend(folder: Path) -> None:
    lines = _metrics(folder)
    with _closed(lines):
        lines.amend(1, {"b": 2.0})


def _save(folder: Path) -> None:
    (folder / "weights").write_bytes(b"w" * 10_000)


def _optimizer(folder: Path) -> None:
    import torch

    from operators.kernels.torch.optimizer import save_state

    moments = {0: {"exp_avg": torch.zeros(100)}}
    save_state(
        {"names": ["w"], "adam": {"state": moments}, "copies": [], "step": 1},
        folder / "optimizer.pt",
    )


def _tokenizer(folder: Path) -> None:
    from operators.kernels.torch.models import save_tokenizer

    base = folder.parent / "base"
    base.mkdir(exist_ok=True)
    (base / "tokenizer.json").write_text("{}")
    save_tokenizer(str(base), folder)


WRITERS: dict[str, Callable[[Path], object]] = {
    "run folder": lambda f: RunFolder.create("new", f).close(),
    "record": lambda f: RunFolder.seen(f).write_text("graph.json", "new"),
    "samples": lambda f: SampleWriter(f).write(1, _table()),
    "metrics": _append,
    "amended metrics": _amend,
    "checkpoint": lambda f: CheckpointStore(f / "checkpoints").write(2, _save, {}),
    "best version": lambda f: BestVersions(f, {"e": 1}).offer("e", 2, 0.5, _save),
    "keys": lambda f: make_keys(f / "new.keys", ["a"]),
    "drawing": lambda f: write_where_asked("the drawing", f / "graph.json", "new"),
    "optimizer": _optimizer,
    "tokenizer": _tokenizer,
}


def _before(folder: Path) -> dict[str, bytes]:
    """What is there before: a record, a line of metrics, a checkpoint, a best version."""
    folder.mkdir()
    (folder / "graph.json").write_text("old")
    (folder / "metrics.jsonl").write_text('{"step":1,"a":1.0}\n')
    CheckpointStore(folder / "checkpoints").write(1, _save, {})
    BestVersions(folder, {"e": 1}).offer("e", 1, 0.25, _save)
    return _files(folder)


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def _told(action: Callable[[], object], faults: Faults) -> bool:
    """Whether it failed: then with a StorageError of that folder."""
    try:
        with installed(faults):
            action()
    except StorageError as error:
        text = str(error)
    else:
        return False
    assert faults.folder in text
    assert "could not be written" in text
    assert "Fix: " in text
    return True


@pytest.mark.parametrize("kind", ["full", "eio"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_fault_at_any_call_is_told_and_leaves_what_was_there(
    writer: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.observe.runfolder._versions", dict)  # which takes half a second
    whole = tmp_path / "whole"
    _before(whole)
    with installed(Faults(folder=str(whole))) as counted:
        WRITERS[writer](whole)
    assert counted.calls
    for at in range(1, len(counted.calls) + 1):
        folder = tmp_path / str(at)
        old = _before(folder)
        told = _told(partial(WRITERS[writer], folder), Faults(folder=str(folder), at=at, kind=kind))
        found = _files(folder)
        for name, data in old.items():
            if name in found or writer not in ("checkpoint", "best version", "drawing"):
                assert found[name] in (data, _files(whole)[name]) or found[name].startswith(data), (
                    at,
                    name,
                )
        call = counted.calls[at - 1]
        fails = (
            ("open", "write", "rename", "fsync") if kind == "eio" else ("open", "write", "rename")
        )
        assert told or call[0] not in fails, f"{call} failed in silence"
        assert not [
            p for p in folder.rglob("*") if p.name.startswith(".tmp") or p.name.endswith(".tmp")
        ], call
        assert CheckpointStore(folder / "checkpoints").latest() is not None


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".a.tmp").symlink_to(tmp_path / "mine")
    replace_text("it", tmp_path / "a", "new")
    assert ((tmp_path / "a").read_text(), (tmp_path / "mine").read_text()) == ("new", "mine")
    assert not (tmp_path / "a").is_symlink()


def test_a_drawing_goes_where_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to("there")
    write_where_asked("the drawing", tmp_path / "link", "new")
    assert (tmp_path / "there").read_text() == "new"
    assert (tmp_path / "link").is_symlink()
    write_where_asked("the drawing", Path("/dev/null"), "new")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(
        StorageError, match="/dev/full: the drawing could not be written: the disk is full"
    ):
        write_where_asked("the drawing", Path("/dev/full"), "new")


# --- what nothing depends on ----------------------------------------------------------------------


def test_a_log_that_cannot_be_written_neither_ends_nor_hides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Path("/dev/full").open("a")  # noqa: SIM115 - closed by the log; a run's own is a plain file
    monkeypatch.setattr(LogFile, "_open", lambda self: full)

    def run() -> None:
        with logged(tmp_path / "main.log"):
            logging.getLogger("engine.test").info("one")
            logging.getLogger("engine.test").info("two")
            raise RunError("the cause")

    with pytest.raises(RunError, match="the cause"):
        run()
    shown = capsys.readouterr().err
    assert shown.count("could not be written: the disk is full") == 1
    assert "Traceback" not in shown


def test_a_log_has_where_the_run_was_ended_and_the_screen_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError), logged(tmp_path / "main.log"):
        _ = 1 // 0
    assert "ZeroDivisionError" in (tmp_path / "main.log").read_text()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["full", "eio"])
def test_a_trace_that_cannot_be_written_is_said_once_and_left_out(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with installed(Faults(folder=str(tmp_path), at=4, kind=kind)):
        trace = Trace(tmp_path / "run.json")
        for second in range(4):
            trace.instant("a", "moment", float(second))
            trace.flush()
        trace.close()
    assert [r.getMessage().count("The run goes on without a trace") for r in caplog.records] == [1]
    assert len(read_trace(tmp_path / "run.json")) == 3  # the track's names and one moment


@pytest.mark.parametrize(
    "error", [_FULL, storage_error("the view tensorboard", Path("/x/a"), _FULL)]
)
def test_a_view_that_cannot_be_written_is_said_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    class Failing:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def open(self, run: RunFolder, config: Any) -> None:
            self.calls.append("open")

        def write(self, step: int, metrics: Any) -> None:
            self.calls.append("write")
            raise error

        def close(self) -> None:
            self.calls.append("close")

    sink = Failing()
    view = View("tensorboard", sink)
    view.open(RunFolder.seen(tmp_path), {})
    view.write(1, {})
    view.write(2, {})
    view.close()
    assert sink.calls == ["open", "write"]
    assert [
        r.getMessage().count("the view tensorboard could not be written") for r in caplog.records
    ] == [1]


def test_what_a_worker_prints_into_a_full_disk_is_lost_and_nothing_else() -> None:
    code = (
        "import os, sys; from engine.observe.logs import output_that_cannot_fail;"
        " output_that_cannot_fail();[print('x' * 1000) for _ in range(100)]; print('y',"
        " file=sys.stderr); sys.stdout.flush(); os._exit(7)"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdout=full,
            stderr=full,
            timeout=60,
            check=False,
        )
    assert done.returncode == 7


# --- what is told ---------------------------------------------------------------------------------


def test_the_first_cause_is_told_not_what_fails_as_things_are_closed(tmp_path: Path) -> None:
    class Closing:
        def close(self) -> None:
            raise StorageError("later")

    with pytest.raises(StorageError, match="first"), _closed(Closing()):
        raise StorageError("first")
    with pytest.raises(StorageError, match="later"), _closed(Closing()):
        pass


def test_a_sample_file_that_fails_behind_is_told_by_the_next_call(tmp_path: Path) -> None:
    with installed(Faults(folder=str(tmp_path), at=4, kind="full")):
        behind = SamplesBehind(SampleWriter(tmp_path / "samples"))
        behind.write(1, _table())
        with pytest.raises(StorageError, match="the samples of step 1 could not be written"):
            behind.flush()
        behind.close()


def test_a_workers_error_arrives_as_what_it_was() -> None:
    told = failure(storage_error("it", Path("/x"), _FULL), "train")
    assert KINDS[told.kind] is StorageError
    assert "the disk is full" in str(KINDS[told.kind](told.text))
    told = failure(ZeroDivisionError("of\nours"), "train")
    assert told.text.startswith("worker train: internal error: ZeroDivisionError: of ours. Fix: ")
    assert "\n" not in told.text


def test_a_run_says_what_is_safe_and_how_it_goes_on(tmp_path: Path) -> None:
    def told() -> str:
        with pytest.raises(StorageError) as caught, telling_what_is_safe(tmp_path):
            raise StorageError("the cause.")
        return str(caught.value)

    assert told() == "the cause. Safe: nothing had begun; start it again."
    (tmp_path / "options.json").write_text("{}")
    again = f"`dataflow resume {tmp_path}`"
    assert (
        told() == f"the cause. Safe: no checkpoint had been made; {again} begins again at step 1."
    )
    for name in ("step_2", "step_10", ".tmp-step_12"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert told() == f"the cause. Safe: the checkpoint of step 10, from which {again} goes on."


def test_checkpoints_that_will_not_fit_are_told_of_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trained = PlannedModel(name="policy", base="b", writer="train", parameters=1 << 30)
    fixed = PlannedModel(name="reference", base="b", parameters=1 << 40)
    plan = Plan(graph="g", digest="", seed=0, nodes=(), sources=(), models=(trained, fixed))
    monkeypatch.setattr("engine.checkpoint.room.free_bytes", lambda path: 35 << 30)
    warn_of_room(plan, tmp_path, 2)
    told = (
        "2 checkpoints of about 12.0 GiB each, and one more while it is written, need 36.0 GiB"
        " more; found 35.0 GiB"
    )
    assert told in caplog.text
    caplog.clear()
    (tmp_path / "step_1").mkdir()
    with open(tmp_path / "step_1" / "sparse", "wb") as file:
        file.truncate(12 << 30)
    warn_of_room(plan, tmp_path, 2)
    warn_of_room(plan, tmp_path / "none", 1)
    assert caplog.text == ""


def test_memory_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("engine.channels.shm.outbox.BlockIndex", nothing)
    with pytest.raises(
        StorageError,
        match=r"outbox: expected 1 MiB for its block index, found: .*Cannot allocate.*Fix: ",
    ):
        SlabOutbox(SlabPool(limit=1 << 20), 0)


def test_what_a_kill_leaves_of_metrics_does_not_stand_in_the_way(tmp_path: Path) -> None:
    run = RunFolder.create("r", tmp_path)
    (run.path / ".metrics.jsonl.tmp").write_text("half")
    (run.path / ".graph.json.tmp").write_text("half")
    run.close()
    with RunFolder.open_existing(run.path) as again:
        lines = JsonLines()
        lines.open(again, {})
        lines.close()
        assert not [p for p in again.path.iterdir() if p.name.endswith(".tmp")]
    RunFolder.create("r", tmp_path, overwrite=True).close()


def test_files_that_arrow_and_python_write_count_alike(tmp_path: Path) -> None:
    """The faults see what they are to see: opens, writes, renames, within the folder and nowhere
    else.
    """
    (tmp_path / "in").mkdir()
    with installed(Faults(folder=str(tmp_path / "in"))) as faults:
        (tmp_path / "in" / "a").write_text("x")
        (tmp_path / "out").write_text("x")
        with io.open(tmp_path / "in" / "b", "ab+") as file:  # noqa: UP020 - both names are hooked
            file.write(b"x")
        os.rename(tmp_path / "in" / "b", tmp_path / "in" / "c")
        json.loads((tmp_path / "in" / "a").read_text().replace("x", "1"))
    assert faults.calls == [
        ("open", "a"),
        ("write", "a"),
        ("open", "b"),
        ("write", "b"),
        ("rename", "c"),
    ]
