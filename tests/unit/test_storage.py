"""Failed writes: one message for every writer, the first cause last, nothing torn."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest

from dataflow.errors import RunError, StorageError
from dataflow.safe_text import shown_bytes
from dataflow.storage import free_bytes, replace_text, storage_error, write_to_user_path
from engine.channels.shm.outbox import SlabOutbox
from engine.channels.shm.slabs import SlabPool
from engine.keep.checkpoint.best_versions import BestVersions
from engine.keep.checkpoint.disk_space import warn_of_room
from engine.keep.checkpoint.safe_state import telling_what_is_safe
from engine.keep.checkpoint.store import CheckpointStore
from engine.keep.metrics.sinks import JsonLines, View
from engine.keep.run_folder import RunFolder
from engine.keep.samples import SamplesBehind, SampleWriter
from engine.keep.trace.timeline import Trace, read_trace
from engine.keep.worker_logs import LogFile, log_to_file
from engine.plan.options import RunOptions
from engine.plan.plan import PlannedModel
from engine.protocol.events import StepEnded
from engine.run.control.control import Failed
from engine.session.closing import close_at_end
from tests.kit.plans import plan_of
from tests.kit.processes import ROOT
from tests.torture.faults import WriteFaults, installed

_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("number,needed,told", [
    (
        errno.ENOSPC,
        2048,
        r"^/x/a: it could not be written: the disk is full \(needs 2\.0 KiB, .* free\)\. Fix: ",
    ),
    (errno.EDQUOT, 0, r"the quota of this user is used up \(.* free\)\. Fix: "),
    (errno.EFBIG, 10, r"is allowed \(needs 10 B, .*\)\. Fix: raise the limit \(ulimit -f\)"),
    (errno.EIO, 10, r"fails \(Input/output error\) \(needs 10 B\)\. Fix: look at the disk"),
    (errno.EROFS, 0, r"the file system is read-only\. Fix: "),
    (errno.ENOTDIR, 0, r"a part of the path is a file, not a folder\. Fix: "),
    (errno.ENODEV, 0, r"could not be written: No such device\. Fix: "),
])  # fmt: skip
def test_an_error_says_what_where_why_and_how_much(number: int, needed: int, told: str) -> None:
    error = storage_error("it", Path("/x/a"), OSError(number, os.strerror(number)), needed)
    with pytest.raises(StorageError, match=told):
        raise error
    assert "\n" not in str(error)


def test_sizes_as_they_are_shown() -> None:
    shown = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 3 << 29: "1.5 GiB", 5 << 40: "5.0 TiB"}
    assert {size: shown_bytes(size) for size in shown} == shown
    assert free_bytes(Path("/nowhere/at/all")) == free_bytes(Path("/"))


def _table() -> pa.Table:
    return pa.table({"prompt": ["a"], "completion": ["b"], "position": [0], "sample": [0]})


def _metrics(folder: Path, change: Callable[[JsonLines], None]) -> None:
    lines = JsonLines()
    lines.open(RunFolder.open_remote(folder), {})
    with close_at_end(lines):
        change(lines)


def _save(folder: Path) -> None:
    (folder / "weights").write_bytes(b"w" * 10_000)


def _optimizer(folder: Path) -> None:
    import torch

    from operators.kernels.torch.optimizer import save_optimizer_state

    adam = {"state": {0: {"exp_avg": torch.zeros(100)}}}
    save_optimizer_state(
        {"names": ["w"], "adam": adam, "copies": [], "step": 1}, folder / "optimizer.pt"
    )


def _tokenizer(folder: Path) -> None:
    from operators.kernels.torch.saving import save_tokenizer

    base = folder.parent / "base"
    base.mkdir(exist_ok=True)
    (base / "tokenizer.json").write_text("{}")
    save_tokenizer(str(base), folder)


WRITERS = {
    "run folder": lambda f: RunFolder.create("new", f).close(),
    "record": lambda f: RunFolder.open_remote(f).write_text("graph.json", "new"),
    "samples": lambda f: SampleWriter(f).write(1, _table()),
    "metrics": lambda f: _metrics(f, lambda lines: lines.write(2, {"a": 2.0})),
    "amended metrics": lambda f: _metrics(f, lambda lines: lines.amend(1, {"b": 2.0})),
    "checkpoint": lambda f: CheckpointStore(f / "checkpoints").write(2, _save, {}),
    "best version": lambda f: BestVersions(f, {"e": 1}).offer("e", 2, 0.5, _save),
    "drawing": lambda f: write_to_user_path("the drawing", f / "graph.json", "new"),
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
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _halves(folder: Path) -> list[Path]:
    """Temporary files."""
    temporary = re.compile(r"\.tmp.*|.*\.tmp")
    return [path for path in folder.rglob("*") if temporary.fullmatch(path.name)]


def _told(action: Callable[[], object], faults: WriteFaults) -> bool:
    """Whether it failed: then with a StorageError of that folder."""
    try:
        with installed(faults):
            action()
    except StorageError as error:
        text = str(error)
    else:
        return False
    for part in (faults.folder, "could not be written", "Fix: "):
        assert part in text
    return True


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", "eio"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_fault_at_any_call_is_told_and_leaves_what_was_there(
    writer: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.keep.run_folder.installation", dict)  # which takes half a second
    whole = tmp_path / "whole"
    _before(whole)
    with installed(WriteFaults(folder=str(whole))) as counted:
        WRITERS[writer](whole)
    assert counted.calls
    for at in range(1, len(counted.calls) + 1):
        folder = tmp_path / str(at)
        old = _before(folder)
        told = _told(
            partial(WRITERS[writer], folder), WriteFaults(folder=str(folder), at=at, kind=kind)
        )
        left, written = _files(folder), _files(whole)
        for name, data in old.items():
            if name in left or writer not in ("checkpoint", "best version", "drawing"):
                kept = left[name] in (data, written[name]) or left[name].startswith(data)
                assert kept, (at, name)
        call = counted.calls[at - 1]
        fails = ("open", "write", "rename", *(["fsync"] if kind == "eio" else []))
        assert told or call[0] not in fails, f"{call} failed in silence"
        assert not _halves(folder), call
        assert CheckpointStore(folder / "checkpoints").latest() is not None


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".a.tmp").symlink_to(tmp_path / "mine")
    replace_text("it", tmp_path / "a", "new")
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "a").is_symlink()


def test_a_drawing_goes_where_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to("there")
    write_to_user_path("the drawing", tmp_path / "link", "new")
    assert (tmp_path / "there").read_text() == "new"
    assert (tmp_path / "link").is_symlink()
    write_to_user_path("the drawing", Path("/dev/null"), "new")
    told = "/dev/full: the drawing could not be written: the disk is full"
    with pytest.raises(StorageError, match=told):
        write_to_user_path("the drawing", Path("/dev/full"), "new")


def test_a_log_that_cannot_be_written_neither_ends_nor_hides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Path("/dev/full").open("a")  # noqa: SIM115 - closed by the log
    monkeypatch.setattr(LogFile, "_open", lambda self: full)

    def run() -> None:
        with log_to_file(tmp_path / "main.log"):
            for text in ("one", "two"):
                logging.getLogger("engine.test").info(text)
            raise RunError("the cause")

    with pytest.raises(RunError, match="the cause"):
        run()
    shown = capsys.readouterr().err
    assert shown.count("could not be written: the disk is full") == 1
    assert "Traceback" not in shown


def test_a_log_has_where_the_run_was_ended_and_the_screen_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError), log_to_file(tmp_path / "main.log"):
        _ = 1 // 0
    assert "ZeroDivisionError" in (tmp_path / "main.log").read_text()
    assert capsys.readouterr().err == ""


def assert_said_once(caplog: pytest.LogCaptureFixture, text: str) -> None:
    assert [record.getMessage().count(text) for record in caplog.records] == [1]


@pytest.mark.parametrize("kind", ["full", "eio"])
def test_a_trace_that_cannot_be_written_is_said_once_and_left_out(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = WriteFaults(folder=str(tmp_path), at=4, kind=kind)
    with installed(faults), closing(Trace(tmp_path / "run.json")) as trace:
        for second in range(4):
            trace.instant("a", "moment", float(second))
            trace.flush()
    assert_said_once(caplog, "The run goes on without a trace")
    assert len(read_trace(tmp_path / "run.json")) == 3  # the track's names and one moment


@pytest.mark.parametrize(
    "error", [_FULL, storage_error("the view tensorboard", Path("/x/a"), _FULL)]
)
def test_a_view_that_cannot_be_written_is_said_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    sink = Mock(spec=["open", "write", "close"])
    sink.write.side_effect = error
    view = View("tensorboard", sink)
    view.open(RunFolder.open_remote(tmp_path), {})
    view.take(StepEnded(step=1, metrics={}))
    view.take(StepEnded(step=2, metrics={}))
    view.close()
    assert [name for name, *_ in sink.method_calls] == ["open", "write"]
    assert_said_once(caplog, "the view tensorboard could not be written")


def test_what_a_worker_prints_into_a_full_disk_is_lost_and_nothing_else() -> None:
    code = (
        "import os, sys; from engine.keep.worker_logs import make_output_ignore_full_disk;"
        " make_output_ignore_full_disk();[print('x' * 1000) for _ in range(100)]; print('y',"
        " file=sys.stderr); sys.stdout.flush(); os._exit(7)"
    )
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code]
        assert subprocess.call(command, cwd=ROOT, stdout=full, stderr=full, timeout=300) == 7


def test_the_first_cause_is_told_not_what_fails_as_things_are_closed() -> None:
    failing = Mock(close=Mock(side_effect=StorageError("later")))
    with pytest.raises(StorageError, match="first"), close_at_end(failing):
        raise StorageError("first")
    with pytest.raises(StorageError, match="later"), close_at_end(failing):
        pass


def test_a_sample_file_that_fails_behind_is_told_by_the_next_call(tmp_path: Path) -> None:
    with installed(WriteFaults(folder=str(tmp_path), at=4, kind="full")):
        behind = SamplesBehind(SampleWriter(tmp_path / "samples"))
        behind.write(1, _table())
        with pytest.raises(StorageError, match="the samples of step 1 could not be written"):
            behind.flush()
        behind.close()


def test_a_workers_error_arrives_as_what_it_was() -> None:
    error = Failed.of(storage_error("it", Path("/x"), _FULL), "train").error()
    assert type(error) is StorageError
    assert "the disk is full" in str(error)
    failed = Failed.of(ZeroDivisionError("of\nours"), "train")
    assert failed.text.startswith("worker train: internal error: ZeroDivisionError: of ours. Fix: ")
    assert "\n" not in failed.text


def test_a_run_says_what_is_safe_and_how_it_goes_on(tmp_path: Path) -> None:
    def told() -> str:
        with pytest.raises(StorageError) as caught, telling_what_is_safe(tmp_path):
            raise StorageError("the cause.")
        return str(caught.value)

    safe, again = "the cause. Safe: ", f"`dataflow resume {tmp_path}`"
    assert told() == safe + "nothing had begun; start it again."
    (tmp_path / "options.json").write_text("{}")
    assert told() == safe + f"no checkpoint had been made; {again} begins again at step 1."
    for name in ("step_2", "step_10", ".tmp-step_12"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert told() == safe + f"the checkpoint of step 10, from which {again} goes on."


def test_what_is_safe_is_said_from_anywhere_and_where_it_cannot_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "a" / "checkpoints" / "step_24").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def told(spoil: Callable[[], object]) -> str:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(StorageError) as caught, telling_what_is_safe(Path("runs/a")):
            fails(after=spoil)
        return str(caught.value).removeprefix("the cause. Safe: ")

    def fails(after: Callable[[], object]) -> None:
        after()
        raise StorageError("the cause.")

    def closed(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    resume = "`dataflow resume runs/a`"
    here = f"the checkpoint of step 24, from which {resume} goes on."
    assert told(lambda: os.chdir(tmp_path / "elsewhere")) == here
    with monkeypatch.context() as patched:
        unseen = "what there is cannot be seen now (Too many open files); "
        assert told(lambda: patched.setattr(os, "listdir", closed)) == (
            f"{unseen}{resume} looks for the last checkpoint."
        )
    gone = "nothing, as runs/a is not there any more; start it again."
    assert told(lambda: shutil.rmtree(tmp_path / "runs")) == gone


def test_checkpoints_that_will_not_fit_are_told_of_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trained = PlannedModel(name="policy", base="b", writer="train", parameters=1 << 30)
    plan = plan_of(models=(trained, PlannedModel(name="fixed", base="b", parameters=1 << 40)))
    monkeypatch.setattr("engine.keep.checkpoint.disk_space.free_bytes", lambda path: 35 << 30)
    warn_of_room(plan, tmp_path, RunOptions(keep=2))
    told = (
        "2 checkpoints of about 12.0 GiB each, and one more while it is written, need 36.0 GiB"
        " more; found 35.0 GiB"
    )
    assert told in caplog.text
    caplog.clear()
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "sparse").touch()
    os.truncate(tmp_path / "step_1" / "sparse", 12 << 30)
    warn_of_room(plan, tmp_path, RunOptions(keep=2))
    warn_of_room(plan, tmp_path / "none", RunOptions(keep=1))
    assert caplog.text == ""


def test_memory_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Mock(side_effect=OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    monkeypatch.setattr("engine.channels.shm.outbox.BlockIndex", nothing)
    told = r"outbox: expected 1 MiB for its block index, found: .*Cannot allocate.*Fix: "
    with pytest.raises(StorageError, match=told):
        SlabOutbox(SlabPool(limit=1 << 20), 0)


def test_what_a_kill_leaves_of_metrics_does_not_stand_in_the_way(tmp_path: Path) -> None:
    run = RunFolder.create("r", tmp_path)
    (run.path / ".metrics.jsonl.tmp").write_text("half")
    (run.path / ".graph.json.tmp").write_text("half")
    run.close()
    with RunFolder.open_existing(run.path) as again:
        _metrics(again.path, lambda lines: None)
        assert not _halves(again.path)
    RunFolder.create("r", tmp_path, overwrite=True).close()


def test_files_that_arrow_and_python_write_count_alike(tmp_path: Path) -> None:
    """The faults see opens, writes and renames within the folder and nowhere else."""
    (tmp_path / "in").mkdir()
    with installed(WriteFaults(folder=str(tmp_path / "in"))) as faults:
        (tmp_path / "in" / "a").write_text("x")
        (tmp_path / "out").write_text("x")
        with io.open(tmp_path / "in" / "b", "ab+") as file:  # noqa: UP020 - both names are hooked
            file.write(b"x")
        os.rename(tmp_path / "in" / "b", tmp_path / "in" / "c")
    calls = [("open", "a"), ("write", "a"), ("open", "b"), ("write", "b"), ("rename", "c")]
    assert faults.calls == calls
