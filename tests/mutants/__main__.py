"""`python -m tests.mutants --record [pytest arguments]`, or `python -m tests.mutants [names]`.

Owns: the command line and the table. Does not own: what is recorded (reach.py) or tried
(trials.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.mutants.code_faults import CodeFault, read_faults
from tests.mutants.reach import Reach, added_up, read_reach, record, write_reach


def main() -> int:
    arguments = sys.argv[1:]
    faults = read_faults()
    if arguments[:1] == ["--record"]:
        return _record(faults, arguments[1:])
    raise SystemExit("not yet")


def _record(faults: Sequence[CodeFault], arguments: Sequence[str]) -> int:
    fresh = arguments[:1] == ["--fresh"]
    new, status = record(faults, arguments[1:] if fresh else arguments)
    together = added_up(Reach() if fresh else read_reach(), new, faults)
    write_reach(together)
    missing = [fault.name for fault in faults if fault.name not in together.tests]
    print(f"{len(together.tests)} of {len(faults)} faults are reached by {len(new.seconds)} tests")
    if missing:
        print(f"not reached: {', '.join(missing)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
