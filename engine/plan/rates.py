"""Whose rates count for a node on a kind of device: a profile's before the catalogue's.

Owns: the choice. Does not own: rates (engine/plan/cost), which device a node is on (costs.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dataflow.kernel import Layout
from engine.plan.cost.devices import (
    KINDS,
    Coefficients,
    Device,
    Kind,
    catalogue,
    coefficients,
    device,
)
from engine.plan.cost.fit_errors import measured_over_fitted
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.node_price import NodeWork
from engine.plan.cost.profile import Profile, ProfiledNode
from engine.plan.plan import PlannedNode
from engine.plan.profiled_passes import kind_of_pass, nearest_entry
from engine.plan.row_lengths import RowLengths


class Rates:
    """Of a profile, or of the catalogue alone."""

    def __init__(self, profile: Profile | None) -> None:
        self._profile = profile

    def measured_device(self, kind: str) -> Device | None:
        """The device of the profile, if it is of this kind."""
        if self._profile is None or self._profile.device.name != kind:
            return None
        return self._profile.device

    def why_unknown(self, kind: str) -> str:
        """Why nothing is known of a kind of device; empty if something is."""
        if kind in catalogue().devices or self.measured_device(kind):
            return ""
        return f"nobody has measured a {kind} GPU" if kind else "its kind of GPU is not known"

    def find_entry(
        self, node: PlannedNode, model: Sizes | None, kind: str, cores: int
    ) -> ProfiledNode | None:
        """What the profile says of a node's passes on such a device; None if it has none. cores: of
        one rank.
        """
        if model is None or self._profile is None or self.measured_device(kind) is None:
            return None
        return nearest_entry(self._profile, node, model, kind_of_pass(node), cores)

    def find_device(self, kind: str, *, is_measured: bool) -> Device:
        """The device, with the rates that a node's coefficients are shares of. is_measured: whether
        the profile has the node's passes.

        Passes that a profile has get its rates. Others get the catalogue's, so that no rate of one
        Model's machine, perhaps a busy one, is mixed with shares of the catalogue; unless that does
        not have the device.
        """
        measured = self.measured_device(kind)
        if measured is not None and (is_measured or kind not in catalogue().devices):
            return measured
        return device(kind or "GPU of no known kind")

    def find_coefficients(
        self, node: PlannedNode, model: Sizes | None, where: Device, cores: int
    ) -> Mapping[Kind, Coefficients]:
        """The catalogue's, but for those that were measured of this Model on such a device."""
        by_kind = dict(coefficients(where))
        if self._profile is None or model is None or self._profile.device.name != where.name:
            return by_kind
        for kind in KINDS:
            entry = nearest_entry(self._profile, node, model, kind, cores)
            if entry is not None:
                by_kind[kind] = entry.coefficients
        return by_kind


def correct_by_work(entry: ProfiledNode | None, work: NodeWork, layout: Layout) -> float:
    """The same for what a node does in a Step, by the rows of one replica."""
    if entry is None:
        return 1.0
    rows = -(-work.rows // layout.replicas)
    prompt, answer = work.lengths.prompts.mean, work.lengths.answers.mean
    # As many rows of the mean lengths, which is all that a correction looks at.
    like = RowLengths(np.broadcast_to(prompt, rows), np.broadcast_to(answer, rows))
    return correct_by_cells(entry, like, layout.data)


def correct_by_cells(entry: ProfiledNode | None, rows: RowLengths, divisor: int = 1) -> float:
    """The factor on fitted seconds: what a profile measured of rows like a rank's of these over
    what its fit says, times what a run adds.
    """
    if entry is None or not len(rows):
        return 1.0
    prompt, answer = float(rows.prompts.mean()), float(rows.answers.mean())
    factor = measured_over_fitted(entry.cells, len(rows) / divisor, prompt, answer)
    return entry.in_run * factor
