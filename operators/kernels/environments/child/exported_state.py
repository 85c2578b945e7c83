"""What of an environment's attributes leaves its process: those that JSON can hold.

Owns: which attributes are exported, and as what. Does not own: which environment exports what
(adapters).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def export_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Export the public ones that JSON can hold; arrays and numbers of numpy become lists and
    numbers. The others are left out.
    """
    exported: dict[str, Any] = {}
    for name, content in attributes.items():
        if not isinstance(name, str) or name.startswith("_"):
            continue
        try:
            text = json.dumps(content, default=_as_plain, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            continue
        exported[name] = json.loads(text)
    return exported


def _as_plain(content: Any) -> Any:
    """What json cannot write, as something that it can. Raises TypeError where there is no such."""
    if isinstance(content, (set, frozenset)):
        return sorted(content)
    if hasattr(content, "tolist"):  # numpy's and torch's
        return content.tolist()
    if hasattr(content, "model_dump"):  # pydantic's
        return content.model_dump(mode="json")
    raise TypeError(type(content).__name__)


def as_number(content: Any) -> float | None:
    """An attribute that may be a reward, as a float; None for what is no number."""
    if content is None or isinstance(content, (str, bytes)):
        return None
    try:
        return float(content)
    except (TypeError, ValueError):
        return None
