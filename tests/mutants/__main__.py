"""`python -m tests.mutants [--baseline] [--json FILE] [names]`: try faults, all or these.

With `--record [--fresh] [pytest arguments]` as its first word it records instead which tests reach
them; records add up, unless it is fresh. Owns: the command line. Does not own: what is recorded
(reach.py), tried (trials.py) or compared (verdicts.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import queue
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.code_faults import CodeFault, FaultListError, line_number, read_faults
from tests.mutants.reach import Reach, added_up, read_reach, record, write_reach
from tests.mutants.tree_copies import TreeCopy
from tests.mutants.trials import try_fault
from tests.mutants.verdicts import (
    TrialVerdict,
    no_longer_caught,
    read_caught,
    summary,
    verdict_line,
    write_caught,
)

AT_ONCE = 2
"""Trials side by side: one core is enough for most tests."""


def main() -> int:
    """Record or try. Exits with 1 if a fault that was caught before is not caught now."""
    arguments = sys.argv[1:]
    try:
        faults = read_faults()
        if arguments[:1] == ["--record"]:
            return _record(faults, arguments[1:])
        return _try(faults, arguments)
    except FaultListError as error:
        print(error, file=sys.stderr)
        return 2


def _record(faults: Sequence[CodeFault], arguments: Sequence[str]) -> int:
    fresh = arguments[:1] == ["--fresh"]
    new, status = record(faults, arguments[1:] if fresh else arguments)
    together = added_up(Reach() if fresh else read_reach(), new, faults, read_caught())
    write_reach(together)
    missing = [fault.name for fault in faults if fault.name not in together.tests]
    print(f"{len(new.seconds)} tests passed; {len(together.tests)} of {len(faults)} are reached")
    if missing:
        print(f"not reached: {', '.join(missing)}")
    return status


def _try(faults: Sequence[CodeFault], arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="Of faults; all if none is named.")
    parser.add_argument("--json", type=Path, help="Write the verdicts to this file.")
    noted = "Note which are caught in tests/mutants/caught.json, as the state to hold."
    parser.add_argument("--baseline", action="store_true", help=noted)
    options = parser.parse_args(arguments)
    verdicts = []
    for verdict in _verdicts(_chosen(faults, options.names)):
        print(verdict_line(verdict), flush=True)
        verdicts.append(verdict)
    print(summary(verdicts))
    if options.json:
        written = json.dumps([dataclasses.asdict(verdict) for verdict in verdicts], indent=1)
        options.json.write_text(written + "\n", encoding="utf-8")
    lost = no_longer_caught(verdicts, read_caught())
    if options.baseline:
        write_caught(verdicts)
    for verdict in lost:
        print(f"caught before, and now {verdict.outcome}: {verdict.fault}")
    return int(bool(lost) and not options.baseline)


def _chosen(faults: Sequence[CodeFault], names: Sequence[str]) -> list[CodeFault]:
    """The faults of these names. Raises FaultListError for one that there is not."""
    by_name = {fault.name: fault for fault in faults}
    unknown = sorted(set(names) - by_name.keys())
    if unknown:
        raise FaultListError(f"expected names of faults, found {', '.join(unknown)}")
    return [by_name[name] for name in names] if names else list(faults)


def _verdicts(faults: Sequence[CodeFault]) -> Iterator[TrialVerdict]:
    """Try each fault, AT_ONCE side by side, each in a copy of its own."""
    reach = read_reach()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.SimpleQueue[TreeCopy] = queue.SimpleQueue()
        for number in range(AT_ONCE):
            copies.put(TreeCopy(Path(folder) / f"tree-{number}"))

        def tried(fault: CodeFault) -> TrialVerdict:
            copy = copies.get()
            try:
                return try_fault(fault, reach.tests.get(fault.name, ()), reach.seconds, copy)
            finally:
                copies.put(copy)

        for fault in faults:  # before the first trial: one that does not apply ends them all
            line_number(fault, TreeCopy.original(fault.file))
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            yield from pool.map(tried, faults)
        finally:
            pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    sys.exit(main())
