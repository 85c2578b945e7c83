"""Names of metrics: their form, and those that only the engine may use.

Owns: what a name may be, and the names that a user's loss cannot take. Does not own: which metrics
there are (docs/metrics.md), what a metric of one name means (engine/keep/metrics/step_metrics.py).
"""

from __future__ import annotations

import re

_PART = re.compile(r"[A-Za-z0-9_.:<>-]+")
_FIRST = re.compile(r"[a-z][a-z0-9_]*")
_OF_THE_ENGINE = frozenset(
    {
        "completion",
        "coordinator",
        "cpu",
        "data",
        "edge",
        "eval",
        "evaluation",
        "flow",
        "loss",
        "optim",
        "phase",
        "prompt",
        "queue",
        "replicas",
        "reward",
        "rows",
        "step",
        "table",
        "throughput",
        "time",
        "train",
        "weights",
        "worker",
    }
)
"""First parts of names that the engine or a built-in node reports itself."""
_POLICY = ("policy/lag/", "policy/mismatch", "policy/sampled_entropy")


def is_metric_name(name: str) -> bool:
    """Whether it has parts of letters, digits and `_.:<>-` separated by slashes, the first in lower
    case (later ones may be a user's function, node or column).
    """
    if name == "step":  # a row's own Step, no metric
        return False
    first, *others = name.split("/")
    return _FIRST.fullmatch(first) is not None and all(map(is_part, others))


def is_part(text: str) -> bool:
    """Whether it can stand between the slashes of a name."""
    return _PART.fullmatch(text) is not None


def repair_part(text: str) -> str:
    """Make the nearest text that can stand between the slashes of a name."""
    return re.sub(r"[^A-Za-z0-9_.:<>-]+", "_", text.strip()) or "value"


def repair_name(name: str) -> str:
    """Make the nearest name that a metric can have."""
    lower = name.strip().lower()
    parts = [repair_part(part) for part in lower.split("/") if part.strip()]
    repaired = "/".join(parts)
    return repaired if is_metric_name(repaired) else "user/value"


def is_of_the_engine(name: str) -> bool:
    """Whether the engine reports a metric of this name, or of its kind, itself."""
    return name.partition("/")[0] in _OF_THE_ENGINE or name.startswith(_POLICY)
