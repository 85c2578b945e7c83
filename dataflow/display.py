"""How values show themselves in a notebook.

Owns: the method that IPython and Jupyter ask for. Does not own: what is shown; a class names the
function that says so by `module:function`, since that function knows the class.
"""

from __future__ import annotations

import importlib
from typing import Any


class Displayed:
    """A value with a page in a notebook, and a short `repr` everywhere else."""

    __slots__ = ()
    _page = ""
    """module:function of (value) that returns HTML."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """MIME type -> text, as IPython asks for it. It picks from what is returned."""
        module, _, name = self._page.partition(":")
        page = getattr(importlib.import_module(module), name)
        return {"text/plain": repr(self), "text/html": page(self)}
