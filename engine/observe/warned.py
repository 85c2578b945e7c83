"""Warnings of a run on the screen and in its log.

Owns: showing each once, by its name and place, and that with `strict` the first ends the run. Does
not own: what is warned of (dataflow/rules/doubtful.py, engine/plan/warnings.py,
engine/coordinator/doubtful.py).
"""

from __future__ import annotations

import logging

from dataflow.errors import GraphWarning, Origin, RunError

_log = logging.getLogger(__name__)


class Warned:
    """What has been shown in a run, whichever of its attempts it was."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._shown: set[tuple[str, str, Origin | None]] = set()

    def show(self, warning: GraphWarning) -> None:
        """Once. Raises RunError where the run is strict."""
        if self._strict:
            raise RunError(str(warning))
        name = (warning.rule, warning.where, warning.origin)
        if name not in self._shown:
            self._shown.add(name)
            _log.warning("warning: %s", warning)
