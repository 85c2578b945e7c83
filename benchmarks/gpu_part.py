"""A part of scripts/gpu, which has imported what it needs when its turn comes.

    python -m benchmarks.gpu_part MODULE ARGUMENTS      begins as a line comes on its input

Owns: importing beforehand, and waiting. Does not own: the parts and their time
(scripts/gpu_parts.py).

torch and transformers take five seconds to import, of each part: meanwhile the part before this one
has the card. Nothing here touches the card.
"""

from __future__ import annotations

import importlib
import runpy
import sys

IMPORTS = (
    "benchmarks.report",
    "engine.api",
    "operators.kernels.torch.generate",
    "operators.kernels.torch.train",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
)


def main(module: str, arguments: list[str]) -> None:
    """Import, wait for a line, and run the module with these arguments as `python -m` does. Ends
    at once if there is no line: whoever started this has ended.
    """
    for name in IMPORTS:
        importlib.import_module(name)
    if not sys.stdin.readline():
        return
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
