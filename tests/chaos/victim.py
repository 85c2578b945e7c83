"""A run to be killed: `python -m tests.chaos.victim CASE FOLDER RUNS [resume]`.

Owns: the cases: graphs and places. Does not own: who is killed when (kills.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "processes"), str(HERE.parent / "unit")]

import run_graphs  # noqa: E402

from dataflow.graph import Graph  # noqa: E402
from engine.api import resume, run  # noqa: E402
from engine.options import RunOptions  # noqa: E402

STEPS = 24
BATCH, SAMPLES = 4, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A graph and where its nodes are. chunks: of both the run and the one that it is compared
    with.
    """

    graph: Callable[[Path], Graph]
    places: Mapping[str, Any] = field(default_factory=dict)
    chunks: Mapping[str, int] = field(default_factory=dict)
    max_lag: int = 0
    exact: bool = True
    """Whether its numbers are those of the run in one process, to the bit."""
    samples: int = SAMPLES

    def options(self, runs: Path, name: str, **places: Any) -> RunOptions:
        return RunOptions(
            steps=STEPS,
            name=name,
            runs=runs,
            threads=1,
            progress=False,
            checkpoint_every=3,
            chunks=dict(self.chunks),
            **places,
        )


CASES = {
    "apart": Case(graph=run_graphs.small, places={"workers": "apart"}),
    "replicas": Case(
        graph=run_graphs.small,
        places={
            "workers": "apart",
            "replicas": {"rollout": 3},
            "together": (("score", "advantage"),),
        },
        chunks={"rollout": 3},
    ),
    "evaluated": Case(
        graph=lambda folder: run_graphs.evaluated(folder, every=4, keep_best=1),
        places={"workers": "apart"},
    ),
    "followed": Case(graph=run_graphs.followed, places={"workers": "apart"}, samples=1),
    "ranks": Case(
        graph=run_graphs.small,
        places={"workers": "apart", "ranks": {"train_policy": 2}},
        exact=False,
    ),
    "tensor": Case(
        graph=run_graphs.small,
        places={"workers": "apart", "tensor": {"train_policy": 2}},
        exact=False,
    ),
    "turns": Case(
        graph=run_graphs.followed,
        places={
            "workers": "one",
            "pin": {
                "rollout": "gen",
                "train_policy": "actor-0,actor-1",
                "train_critic": "critic-0,critic-1",
            },
            "ranks": {"train_policy": 2, "train_critic": 2},
            "turns": (("gen", "actor-0", "critic-0"), ("actor-1", "critic-1")),
        },
        exact=False,
        samples=1,
    ),
    "lagging": Case(
        graph=lambda folder: run_graphs.small(folder, max_lag=1),
        places={"workers": "apart", "replicas": {"rollout": 2}},
        max_lag=1,
        exact=False,
    ),
}


def main() -> None:
    name, folder, runs = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    case = CASES[name]
    if sys.argv[4:] == ["resume"]:
        result = resume(runs / name)
    else:
        result = run(case.graph(folder), case.options(runs, name, **case.places))
    print(result.reason, flush=True)


if __name__ == "__main__":
    main()
