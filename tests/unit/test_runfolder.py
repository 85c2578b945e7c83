"""The folder of a run: what it holds, and that two runs never share one."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from dataflow.errors import RunError
from engine.keep import run_folder as runfolder
from engine.keep.metrics.sinks import JsonLines
from engine.keep.run_folder import LOCK, RunFolder
from engine.keep.trace.timeline import Trace
from engine.keep.worker_logs import log_to_file


def test_a_new_run_folder_records_what_is_run(run_folder: RunFolder) -> None:
    versions = json.loads((run_folder.path / "versions.json").read_text())
    assert versions["packages"]["pyarrow"] == pa.__version__
    assert versions["python"].startswith("3.")
    assert set(versions["git"]) == {"commit", "changed"}
    assert sys.executable in (run_folder.path / "command.txt").read_text()
    for folder in (run_folder.samples, run_folder.trace, run_folder.checkpoints):
        assert folder.is_dir()
    assert run_folder.log("decode/0").parent.is_dir()
    assert run_folder.log("decode/0").name == "decode_0.log"
    run_folder.write_text("plan.txt", "a plan")
    assert (run_folder.path / "plan.txt").read_text() == "a plan"
    with pytest.raises(ValueError, match="not a file of a run folder"):
        run_folder.write_text("other.txt", "")


def test_a_folder_that_is_used_is_not_begun_again(ended: Path) -> None:
    told = r"found .*Fix: resume that run, choose another --name, or --overwrite it"
    with pytest.raises(RunError, match=told):
        RunFolder.create("a", ended.parent)
    (ended / "metrics.jsonl").write_text("old")
    (ended / "checkpoints" / "step_3").mkdir()
    with RunFolder.create("a", ended.parent, overwrite=True) as run_folder:
        assert not run_folder.metrics.exists()
        assert not list(run_folder.checkpoints.iterdir())
    (ended.parent / "empty").mkdir()
    RunFolder.create("empty", ended.parent).close()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_was_killed_at_its_first_record_leaves_nothing_in_the_way(
    tmp_path: Path, overwrite: bool
) -> None:
    torn = tmp_path / "a" / ".versions.json.tmp"
    torn.parent.mkdir()
    torn.touch()
    with RunFolder.create("a", tmp_path, overwrite=overwrite):
        assert not torn.exists()


def test_the_first_records_of_a_folder_that_is_a_link_stay(tmp_path: Path) -> None:
    torn = tmp_path / "theirs" / ".versions.json.tmp"
    torn.parent.mkdir()
    torn.touch()
    (tmp_path / "a").symlink_to("theirs")
    with pytest.raises(RunError, match="expected no such folder or an empty one"):
        RunFolder.create("a", tmp_path)
    assert torn.exists()


@pytest.mark.parametrize("content", ["thesis.tex", "metrics.jsonl"])
def test_overwrite_never_deletes_what_is_not_a_runs(tmp_path: Path, content: str) -> None:
    work = tmp_path / "mine" / content
    work.parent.mkdir()
    work.touch()
    told = f"overwrite=True deletes only what a run made, found {content}"
    with pytest.raises(RunError, match=told):
        RunFolder.create("mine", tmp_path, overwrite=True)
    assert list(work.parent.iterdir()) == [work]


def test_a_foreign_file_in_a_run_folder_is_kept(ended: Path) -> None:
    (ended / "notes.md").touch()
    with pytest.raises(RunError, match=r"found notes.md"):
        RunFolder.create("a", ended.parent, overwrite=True)
    assert (ended / "versions.json").exists()


@pytest.mark.parametrize("name", ["", "..", "a/b", "/abs", ".hidden", "a b"])
def test_a_name_that_is_no_folders_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="expected letters, digits"):
        RunFolder.create(name, tmp_path)


def test_a_file_in_the_folders_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(RunError, match="expected a folder, found a file"):
        RunFolder.create("a", tmp_path, overwrite=True)


def test_only_a_runs_folder_can_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RunError, match="expected the folder of an earlier run"):
            RunFolder.open_existing(path)
    assert not list(tmp_path.iterdir())


def test_two_runs_never_hold_one_folder(run_folder: RunFolder, tmp_path: Path) -> None:
    told = f"another run .process {os.getpid()}. is writing it"
    with pytest.raises(RunError, match=told):
        RunFolder.open_existing(run_folder.path)
    with pytest.raises(RunError, match=told):
        RunFolder.create("first", tmp_path, overwrite=True)
    run_folder.close()
    run_folder.close()
    with RunFolder.open_existing(run_folder.path) as again:
        assert again.name == "first"


_HOLDER = """
import os, sys
from engine.keep.run_folder import RunFolder
run = RunFolder.open_existing(sys.argv[1])
if sys.argv[2] == "with a child" and os.fork() == 0:  # a forked Worker that outlives the run
    run.close()
    print("held", flush=True)
