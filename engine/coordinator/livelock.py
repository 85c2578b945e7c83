"""A run that is busy and completes no Step.

Owns: what counts as no progress, and for how long it may last. Does not own: who gives prompts up
(admission.py), nor a run that hangs, in which nothing moves at all (engine/run/loop/watchdog.py).

Progress is a Step. Time alone says nothing: generation may take hours. But no healthy run admits a
prompt, makes its rows with the version that the next Step starts from, and gives it up as too old
for that very Step: the same would happen again. All other ways to lose prompts have a limit:
rejections (max_attempts), dropped groups (the error budget), lost Workers (the limit on deaths).
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.coordinator.admission import Admission
from engine.plan.plan import Plan
from engine.plan.planned_source import PlannedSource


class Livelock:
    """patience: seconds for which prompts may be given up in vain; 0: for ever."""

    def __init__(self, plan: Plan, admissions: Mapping[str, Admission], patience: float) -> None:
        self._plan = plan
        self._admissions = admissions
        self._patience = patience
        self._since: float | None = None

    def find_cause(self, now: float) -> str:
        """Why the run will complete no Step; empty while it may. To be called at each event."""
        in_vain = [a for a in self._admissions.values() if a.vain.prompts]
        if not in_vain or self._patience <= 0:
            self._since = None
            return ""
        if self._since is None:
            self._since = now
        seconds = now - self._since
        if seconds < self._patience:
            return ""
        reasons = "; ".join(map(self._reason, in_vain))
        return f"no Step was completed for {seconds:.0f} s, though prompts are admitted: {reasons}"

    def _reason(self, admission: Admission) -> str:
        source, vain = admission.source, admission.vain
        rows = f"{self._plan.place(vain.node)} made rows" if vain.node else "rows were begun"
        return (
            f"{self._trainer_of(source)}: intake={source.intake!r} gave up {vain.prompts} prompts"
            f" of {source.name!r} since step {vain.version} as older than"
            f" max_lag={source.max_lag}: {rows} of version {vain.oldest}. Fix: intake='exact', or a"
            " greater max_lag."
        )

    def _trainer_of(self, source: PlannedSource) -> str:
        """The place of the first train node with rows of a source; else the source's name."""
        for node in self._plan.nodes:
            if node.work == "train" and source.name in self._plan.sources_of(node).values():
                return self._plan.place(node.name)
        return source.name
