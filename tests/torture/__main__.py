"""`python -m tests.torture [--short] [--part NAME ...] [--seed N] [--json FILE]`: every part, then
the table.

Owns: the order of the parts, each in a process of its own, and the exit status (1 where a case did
not hold). Does not own: the cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.torture.outcome import Outcome, table

LANES = (("disk",), ("data", "models", "forged"))
"""Parts that run beside one another: one core is enough for each of them, and none has a time limit
of seconds.
"""
ALONE = ("rewards", "signals")
"""Parts that use two cores by themselves."""
PARTS = (*(part for lane in LANES for part in lane), *ALONE)


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument(
        "--short", action="store_true", help="A few cases of each kind: at most 3 minutes in all."
    )
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (
        signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    ):  # nohup: what is started would ignore it, too
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    if options.part and len(options.part) == 1:
        part = importlib.import_module(f"tests.torture.{options.part[0]}")
        outcomes = part.torture(options.short, options.seed)
    else:
        outcomes = _several(options.part or PARTS, options.short, options.seed)
    if options.json:
        options.json.write_text(
            json.dumps([dataclasses.asdict(o) for o in outcomes], indent=1), encoding="utf-8"
        )
    print(table(outcomes))
    return int(any(o.fault for o in outcomes))


def _several(parts: Sequence[str], short: bool, seed: int) -> list[Outcome]:
    with ThreadPoolExecutor(len(LANES)) as pool:
        lanes = pool.map(
            lambda lane: [o for p in lane if p in parts for o in _in_a_process(p, short, seed)],
            LANES,
        )
        found = [outcome for lane in lanes for outcome in lane]
    return found + [
        outcome for part in ALONE if part in parts for outcome in _in_a_process(part, short, seed)
    ]


def _in_a_process(part: str, short: bool, seed: int) -> list[Outcome]:
    """One part; what it prints is shown where a case of it did not hold, or where it came to no
    end.
    """
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        kept = Path(folder) / "outcomes.json"
        command = [
            sys.executable,
            "-m",
            "tests.torture",
            "--part",
            part,
            "--seed",
            str(seed),
            "--json",
            str(kept),
        ]
        made = subprocess.run(
            [*command, *(["--short"] if short else [])],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if made.returncode:
            print(made.stdout[-20_000:], made.stderr[-20_000:], sep="\n", flush=True)
        if not kept.is_file():
            return [
                Outcome(
                    part=part,
                    case="the part itself",
                    fault=f"it ended with status {made.returncode}",
                )
            ]
        found = [Outcome(**each) for each in json.loads(kept.read_text(encoding="utf-8"))]
    print(table(found).partition("\n")[2], flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
