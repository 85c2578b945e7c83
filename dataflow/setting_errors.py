"""The errors of settings: texts that name nothing, or give what is not taken.

Owns: their form. Does not own: what is refused (set_expressions.py, adapter_settings.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dataflow.errors import Fault, GraphError


def setting_error(text: str, problem: str, fix: str) -> GraphError:
    """The error of one setting's text."""
    where = f"setting {text!r:.80}"
    return GraphError(Fault(rule="setting", where=where, problem=problem, fix=fix))


def settings_error(texts: Sequence[str], error: GraphError) -> GraphError:
    """What a function of the language refused, as the fault of the settings."""
    where = "setting " + ", ".join(f"{text!r:.80}" for text in texts)
    return GraphError(
        [replace(f, rule="setting", where=f"{where}: {f.where}", origin=None) for f in error.faults]
    )
