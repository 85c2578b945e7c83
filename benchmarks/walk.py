"""How far a batch walks through the code: the files and rooms of engine/ that one Step enters.

    python -m benchmarks.walk [--quick] [--json FILE]

Owns: the trace and what is counted. Does not own: how results are shown (report.py).

GRPO runs in one process; its third Step is traced. `files`: the files of engine/ in which a
function is called between the admission of the Step's prompts and the end of its training. `room
switches`: how often, until the next Step's prompts are admitted, a call is in another folder of
engine/ than the call before. The plan's data types (engine/plan), which every room reads, are not a
room.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import FrameType

import tyro

from benchmarks.report import SideResult, machine, show, write_json
from benchmarks.rewards import REWARDS
from benchmarks.settings import SETTINGS, prepare
from engine.api import run
from engine.coordinator.prompt_table import PromptTable
from engine.coordinator.training import Training
from engine.plan.options import RunOptions
from graphs.grpo import grpo

ENGINE = Path(__file__).resolve().parents[1] / "engine"
FILES, SWITCHES = 24, 45
Call = tuple[str, str]
"""(file below engine/, qualified name of the function)."""


def traced() -> list[Call]:
    """Every call into engine/ of a run of four Steps, in order."""
    setting = prepare(replace(SETTINGS["short"], name="walk", teacher_steps=0))
    calls: list[Call] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(ENGINE)):
            calls.append((path[len(str(ENGINE)) + 1 :], frame.f_code.co_qualname))

    graph = grpo(
        setting.model_dir, setting.data, REWARDS[setting.reward], n=4, batch=4, max_tokens=4
    )
    with tempfile.TemporaryDirectory() as folder:
        options = RunOptions(steps=4, runs=Path(folder), threads=1, progress=False, inproc=True)
        sys.setprofile(note)
        try:
            run(graph, options)
        finally:
            sys.setprofile(None)
    return [call for call in calls if room(call[0]) != "plan"]


def room(file: str) -> str:
    """The folder of engine/ that a file is in; engine/ itself counts as one."""
    return file.partition("/")[0] if "/" in file else ""


def third_step(calls: list[Call]) -> tuple[list[Call], list[Call]]:
    """Its calls until it is trained, and until the next Step's prompts are admitted."""
    names = [name for _, name in calls]
    admitted = [i for i, name in enumerate(names) if name == PromptTable.admit.__qualname__]
    begin, end = admitted[2], admitted[3]
    trained = names.index(Training.end_turn.__qualname__, begin, end)
    return calls[begin:trained], calls[begin:end]


def switches(calls: Iterable[Call]) -> int:
    """How often a call is in another room than the call before."""
    return sum(room(before) != room(after) for (before, _), (after, _) in pairwise(calls))


def main(*, quick: bool = False, json: Path | None = None) -> None:
    """Print how far a batch walks. quick: no effect; there is nothing to shorten."""
    until_trained, step = third_step(traced())
    files = {file for file, _ in until_trained}
    results = [
        SideResult(name="walk/files", value=len(files), unit="files", goal=FILES, least=False),
        SideResult(
            name="walk/room_switches",
            value=switches(step),
            unit="switches",
            goal=SWITCHES,
            least=False,
        ),
    ]
    where = machine()
    show("How far a batch walks", results, where)
    if json is not None:
        write_json(json, results, where)


if __name__ == "__main__":
    tyro.cli(main)
