"""A run in its own process, to be killed or stopped.

    python -m tests.kit.killable_run GRAPH FOLDER OPTIONS [resume] [hold=N]

GRAPH: a name of GRAPHS or PROGRAMS; FOLDER: that of model and data; OPTIONS: the run's, as JSON. It
prints `step N` for each Step; after that of `hold` it waits for a line, or the end, of its standard
input.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dataflow.graph import Graph
from dataflow.program import Program
from engine.api import resume, run
from engine.plan.options import RunOptions, decode_options, encode_options
from tests.kit import algorithms, run_graphs, run_programs
from tests.kit.processes import limited, start_python
from tests.kit.runs import metrics, steps_stored

PROGRAMS: Mapping[str, Callable[[Path], Program]] = {"program": run_programs.two_phases}
GRAPHS: Mapping[str, Callable[[Path], Graph]] = {
    "small": run_graphs.small,
    "lagging": partial(run_graphs.small, max_lag=1),
    "followed": run_graphs.followed,
    "evaluated": partial(run_graphs.evaluated, every=3, keep_best=1),
    "evaluated every 4": partial(run_graphs.evaluated, every=4, keep_best=1),
    "agent": partial(algorithms.small, "agent"),
    "lagging agent": partial(algorithms.small, "agent", max_lag=1),
    "stuck": partial(run_graphs.small, fn=run_graphs.says_and_hangs),
}


def words(graph: str, folder: Path, options: RunOptions, *flags: str) -> list[str]:
    """The arguments for Python that start one."""
    return ["-m", "tests.kit.killable_run", graph, str(folder), encode_options(options), *flags]


@contextmanager
def killable_run(
    graph: str, folder: Path, options: RunOptions, *flags: str, path: Iterable[Path] = ()
) -> Iterator[subprocess.Popen[str]]:
    """One in its own session; it has ended afterwards in any case. path: see `start_python`."""
    given = words(graph, folder, options, *flags)
    process = start_python(*given, path=path, stdin=subprocess.PIPE, start_new_session=True)
    with limited(process):
        yield process


def require_stopped(process: subprocess.Popen[str], run: Path, by: str, code: int) -> str:
    """It ends by itself, says why, and leaves a checkpoint of its last Step. Returns its errors."""
    out, err = process.communicate()
    assert process.returncode == code, err
    assert f"stopped by {by}" in out
    assert "Traceback" not in err
    assert metrics(run)[-1]["step"] in steps_stored(run)
    return err


def main() -> None:
    graph, folder, text, *flags = sys.argv[1:]
    options = decode_options(text, {})[0]

    def tell(step: int) -> None:
        print(f"step {step}", flush=True)
        if f"hold={step}" in flags:
            sys.stdin.readline()

    told = [lambda row: tell(row["step"])]
    if "resume" in flags:
        result = resume(options.runs / str(options.name), on_step=told)
    else:
        made = {**GRAPHS, **PROGRAMS}[graph](Path(folder))
        result = run(made, options, on_step=told)
    print(result.reason, flush=True)
    sys.exit(128 + result.signal if result.signal else 0)


if __name__ == "__main__":
    main()
