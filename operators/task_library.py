"""reasoning-gym, imported also where pycosat is missing, a package that one of its tasks needs.

Owns: that import. Does not own: tasks (tasks.py).

pycosat has no wheels: installing it takes a C compiler and Python's headers, and `make setup` does
without. reasoning-gym imports it as it is imported itself; only zebra_puzzles calls it.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from dataflow.errors import DataError

_SOLVER = "pycosat"


def import_library(module: str = "reasoning_gym") -> Any:
    """A module of reasoning-gym. Raises ModuleNotFoundError where that is not installed; making an
    entry of zebra_puzzles without pycosat raises DataError.
    """
    if "reasoning_gym" in sys.modules or find_spec(_SOLVER) is not None:
        return importlib.import_module(module)
    sys.modules[_SOLVER] = _NoSolver(_SOLVER)
    try:
        return importlib.import_module(module)
    finally:
        sys.modules.pop(_SOLVER, None)


class _NoSolver(ModuleType):
    """Stands where pycosat is imported, and refuses to be used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise DataError(
            f"reasoning_gym:zebra_puzzles: needs the package {_SOLVER}, found none. Fix: pip"
            f" install {_SOLVER}, which takes a C compiler and Python's headers."
        )
