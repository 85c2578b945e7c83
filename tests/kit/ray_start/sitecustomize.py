"""Python imports this as it starts, in processes of a Ray cluster of tests: what runs on Ray forks
its Workers, as other tests do (forked.py).

It is quick for Ray's own processes, which import nothing of the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Installing:
    """Of `sys.meta_path`: it finds nothing, and installs forks before the engine starts any."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "engine.launch.process":
            sys.meta_path.remove(self)
            from tests.kit import forked

            forked.install()
        return None


if any(word.endswith("default_worker.py") for word in sys.orig_argv):
    sys.meta_path.insert(0, _Installing())
