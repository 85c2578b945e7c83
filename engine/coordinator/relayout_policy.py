"""When a run switches to another layout: after EARL (arXiv:2510.05943, its Parallelism Selector).

    live tokens     rows of a Step x their mean length, measured at each Step's end
    bucket          that of min(mean, last); a higher one is entered 15 % beyond its start
    has to fit      max(mean, last) and the growth of the mean; where it is entered, 35 % more
    forced switch   the present layout does not fit
    closed          a layout in which a node's memory ran out, from the bucket of that Step on, with
                    those in which the node stands alike; none where it does so in all
    other switch    Steps until the bucket is left x seconds saved in each > 1.25 x its cost

The mean is exponential. EARL has neither margins nor a cost. These lean to the smaller layout: a
large one that is wrong costs up to 32 % there, a small one at most 6.5 %. So noise of 10 % at a
boundary never enters a higher bucket, and a lower one is entered at once.

Owns: the decision, and its reason in words. Does not own: the table (engine/plan/layout_table.py),
what is measured (relayouts.py), nor how a switch is carried out (engine/session/layouts.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.plan.layout_table import LIVE_TOKENS, LayoutTable

SMOOTHING = 0.3
"""The share of the last Step in the mean."""
ENTRY = 1.15
"""How far beyond its start a higher bucket is entered."""
ROOM = 1.35
"""How much more than the predicted peak has to fit into a layout that is entered."""
MARGIN = 0.25
"""How much more than the cost of a switch has to be gained."""
HORIZON = 100
"""Steps for which a gain counts where nobody knows how many are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSwitch:
    """Go on with another layout of the table. forced: the present one does not fit."""

    layout: int
    reason: str
    forced: bool = False


class RelayoutPolicy:
    """One run's. table: with what was closed since. layout: the number of the present one. cost:
    seconds of a switch, as measured. switches: how often there was one.
    """

    def __init__(self, table: LayoutTable, layout: int = 0) -> None:
        self.table = table
        self.layout = layout
        self.cost = table.switch_seconds
        self.switches = 0
        self.stands: Mapping[str, Sequence[str]] = {}
        """Of each node how it stands in each layout: in equal ones it needs as much memory."""
        self._short_nodes: set[str] = set()
        """Whose memory ran out in the Step that is under way."""
        self._unreported: float | None = None
        self._step = 0
        self._mean = self._last = 0.0
        self._slope = 0.0
        """What the mean grew by in the last Step."""
        self._bucket: int | None = None

    def note_step(self, step: int, live_tokens: float) -> None:
        """Take what a Step had; one that is repeated was noted. 0: nothing was measured."""
        if live_tokens > 0:
            self._close(live_tokens)
        if step <= self._step or live_tokens <= 0:
            return
        self._step, self._last = step, live_tokens
        before = self._mean or live_tokens
        self._mean = before + SMOOTHING * (live_tokens - before)
        self._slope = self._mean - before
        self._bucket = self._settle(min(self._mean, live_tokens))

    def note_short(self, node: str) -> None:
        """A node's memory ran out in the present layout, in the Step that is under way."""
        self._short_nodes.add(node)

    def _close(self, live_tokens: float) -> None:
        """Close the layouts in which memory ran out, as the Step has had so many live tokens."""
        for node in sorted(self._short_nodes):
            stands = self.stands.get(node, range(len(self.table.layouts)))
            alike = [n for n, stand in enumerate(stands) if stand == stands[self.layout]]
            if len(alike) < len(stands):
                self.table = self.table.close_from(alike, live_tokens)
        self._short_nodes.clear()

    def note_switch(self, layout: int) -> None:
        """The run goes on with this layout."""
        self.layout = layout
        self.switches += 1

    def note_cost(self, seconds: float) -> None:
        """Take what the last switch took."""
        self.cost = self._unreported = seconds

    def close(self, layout: int, why: str) -> None:
        """A layout cannot be had."""
        self.table = self.table.close(layout, why)

    def take_cost(self) -> float | None:
        """What the last switch took, once."""
        cost, self._unreported = self._unreported, None
        return cost

    def _settle(self, live_tokens: float) -> int:
        """The bucket that counts from now on."""
        entered = self.table.bucket_at(live_tokens / ENTRY)
        if self._bucket is None:
            return entered
        return min(max(self._bucket, entered), self.table.bucket_at(live_tokens))

    def choose(self, steps_left: int | None) -> LayoutSwitch | None:
        """Say whether to switch before the next Step. steps_left: None where the data decides."""
        if self._bucket is None or steps_left == 0:
            return None
        peak = max(self._mean, self._last) + max(0.0, self._slope)
        best = self._best(peak)
        if best is None or best == self.layout:
            return None
        measured = f"{self._mean:.0f} {LIVE_TOKENS} (the last step {self._last:.0f})"
        if not self.table.fits(self.layout, peak):
            why = f"{peak:.0f} do not fit into layout {self.layout}"
            return LayoutSwitch(layout=best, reason=f"{measured}: {why}", forced=True)
        why = self._worth(best, steps_left)
        if why is None:
            return None
        return LayoutSwitch(layout=best, reason=f"{measured}: {why}")

    def _best(self, peak: float) -> int | None:
        """The best layout that can be had; where none has room, the best that fits at all."""
        assert self._bucket is not None
        table = self.table
        best = table.buckets[self._bucket].best
        if best == self.layout and table.fits(best, peak):
            return best
        for needed in (peak * ROOM, peak, self._last):
            if table.fits(best, needed):
                return best
            fitting = [n for n in range(len(table.layouts)) if table.fits(n, needed)]
            if fitting:
                return min(fitting, key=lambda n: (self._seconds(n), n != self.layout, n))
        return None

    def _seconds(self, layout: int) -> float:
        """For a choice among layouts; the same for all where nobody knows."""
        assert self._bucket is not None
        seconds = self.table.buckets[self._bucket].seconds_in(layout)
        return 0.0 if math.isnan(seconds) else seconds

    def _worth(self, best: int, steps_left: int | None) -> str | None:
        """Why a switch pays, in words; None if it does not."""
        assert self._bucket is not None
        bucket = self.table.buckets[self._bucket]
        present, fastest = bucket.seconds_in(self.layout), bucket.seconds_in(best)
        if math.isnan(present):
            return f"the table has layout {best} there"
        steps = min(self._steps_here(), HORIZON if steps_left is None else steps_left)
        gain = steps * (present - fastest)
        if gain <= self.cost * (1 + MARGIN):
            return None
        return (
            f"a step takes {fastest:.3g} s in layout {best}, {present:.3g} s in layout"
            f" {self.layout}; {steps:.0f} steps save {gain:.3g} s, a switch costs {self.cost:.3g} s"
        )

    def _steps_here(self) -> float:
        """How many Steps the bucket is not left, as the mean grows or shrinks now."""
        assert self._bucket is not None
        if self._slope > 0:
            way = self.table.end_of(self._bucket) * ENTRY - self._mean
        elif self._slope < 0:
            way = self.table.buckets[self._bucket].start - self._mean
        else:
            return math.inf
        return max(1.0, way / self._slope)
