"""A process that a kernel has started and that ends by itself: what is said of it, and that its
Worker is lost with it.
"""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass
from typing import Any

import pytest

from dataflow.errors import DataError, KernelError, ProcessLost
from engine.run.worker_process import worker_process
from engine.run.worker_process.worker_process import FailureReport
from operators.kernels.vllm import engine_errors
from operators.kernels.vllm.engine_errors import NotesCause, VllmErrors, first_cause, noted_causes


@dataclass
class FakeRank:
    """exitcode: None while it runs. sentinel: can be read once it has ended."""

    exitcode: int | None
    sentinel: int = -1

    def __post_init__(self) -> None:
        self.sentinel, self.writer = os.pipe()
        if self.exitcode is not None:
            os.close(self.writer)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_errors, "NOTICED", 0.0)


def raised_with(ranks: list[FakeRank], error: Exception) -> BaseException:
    """What comes of this error in an engine of these ranks."""
    expected = "its vLLM engine to answer"
    with pytest.raises(Exception) as raised, VllmErrors("policy", expected, ranks):
        raise error
    return raised.value


def test_an_error_in_a_rank_is_said_without_what_vllm_says_around_it() -> None:
    error = "Worker failed with error 'expected finite logits', please check the stack trace above"
    assert first_cause(RuntimeError(error)) == "expected finite logits"
    assert first_cause(ValueError("no such\n block.")) == "ValueError: no such block"


def failed_start(error: Exception) -> None:
    """What a rank logs of an error in its start."""
    log, handler = logging.getLogger("a rank's"), NotesCause()
    log.addHandler(handler)
    try:
        raise error
    except ValueError:
        log.exception("WorkerProc failed to start.")
    finally:
        log.removeHandler(handler)


def test_a_rank_that_does_not_start_says_why() -> None:
    """To the engine's process vLLM says only that there is a stack trace."""
    error = RuntimeError("WorkerProc initialization failed. See stack trace for root cause.")
    with noted_causes() as noted:
        errors = VllmErrors("policy", "vLLM to start", [], "--kernel NODE=torch", noted)
        for number in range(2):
            failed_start(ValueError(f"no weights\n for rank {number}."))
        with pytest.raises(KernelError) as raised, errors:
            raise error
    message = "Model 'policy': expected vLLM to start, found ValueError: no weights for rank 0."
    assert str(raised.value) == f"{message} Fix: --kernel NODE=torch."
    assert not noted.exists()


def test_an_error_while_all_ranks_run_is_the_kernels() -> None:
    error = raised_with([FakeRank(None), FakeRank(None)], RuntimeError("no such block"))
    assert type(error) is KernelError
    message = (
        "Model 'policy': expected its vLLM engine to answer, found RuntimeError: no such block."
    )
    assert str(error).startswith(message)


@pytest.mark.parametrize(
    ("codes", "told"),
    [
        ((0, -signal.SIGKILL), "its rank 1 of 2 was killed by SIGKILL"),
        ((-signal.SIGTERM, 3), "its rank 1 of 2 ended with code 3"),
        ((None, -signal.SIGSEGV), "its rank 1 of 2 was killed by SIGSEGV"),
    ],
)
def test_the_rank_that_ended_by_itself_is_named(codes: Any, told: str) -> None:
    error = raised_with([FakeRank(code) for code in codes], RuntimeError("cancelled"))
    assert type(error) is ProcessLost
    assert str(error).endswith(f"found that {told}.")


def test_an_error_of_this_project_stays_what_it_is() -> None:
    error = DataError("a prompt")
    assert raised_with([], error) is error


class KeptFrames:
    """A control socket that keeps what is sent."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)


def test_a_worker_whose_kernel_lost_a_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is lost and begins again; it does not tell of a failure, which ends the run."""
    link = KeptFrames()

    def end(code: int, why: str) -> None:
        raise SystemExit(f"{code}: {why}")

    monkeypatch.setattr(worker_process, "end", end)
    message = "1: its rank 1 of 2 was killed by SIGKILL"
    with pytest.raises(SystemExit, match=message), FailureReport(link, "rollout"):  # type: ignore[arg-type]
        raise ProcessLost("its rank 1 of 2 was killed by SIGKILL")
    assert not link.frames


def test_another_failure_of_a_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    link = KeptFrames()
    monkeypatch.setattr(worker_process, "end", lambda *_: pytest.fail("it ended"))
    with FailureReport(link, "rollout"):  # type: ignore[arg-type]
        raise KernelError("no such block")
    assert len(link.frames) == 1
