"""What a user's own code imports: check, plan, run, resume and compare as Python calls.

Owns: these names, and nothing behind them. Nothing of the engine imports this.

    result = run(my_graph("path/to/model", "prompts.parquet"), RunOptions(steps=100))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dataflow.graph import Graph
from engine.plan.options import RunOptions
from engine.session.background_run import RunHandle
from engine.session.calls import Until, peek, resume, run
from engine.session.planning import plan
from engine.session.run_result import Result

if TYPE_CHECKING:
    from engine.replay.rerun import Rerun

__all__ = ["Result", "RunHandle", "RunOptions", "Until", "peek", "plan", "rerun", "resume", "run"]


def rerun(
    folder: Path | str,
    nodes: Sequence[str],
    step: int,
    *,
    graph: Graph | None = None,
    settings: Sequence[str] = (),
) -> Rerun:
    """See `engine.replay.rerun.rerun_nodes`, which is imported by the first call: it brings what
    runs kernels.
    """
    from engine.replay.rerun import rerun_nodes

    return rerun_nodes(folder, nodes, step, graph=graph, settings=settings)
