"""A run in a process of its own, to be killed: `run_script.py FOLDER RUNS GRAPH STEPS [resume]
[hold=N]`.

Prints `step N` for each Step; after that of `hold` it waits for a line, or the end, of its standard
input. Owns: nothing else; graphs are those of run_graphs.py, by their function's name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import run_graphs

from engine.api import resume, run
from engine.options import RunOptions

MAKE = {
    "evaluated": lambda folder: run_graphs.evaluated(folder, every=3, keep_best=1),
    "followed": run_graphs.followed,
    "lagging": lambda folder: run_graphs.small(folder, max_lag=1),
    "stuck": lambda folder: run_graphs.small(folder, run_graphs.says_and_hangs),
    "apart": lambda folder: run_graphs.evaluated(folder, every=3, keep_best=1),
    "overlapping": lambda folder: run_graphs.small(folder, max_lag=1),
}
WORKERS = {"overlapping": "auto", "apart": "apart"}
"""Where it is not one."""


def tell(step: int) -> None:
    print(f"step {step}", flush=True)
    if f"hold={step}" in sys.argv[5:]:
        sys.stdin.readline()


def main() -> None:
    folder, runs, graph, steps = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    told = [lambda row: tell(row["step"])]
    if "resume" in sys.argv[5:]:
        result = resume(runs / "killed", on_step=told)
    else:
        options = RunOptions(
            steps=steps,
            name="killed",
            runs=runs,
            threads=1,
            workers=WORKERS.get(graph, "one"),
            progress=False,
            checkpoint_every=2,
        )
        result = run(MAKE[graph](folder), options, on_step=told)
    print(result.reason, flush=True)
    sys.exit(128 + result.signal if result.signal else 0)


if __name__ == "__main__":
    main()
