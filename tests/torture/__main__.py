"""`python -m tests.torture [--short] [--part NAME ...] [--seed N] [--json FILE]`: all parts.

Each part runs in its own process; then the table. Exits with 1 if a case failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.kit import forked
from tests.kit.processes import call_python
from tests.torture.outcome import CaseResult, table

LANES = (("disk",), ("data", "models", "forged"))
"""Parts that run side by side: one core is enough for each, and none is limited to seconds."""
ALONE = ("rewards", "signals")
"""Parts that use two cores by themselves."""
LIMIT = 6 * 3600.0
"""Seconds for one part."""
LINES, WIDTH = 60, 200
"""Of what a part that failed has printed."""
PARTS = (*(part for lane in LANES for part in lane), *ALONE)


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    short = "A few cases of each kind: at most 3 minutes in all."
    parser.add_argument("--short", action="store_true", help=short)
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup, which what is started inherits
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    forked.install()
    if options.part and len(options.part) == 1:
        part = importlib.import_module(f"tests.torture.{options.part[0]}")
        results = part.torture(options.short, options.seed)
    else:
        results = _several(options.part or PARTS, options.short, options.seed)
    if options.json:
        written = json.dumps([dataclasses.asdict(result) for result in results], indent=1)
        options.json.write_text(written, encoding="utf-8")
    print(table(results))
    return int(any(result.fault for result in results))


def _several(parts: Sequence[str], short: bool, seed: int) -> list[CaseResult]:
    def in_turn(lane: Sequence[str]) -> list[CaseResult]:
        asked = [part for part in lane if part in parts]
        return [result for part in asked for result in _in_a_process(part, short, seed)]

    with ThreadPoolExecutor(len(LANES)) as pool:
        lanes = [result for lane in pool.map(in_turn, LANES) for result in lane]
    return lanes + in_turn(ALONE)


def _end(said: str) -> str:
    """The last lines, none of them long: some cases print megabytes, and the faults are what has to
    be found.
    """
    return "\n".join(line[:WIDTH] for line in said.splitlines()[-LINES:])


def _in_a_process(part: str, short: bool, seed: int) -> list[CaseResult]:
    """One part; where a case of it failed or it did not end, the end of its output is shown."""
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        kept = Path(folder) / "results.json"
        words = ["-m", "tests.torture", "--part", part, "--seed", seed, "--json", kept]
        done = call_python(*words, *(["--short"] if short else []), timeout=LIMIT)
        if done.returncode:
            print(_end(done.stderr), flush=True)
        if not kept.is_file():
            fault = f"it ended with status {done.returncode}"
            return [CaseResult(part=part, case="the part itself", fault=fault)]
        results = [CaseResult(**each) for each in json.loads(kept.read_text(encoding="utf-8"))]
    print(table(results).partition("\n")[2], flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
