"""Runs the tests of this folder on each of their engines: two processes of pytest at a time.

Owns: which files run on which engine, and in which turn of `.ci/run`. Does not own: the engine of
a process (conftest.py), where the processes come from (tests/kit/forked.py): all are forks of one
that has imported vLLM, which takes as long as many of these tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.kit import forked
from tests.kit.forked import ForkedPython
from tests.kit.turns import TURNS, VARIABLE
from tests.vllm.imported import ENVIRONMENT

FOLDER = Path("tests/vllm")
AT_ONCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTests:
    """files: parts of names. turns: those of which this is; without CI_TURN all are due."""

    kind: str
    ranks: int
    slots: int
    files: Sequence[str]
    turns: Collection[int] = range(TURNS)

    def due(self) -> bool:
        now = os.environ.get(VARIABLE)
        return now is None or int(now) % TURNS in self.turns

    def environment(self) -> dict[str, str]:
        return {
            "DATAFLOW_VLLM_KIND": self.kind,
            "DATAFLOW_VLLM_TENSOR": str(self.ranks),
            "DATAFLOW_VLLM_SLOTS": str(self.slots),
        }


ALONE = ("engine", "turns", "interact")
"""What is tested of an engine without a run, beside the contract."""

# What takes longest comes first, so that both processes end at about the same time. The contract
# is kept by some engine in each turn, and on two ranks there is something in each: in turn 2 the
# long tests (ci_parts.py).
SHORT = (
    EngineTests(kind="llama", ranks=2, slots=8, files=("contract",), turns=(1,)),
    EngineTests(kind="llama", ranks=2, slots=8, files=("runs",), turns=(0,)),
    EngineTests(kind="qwen2", ranks=1, slots=8, files=("runs",)),
    EngineTests(kind="qwen2", ranks=1, slots=8, files=("contract", *ALONE), turns=(0, 2)),
    EngineTests(kind="qwen2", ranks=1, slots=8, files=ALONE, turns=(1,)),
    EngineTests(kind="llama", ranks=1, slots=8, files=("contract", *ALONE), turns=(0,)),
    EngineTests(kind="qwen2", ranks=1, slots=64, files=("names", "agreement")),
    EngineTests(kind="qwen2", ranks=1, slots=8, files=("adapter",), turns=(1,)),
    EngineTests(kind="qwen2", ranks=1, slots=8, files=("merged",), turns=(2,)),
)
LONG = (
    EngineTests(kind="llama", ranks=2, slots=64, files=("agreement",)),
    EngineTests(kind="llama", ranks=2, slots=64, files=("runs",)),
    EngineTests(kind="qwen2", ranks=1, slots=8, files=("runs",)),
    EngineTests(kind="llama", ranks=1, slots=64, files=("agreement",)),
)


def passed(tests: EngineTests, marker: str, more: Sequence[str]) -> bool:
    """Run them to the end, then print their output."""
    files = [str(FOLDER / f"test_vllm_{each}.py") for each in tests.files]
    process = ForkedPython(
        [sys.executable, "-m", "pytest", "-m", marker, *files, *more],
        env={**os.environ, **tests.environment()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    with process:
        output, _ = process.communicate()
    title = f"== vLLM: {tests.kind}, {tests.ranks} tensor rank(s): {' '.join(tests.files)}"
    print(f"{title}\n{output}", end="", flush=True)
    return process.returncode == 0


def main(words: Sequence[str]) -> int:
    """[--long] [ARGUMENTS of pytest]: the exit code."""
    long = words[:1] == ["--long"]
    os.environ[forked.ALSO] = "tests.vllm.imported_now"
    os.environ[forked.UNDER] = json.dumps(ENVIRONMENT)
    forked.install()
    due = [tests for tests in (LONG if long else SHORT) if tests.due()]
    with ThreadPoolExecutor(AT_ONCE) as at_once:
        futures = [
            at_once.submit(passed, tests, "long" if long else "not long", words[long:])
            for tests in due
        ]
        return 0 if all(future.result() for future in futures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