elif sys.argv[2] == "alone":
    print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["alone", "with a child"])
def test_a_killed_run_lets_its_folder_go(ended: Path, kind: str) -> None:
    command = [sys.executable, "-c", _HOLDER, str(ended), kind]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(RunError, match=f"process {holder.pid}"):
                RunFolder.open_existing(ended)
        finally:
            holder.kill()
            holder.wait(timeout=300)
        # While the child, if there is one, still waits for its input.
        RunFolder.open_existing(ended).close()


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder beside the runs, in which nothing may change."""
    folder = tmp_path / "victim"
    (folder / "inside").mkdir(parents=True)
    for name in ("notes.txt", "inside/thesis.txt"):
        (folder / name).write_text("years of work")
    yield folder
    assert sorted(p.name for p in folder.rglob("*")) == ["inside", "notes.txt", "thesis.txt"]
    assert all(p.read_text() == "years of work" for p in folder.rglob("*.txt"))


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, made once: its record of versions takes longer than what is tested."""
    folder = tmp_path_factory.mktemp("runs")
    RunFolder.create("a", folder).close()
    return folder / "a"


@pytest.fixture
def ended(ended_run: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(ended_run, tmp_path / "a")


INSIDE = (
    LOCK, "metrics.jsonl", "versions.json", "graph.json", "samples", "checkpoints", "logs",
    "logs/main.log", "trace", "checkpoints/step_3", "samples/step_000001.parquet", "tensorboard",
    ".plan.json.tmp", "checkpoints/.tmp-step_3",
)  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("kind", ["a link", "a pipe"])
def test_a_run_goes_on_in_no_folder_that_leads_out_of_it(
    victim: Path, ended: Path, name: str, kind: str
) -> None:
    path = ended / name
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(victim / ("inside" if "." not in name else "notes.txt"))
    told = f"the run folder's own, found {kind}"
    told = "expected the folder of an earlier run" if name == "versions.json" else told
    with pytest.raises(RunError, match=told):
        RunFolder.open_existing(ended)


def _go_on(path: Path) -> None:
    """Open what a run appends to, or begins anew."""
    with RunFolder.open_existing(path) as run_folder:
        JsonLines().open(run_folder, {})
        Trace(run_folder.trace / "run_0.json")
        with log_to_file(run_folder.log("main")):
            pass


@pytest.mark.parametrize("name", [LOCK, "metrics.jsonl", "trace/run_0.json", "logs/main.log"])
def test_what_is_cut_or_appended_to_has_one_name(victim: Path, ended: Path, name: str) -> None:
    (ended / LOCK).unlink()
    os.link(victim / "notes.txt", ended / name)
    with pytest.raises(RunError, match="second name elsewhere"):
        _go_on(ended)
    os.unlink(ended / name)


def test_overwrite_deletes_links_and_not_what_they_lead_to(
    tmp_path: Path, victim: Path, ended: Path
) -> None:
    for name in ("samples", "checkpoints"):
        (ended / name).rmdir()
        (ended / name).symlink_to(victim / "inside")
    for name in ("plan.txt", ".plan.txt.tmp", ".versions.json.tmp", "metrics.jsonl"):
        (ended / name).symlink_to(victim / "notes.txt")
    with RunFolder.create("a", tmp_path, overwrite=True) as run_folder:
        run_folder.write_text("plan.txt", "a plan")
        assert not run_folder.samples.is_symlink()
        assert not (run_folder.path / "plan.txt").is_symlink()
    ended.rename(victim / "a")
    ended.symlink_to(victim / "a")
    with pytest.raises(RunError, match="deletes only what is in it, found a link"):
        RunFolder.create("a", tmp_path, overwrite=True)
    shutil.rmtree(victim / "a")


def test_the_lock_has_one_length(ended: Path) -> None:
    (ended / LOCK).write_text("1234567890\n")
    with RunFolder.open_existing(ended):
        text = (ended / LOCK).read_text()
    assert (text.strip(), len(text)) == (str(os.getpid()), 11)


def test_asking_whether_a_folder_is_held_keeps_no_run_out(
    ended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone shares the lock just as a run wants it, and lets it go again."""
    asker, taken = os.open(ended / LOCK, os.O_RDONLY), runfolder._try_lock
    fcntl.flock(asker, fcntl.LOCK_SH)
    tried = []

    def let_go_after(lock: int, kind: int) -> bool:
        tried.append(kind)
        found = taken(lock, kind)
        if len(tried) == 2:
            fcntl.flock(asker, fcntl.LOCK_UN)
        return found

    monkeypatch.setattr(runfolder, "_try_lock", let_go_after)
    RunFolder.open_existing(ended).close()
    os.close(asker)
    assert tried == [fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_EX]
