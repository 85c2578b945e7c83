"""What pytest captures of logging: the records that reach the root logger.

Owns: leaving the others out. Since 9.1 pytest also attaches its handlers to every logger that does
not propagate, and looks for those among the thousands of torch and transformers six times in each
test: 9 ms. No test asks for their records. Does not own: the capturing.
"""

from __future__ import annotations

import logging
from typing import Any

from _pytest.logging import catching_logs


def install() -> None:
    """From now on pytest attaches its handlers to the root logger alone."""
    catching_logs.__enter__ = _entered_at_root  # type: ignore[method-assign]


def _entered_at_root(logs: catching_logs[Any]) -> Any:
    root = logging.getLogger()
    if logs.level is not None:
        logs.handler.setLevel(logs.level)
        logs.orig_level = root.level
        root.setLevel(min(logs.orig_level, logs.level))
    root.addHandler(logs.handler)
    logs.attached_loggers.append(root)
    return logs.handler
