"""The command scripts/gpu: its options, the card, and the last table.

Owns: what is printed, and the exit code. Does not own: the parts (gpu_parts.py), wheels
(gpu_wheels.py). Imports the standard library alone, until wheels are there.

A part that fails, or is killed at its limit, makes the exit code 1. A goal that is not met does
not: the table shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_parts import LAST, PARTS, ROOT, PartEnd, PartFolders, PartRuns
from gpu_wheels import collect_wheels, describe_project, install_wheels

_PATIENCE = 30.0
"""Seconds for nvidia-smi; the first call after a start of the machine loads the driver."""
_MEMORY = Path("/dev/shm")
_ROOM = 16 << 30
"""Bytes that must be free there: the Model's directory has 3 GiB, weights on their way as many."""
_LINES = 25
"""Of the log of a part that failed."""


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Ends the process for words that it does not know."""
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=6.0, help="for all parts together")
    parser.add_argument("--quick", action="store_true", help="the short form, on any CPU")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels of what is missing here")
    parser.add_argument("--collect", type=Path, help="fetch such wheels into a folder, and end")
    parser.add_argument("--results", type=Path, help="a folder for results")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these parts alone")
    arguments = parser.parse_args(words)
    if not 0.0 < arguments.minutes < 1440.0:
        parser.error(f"--minutes: expected more than 0, found {arguments.minutes:g}. Fix: 6.")
    if arguments.wheels is not None and not any(arguments.wheels.glob("*.whl")):
        problem = f"expected a folder with wheels, found none in {arguments.wheels}"
        parser.error(f"--wheels: {problem}. Fix: scripts/gpu --collect FOLDER where pip works.")
    return arguments


def find_card() -> str | None:
    """The name of the first CUDA device; None without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return None
    names = answer.stdout.splitlines()
    return names[0].strip() if answer.returncode == 0 and names else None


def main(words: Sequence[str]) -> int:
    """Run all parts; returns the exit code."""
    begun = time.monotonic()
    arguments = read_arguments(words)
    if arguments.collect is not None:
        collect_wheels(arguments.collect)
        return 0
    card = find_card()
    if card is None and not arguments.quick:
        problem = "expected a CUDA device, found none that nvidia-smi names"
        fix = "run it where there is one, or scripts/gpu --quick for the short form on this CPU"
        print(f"gpu: {problem}. Fix: {fix}.", file=sys.stderr)
        return 2
    logs = ROOT / "runs/gpu"
    results = arguments.results
    if results is None:
        results = logs if arguments.quick else ROOT / "benchmarks/results"
    scratch = Path(tempfile.mkdtemp(prefix="gpu-", dir=_find_memory()))
    # So that parts are ended, and the folder goes, if this is.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if arguments.wheels is not None:
            install_wheels(arguments.wheels, scratch / "site")
        describe_project(scratch / "site")
        runs = PartRuns(
            parts=[part for part in PARTS if part.name in arguments.only],
            folders=PartFolders(results=results.resolve(), logs=logs, base=scratch / "base"),
            seconds=60.0 * arguments.minutes - (time.monotonic() - begun) - LAST,
            environment=_make_environment(scratch),
            quick=arguments.quick,
        )
        runs.run()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    minutes = (time.monotonic() - begun) / 60.0
    print(f"\n{card or 'no card: the short form, whose numbers are not to be quoted'}")
    print("\n".join(table_lines(runs.ends, runs.folders)))
    print(f"{minutes:.1f} of {arguments.minutes:g} minutes; results in {results}, logs in {logs}")
    return int(any(end.failed for end in runs.ends))


def _find_memory() -> str | None:
    """A folder in memory, if it has room; None for the usual one."""
    if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM:
        return str(_MEMORY)
    return None


def _make_environment(scratch: Path) -> dict[str, str]:
    """Variables of the parts. Absolute folders: Workers of a run import from them, too."""
    folders = os.pathsep.join([str(scratch / "site"), str(ROOT)])
    temporary = scratch / "temporary"
    temporary.mkdir()
    return os.environ | {
        "PYTHONPATH": folders,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(temporary),
        "TOKENIZERS_PARALLELISM": "false",
        # There is no network where a card is.
        "HF_HUB_OFFLINE": "1",
    }


def table_lines(ends: Sequence[PartEnd], folders: PartFolders) -> Iterator[str]:
    """Each part with how it ended, and its results; of one that failed, the end of its log."""
    for end in ends:
        yield f"\n{end.part.name}: {end} ({end.seconds:.0f} s of {end.limit:.0f})"
        output = folders.output(end.part)
        if output.is_file():
            yield from map(_result_line, json.loads(output.read_text()))
        if end.failed and folders.log(end.part).is_file():
            lines = folders.log(end.part).read_text(errors="replace").splitlines()
            yield from (f"  | {line}" for line in lines[-_LINES:])


def _result_line(result: dict[str, object]) -> str:
    """A result in columns; whether its goal is met stands at the end."""
    held = {None: "", True: "yes", False: "NO"}[result["holds"]]  # type: ignore[index]
    goal = ""
    if result["goal"] is not None:
        goal = f"goal {result['goal']:g}"
    return f"  {result['name']:60} {result['value']:12.4g} {result['unit']:8} {goal:10} {held}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
