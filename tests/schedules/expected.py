"""What should happen to each prompt, derived only from the outcomes of its rows."""

from __future__ import annotations

import numpy as np

from dataflow.batch import Keys
from engine.plan.plan import PlannedNode
from tests.schedules.plans import ScheduleCase

Prompt = tuple[int, int]
"""(position, attempt)."""


class Expected:
    """The fate of each prompt, from the outcomes of its rows."""

    def __init__(self, case: ScheduleCase) -> None:
        self.case = case
        self._rows: dict[tuple[str, Prompt], np.ndarray] = {}

    def keys(self, width: int, prompt: Prompt) -> Keys:
        return Keys.of([prompt[0]] * width, range(width), [prompt[1]] * width)

    def inputs(self, node: PlannedNode, prompt: Prompt) -> np.ndarray:
        """Boolean [inner]: the rows that reach a node."""
        if node.relation == "concat":
            return self._beside(node, prompt)
        there = np.ones(node.inner, dtype=bool)
        for i in [i for i in node.inputs if not i.fan_in]:
            there &= np.repeat(self.rows(self.case.plan.node(i.gate), prompt), i.ratio)
        return there

    def _beside(self, node: PlannedNode, prompt: Prompt) -> np.ndarray:
        """Boolean [rows]: those of each input; none if a select above refills."""
        parts = [self.case.plan.node(i.gate) for i in node.inputs]
        there = np.concatenate([self.rows(part, prompt) for part in parts])
        above = (n for part in parts for n in self.above(part))
        refilled = any(n.refill and not self.rows(n, prompt).any() for n in above)
        return there & (not refilled)

    def rows(self, node: PlannedNode, prompt: Prompt) -> np.ndarray:
        """Boolean [rows]: the rows that a node makes."""
        known = self._rows.get((node.name, prompt))
        if known is None:
            known = np.repeat(self.inputs(node, prompt), node.rows // node.inner)
            if node.relation == "subset":
                known = known & self.case.outcomes.draw_kept_rows(
                    node.name, self.keys(node.rows, prompt)
                )
            known = known & ~self._lost(node, prompt)
            self._rows[node.name, prompt] = known
        return known

    def _lost(self, node: PlannedNode, prompt: Prompt) -> np.ndarray:
        """Boolean [rows]: those that are lost alone, wherever they reach the node."""
        return self.case.outcomes.draw_lost_rows(node.name, self.keys(node.rows, prompt))

    def emptied(self, node: PlannedNode, prompt: Prompt) -> bool:
        """A node has no row of the prompt left, and lost one of those that reached it alone."""
        reached = np.repeat(self.inputs(node, prompt), node.rows // node.inner)
        has_lost = bool((reached & self._lost(node, prompt)).any())
        return has_lost and not self.rows(node, prompt).any()

    def fate(self, source: str, prompt: Prompt) -> str:
        """What becomes of a prompt: dropped, rejected or trained."""
        line = [n for n in self.case.plan.nodes if n.source == source and n.region == "stream"]
        for node in line:
            reached = np.repeat(self.inputs(node, prompt), node.rows // node.inner)
            failed = self.case.outcomes.draw_failed_rows(node.name, self.keys(node.rows, prompt))
            if self.childless(node, prompt) or (reached & failed).any():
                return "dropped"
            if self.emptied(node, prompt):
                return "dropped"
        if any(node.refill and not self.rows(node, prompt).any() for node in line):
            return "rejected"
        return "trained"

    def childless(self, node: PlannedNode, prompt: Prompt) -> bool:
        """A node that reduces has a row with nothing left below, and no select above refills."""
        for i in [i for i in node.inputs if i.fan_in]:
            below = self.case.plan.node(i.gate)
            left = self.rows(below, prompt).reshape(node.inner, i.fan_in).any(axis=1)
            refilled = any(n.refill and not self.rows(n, prompt).any() for n in self.above(below))
            return not refilled and bool((self.inputs(node, prompt) & ~left).any())
        return False

    def above(self, node: PlannedNode) -> list[PlannedNode]:
        """A node, and all whose rows its own come of."""
        return [node, *(n for gate in node.gates for n in self.above(self.case.plan.node(gate)))]

    def trained_rows(self, node: PlannedNode, prompt: Prompt) -> set[tuple[int, int, int]]:
        """Keys of the rows of a prompt that a train node gets."""
        there = self.inputs(node, prompt)
        return set(self.keys(node.inner, prompt).take(there).rows())
