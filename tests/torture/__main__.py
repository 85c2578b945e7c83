"""`python -m tests.torture [--short] [--part NAME ...] [--seed N] [--json FILE]`: every part, then the table.

Owns: the order and the exit status (1 where a case did not hold). Does not own: the cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from pathlib import Path

from tests.torture.outcome import Outcome, table

PARTS = tuple(
    name
    for name in ("signals", "disk", "rewards", "data", "models", "forged")
    if (Path(__file__).parent / f"{name}.py").exists()
)


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--short", action="store_true", help="A few cases of each kind: at most 3 minutes in all.")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    for part in options.part or PARTS:
        found = importlib.import_module(f"tests.torture.{part}").torture(options.short, options.seed)
        outcomes += found
        print(table(found), flush=True)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(o) for o in outcomes], indent=1), encoding="utf-8")
    print(table(outcomes))
    return int(any(o.fault for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
