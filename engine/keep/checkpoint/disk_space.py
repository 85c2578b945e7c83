"""Whether a run's checkpoints will fit on its disk: the estimate and the warning before it begins.

Does not own: what happens when the disk is full (store.py).
"""

from __future__ import annotations

import logging
from pathlib import Path

from dataflow.safe_text import shown_bytes
from dataflow.storage import free_bytes
from engine.plan.options import RunOptions
from engine.plan.plan import Plan

_log = logging.getLogger(__name__)

BYTES = 12
"""Per trained parameter: its weight and AdamW's two moments; 14 in bfloat16, with its copy."""


def warn_of_room(plan: Plan, folder: Path, options: RunOptions) -> None:
    """Warn if the checkpoints that are kept, and one more, will not fit; earlier ones count as
    room. Those that stay for good count as far as the Steps are known.
    """
    keep, every = options.keep, options.keep_every
    if every:
        for_good = (options.steps or 0) // every
    else:
        for_good = 0
    # 0 bytes if the sizes of its Models are unknown.
    each = sum(BYTES * (model.version_parameters or 0) for model in plan.models if model.writer)
    free = free_bytes(folder)
    earlier = sum(p.stat().st_size for p in folder.glob("step_*/**/*") if p.is_file())
    count = keep + for_good
    wanted = (count + 1) * each - earlier
    if free is not None and wanted > free:
        _log.warning(
            "%s: %d checkpoints of about %s each, and one more while it is written, need %s more;"
            " found %s free. Fix: free space there, fewer by %s, or another disk by --runs.",
            folder, count, shown_bytes(each), shown_bytes(wanted), shown_bytes(free),
            "--keep and --keep-every" if for_good else "--keep",
        )  # fmt: skip
