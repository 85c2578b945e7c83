"""Another layout from a Step's boundary on: what is measured for it, and when the run leaves.

    boundary     the policy says so as a Step is closed; nothing more is admitted
    drained      no prompt of any source runs: its rows are finished, and go into the checkpoint
    checkpoint   as at any boundary; a stop that someone asks for meanwhile goes first
    Relayout     the attempt ends, and the next begins at the checkpoint with the other layout

Owns: live tokens of a Step, and the switch that is on its way. Does not own: the decision
(relayout_policy.py), the moment of the checkpoint (course.py), the next attempt (engine/session).
"""

from __future__ import annotations

from engine.coordinator.relayout_policy import LayoutSwitch, RelayoutPolicy
from engine.coordinator.run_settings import Settings
from engine.coordinator.sources import Sources
from engine.plan.plan import Plan
from engine.protocol.loop_messages import Relayout
from engine.protocol.refs import Ref


class Relayouts:
    """chosen: the switch that is on its way; None for none, as in every run without a table."""

    def __init__(self, plan: Plan, settings: Settings, sources: Sources) -> None:
        self._policy: RelayoutPolicy | None = settings.relayout
        self._steps = settings.steps
        self._first = plan.first
        self._sources = sources
        batch = {source.name: source.batch for source in plan.sources}
        self._rows: dict[str, int] = {}
        """Generation above the cut -> rows of a Step."""
        for node in plan.nodes:
            if self._policy and node.traits.generates and node.region == "stream":
                self._rows[node.name] = node.rows * batch[node.source]
        self._tokens = dict.fromkeys(self._rows, 0)
        self._counts = dict.fromkeys(self._rows, 0)
        self.chosen: LayoutSwitch | None = None

    def note_rows(self, node: str, ref: Ref) -> None:
        """Rows of a node have come."""
        if node in self._rows:
            self._tokens[node] += int(ref.lengths.sum())
            self._counts[node] += len(ref.lengths)

    def note_short(self, node: str) -> None:
        """A node's memory ran out."""
        if self._policy is not None:
            self._policy.note_short(node)

    def end_step(self, step: int) -> dict[str, float]:
        """Take what a Step had, as it ends; returns its metrics."""
        if self._policy is None:
            return {}
        live = 0.0
        for node, rows in self._rows.items():
            live = max(live, rows * self._tokens[node] / max(1, self._counts[node]))
            self._tokens[node] = self._counts[node] = 0
        policy = self._policy
        policy.note_step(self._first + step, live)
        metrics = {
            "relayout/layout": float(policy.layout),
            "relayout/live_tokens": live,
            "relayout/switches": float(policy.switches),
        }
        cost = policy.take_cost()
        if cost is not None:
            metrics["relayout/seconds"] = cost
        return metrics

    def choose(self, step: int) -> bool:
        """Whether the run is to go on with another layout after this Step."""
        if self._policy is not None:
            left = None if self._steps is None else self._steps - step
            self.chosen = self._policy.choose(left)
        return self.chosen is not None

    @property
    def is_draining(self) -> bool:
        """Whether a switch waits for prompts to finish."""
        if self.chosen is None:
            return False
        return any(table.prompts.running for table in self._sources.tables.values())

    def take(self, step: int) -> Relayout | None:
        """Take the switch whose checkpoint is written."""
        chosen, self.chosen = self.chosen, None
        if chosen is None or self._policy is None:
            return None
        return Relayout(
            step=step,
            before=self._policy.layout,
            layout=chosen.layout,
            reason=chosen.reason,
            forced=chosen.forced,
        )

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        if self.is_draining:
            return ["another layout: waits for prompts that are under way"]
        return []
