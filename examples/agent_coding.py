"""A coding task: the model sees what its program raised and mends it; its tests give the reward.

    python examples/agent_coding.py
    dataflow run graphs.agent:agent --environment examples/agent_coding.py:Coding ...

Programs run in processes of their own, which is no sandbox: run what a model wrote in a container,
or as a user who may do nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tiny

from engine.api import Result, run
from graphs.agent import agent
from operators.environments import Turn, isolated


# begin: what you add
class Coding:
    """Each turn is a whole program."""

    def reset(self, tests: list[str]) -> None:
        """tests: a column of the data."""
        self.tests = tests
        self.program = ""

    def step(self, message: dict[str, Any]) -> Turn:
        """Answer with what the program raised; one that raises nothing ends the episode."""
        self.program = message["content"]
        error = run_program(self.program)
        return Turn(messages=f"\n{error}\n", done=not error)

    def finish(self, reason: str) -> float:
        """The share of the tests that pass, whether the episode ended by itself or not."""
        errors = [run_program(f"{self.program}\n{test}") for test in self.tests]
        return errors.count("") / len(errors)


def run_program(text: str, seconds: float = 10.0) -> str:
    """The last line of what it raised; empty if it raised nothing."""
    command = [sys.executable, "-I", "-c", text]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not over after {seconds:g} s"
    lines = ended.stderr.strip().splitlines()
    return lines[-1] if ended.returncode else ""


# end


def write_tasks(path: Path) -> str:
    """Prompts with their tests."""
    rows: list[dict[str, Any]] = []
    for number in range(10):
        tests = ["assert isinstance(x, int)", f"assert x == {number}"]
        rows.append({"prompt": f"set x to {number}:\n", "tests": tests})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def main(steps: int = 4) -> Result:
    """A short run; the tiny model writes a program about never."""
    files = tiny.make()
    data = write_tasks(Path(files.train).with_name("tasks.jsonl"))
    environment = isolated(Coding, cpu_seconds=20, processes=2)
    limits: dict[str, Any] = {"max_turns": 2, "max_turn_tokens": 8, "max_tokens": 96}
    graph = agent(files.model, data, environment, n=2, batch=4, lr=5e-3, **limits)
    return run(graph, tiny.options("agent_coding", steps=steps), on_step=[tiny.show])


if __name__ == "__main__":
    main()
