"""How a command ends that the operating system lets go no further: one line that says so."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from dataflow.errors import PlanError, RunError
from engine.cli import main

Command = Callable[..., tuple[int, str]]
"""Words -> exit code, errors."""


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def called(*words: str) -> tuple[int, str]:
        code = main(list(words))
        return code, capsys.readouterr().err

    return called


PANIC = type("PanicException", (BaseException,), {})
"""As Rust's libraries raise it."""
REFUSED = OSError(errno.EAGAIN, "Resource temporarily unavailable")


def caused_by(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        REFUSED,
        caused_by(PlanError("a Model that can be loaded"), RuntimeError("can't start new thread")),
        PANIC('ThreadPoolBuildError { message: "Resource temporarily unavailable" }'),
    ],
)
def test_no_more_processes_is_one_line_that_says_so(
    monkeypatch: pytest.MonkeyPatch, command: Command, error: BaseException
) -> None:
    def failing(_: object) -> int:
        raise error

    monkeypatch.setattr("engine.cli.check.main", failing)
    code, shown = command("check", "x")
    assert code == 3
    assert shown.strip().startswith("this user may start no more processes or threads. Fix: ")


def test_an_error_that_names_the_limit_itself_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def failing(_: object) -> int:
        raise caused_by(RunError("worker a: no process. Fix: ulimit -u."), REFUSED)

    monkeypatch.setattr("engine.cli.check.main", failing)
    assert command("check", "x")[1] == "worker a: no process. Fix: ulimit -u.\n"


def test_a_panic_of_another_kind_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def failing(_: object) -> int:
        raise PANIC("index out of bounds")

    monkeypatch.setattr("engine.cli.check.main", failing)
    assert command("check", "x")[1].startswith("internal error: PanicException: index out of")


def test_a_current_folder_that_was_deleted_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    message = "dataflow: the current folder was deleted. Fix: cd to a folder that is there.\n"
    for words in (("check", "graphs.grpo:grpo"), ("runs",), ("resume", "x")):
        assert command(*words) == (2, message)
