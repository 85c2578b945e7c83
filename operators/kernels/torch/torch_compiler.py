"""torch.compile as the kernels use it: for passes of any number of tokens.

Owns: its settings. Does not own: what is compiled (compiled_layers.py, flex_pass.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

RECOMPILE_LIMIT = 64
"""Times that torch may compile one function: for each shape of heads, kind of layer and dtype, with
a gradient and without. A process has a few Models; torch's own limit is 8, beyond which it would go
on without what it compiled.
"""


def compile_for_all_lengths(
    function: Callable[..., Any], *, fullgraph: bool = False
) -> Callable[..., Any]:
    """Compile a function at its first call, for inputs of any lengths. fullgraph: whether a part
    that cannot be compiled is an error.
    """
    compile_function: Any = torch.compile
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return compile_function(
            function, dynamic=True, fullgraph=fullgraph, recompile_limit=RECOMPILE_LIMIT
        )
    # Before torch 2.12 it is a setting of the process, for whatever is compiled.
    settings: Any = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, RECOMPILE_LIMIT)
    return compile_function(function, dynamic=True, fullgraph=fullgraph)
