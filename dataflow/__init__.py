"""The language: states, ports, graphs, user operators and losses, and the check.

Owns: which names are public. Does not own: any of them. The operators are in the package
`operators`, the algorithms in `graphs`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dataflow.adapters import lora, subset
from dataflow.batch import Ragged
from dataflow.check import CheckedGraph, CheckedProgram, check
from dataflow.errors import (
    CheckpointError,
    DataError,
    DataflowError,
    Fault,
    GraphError,
    GraphWarning,
    KernelError,
    PlanError,
    ProcessLost,
    RunError,
    ShortOfMemory,
    StorageError,
)
from dataflow.graph import Graph, Phase, Threshold
from dataflow.import_order import describe_replaced_packages
from dataflow.loss import Loss, Now, Tensors, Terms, loss
from dataflow.model import Buffer, Model, Number, Schedule, Table, cosine, linear, warmup
from dataflow.node import Node, Port
from dataflow.program import Program
from dataflow.schema import (
    Advantage,
    Completion,
    Episode,
    Keep,
    Logprobs,
    Preference,
    Prompt,
    RankTerms,
    Returns,
    Reward,
    Rollout,
    Schema,
    Segment,
    TokenPrompt,
    TokenReward,
    Transition,
    TruncatedEpisode,
    TruncatedRollout,
    TruncatedSegment,
    TruncatedTransition,
    Values,
    Weight,
    column,
)
from dataflow.side_module import side
from dataflow.top_logprobs import TopLogprobs
from dataflow.user import Columns, operator

__all__ = [
    "Advantage",
    "Buffer",
    "CheckedGraph",
    "CheckedProgram",
    "CheckpointError",
    "Columns",
    "Completion",
    "DataError",
    "DataflowError",
    "Episode",
    "Fault",
    "Graph",
    "GraphError",
    "GraphWarning",
    "Keep",
    "KernelError",
    "Logprobs",
    "Loss",
    "Model",
    "Node",
    "Now",
    "Number",
    "Phase",
    "PlanError",
    "Port",
    "Preference",
    "ProcessLost",
    "Program",
    "Prompt",
    "Ragged",
    "RankTerms",
    "Returns",
    "Reward",
    "Rollout",
    "RunError",
    "Schedule",
    "Schema",
    "Segment",
    "ShortOfMemory",
    "StorageError",
    "Table",
    "Tensors",
    "Terms",
    "Threshold",
    "TokenPrompt",
    "TokenReward",
    "TopLogprobs",
    "Transition",
    "TruncatedEpisode",
    "TruncatedRollout",
    "TruncatedSegment",
    "TruncatedTransition",
    "Values",
    "Weight",
    "check",
    "column",
    "cosine",
    "linear",
    "lora",
    "loss",
    "operator",
    "side",
    "subset",
    "warmup",
]

if TYPE_CHECKING:
    __version__: str
else:  # unseen by type checkers, to whom any name would be one of this module's

    def __getattr__(name: str) -> str:
        """`__version__`, read from the installed package when it is asked for."""
        if name == "__version__":
            from importlib.metadata import version

            return version("dataflow-rl")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if _hidden := describe_replaced_packages():
    print(_hidden, file=sys.stderr)
