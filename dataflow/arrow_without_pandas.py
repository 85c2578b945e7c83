"""Arrow without pandas, until somebody imports pandas.

Owns: keeping Arrow from importing pandas of its own accord. Does not own: in which processes
(engine/run/worker_process, operators/kernels/scoring_child.py).

Where pandas is installed, Arrow imports it as it makes its first array, to know a Series when it
sees one (Arrow 26): 0.2 s and 28 MiB in each process, which none of ours needs. Once the user's
code imports pandas, Arrow is told, and knows a Series. What it does not learn any more is
`pandas.NA` in a plain list that is converted `from_pandas=True`: that is then an error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import pyarrow as pa

_NAME = "pandas"


def keep_pandas_out() -> None:
    """Let Arrow do without pandas, unless somebody has imported it. No other thread may import it
    meanwhile.
    """
    if _NAME in sys.modules:
        return
    finder = _PandasFinder()
    sys.meta_path.insert(0, finder)
    pa.array([0])  # Arrow looks for pandas now, in C++ and in Python, and remembers the answer
    finder.hidden = False


class _PandasFinder(MetaPathFinder):
    """Finds no pandas while that is hidden; later tells Arrow of it as it is imported."""

    hidden = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of pandas as others find it, with a loader that tells Arrow; None of others."""
        if fullname != _NAME:
            return None
        if self.hidden:
            raise ModuleNotFoundError(f"{_NAME} is hidden from Arrow", name=_NAME)
        # Once is enough: this import of pandas is the one of which Arrow has to be told.
        sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            spec = finder.find_spec(fullname, path, target)
            if spec is None:
                continue
            if spec.loader is not None:
                spec.loader = _TellingLoader(spec.loader)
            return spec
        return None


class _TellingLoader(Loader):
    """Loads pandas, then has Arrow look for it again."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Do as pandas' own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module by its own loader, which it has from now on; then let Arrow look."""
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        # Arrow looks for pandas as this is read.
        pa.lib._pandas_api.pd  # type: ignore[attr-defined]  # noqa: B018
