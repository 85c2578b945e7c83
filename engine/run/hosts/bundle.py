"""What a host of the plan needs of a node of the cluster, as Ray names it.

Owns: resources and labels of a bundle, and words for them. Does not own: asking for one (ray.py),
what a host needs (host_bundles.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto

GPU = "gpu"
"""The label of a host that is the kind of its GPUs, which for Ray is a resource."""
KIND = "accelerator_type:"
NODE = "ray.io/node-id"
_SOME = 0.001
"""Of a resource that says what a node is, and of which nobody uses anything up."""


class BundleState(Enum):
    """Of a bundle that nobody of the run is in."""

    GONE = auto()
    """Its node is gone, or Ray has not placed it."""
    SILENT = auto()
    """A host was lost on its node, which has not answered since."""
    BUSY = auto()
    """Its node answers; the process of the host that was there has not ended."""
    FREE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What one host of the plan needs. node: the one that it has to be while that is there, if any;
    label: one that its node has.
    """

    host: str
    cores: int
    gpus: int = 0
    node: str = ""
    label: tuple[str, str] | None = None

    @property
    def resources(self) -> dict[str, float]:
        """How much of what."""
        amounts = {"CPU": float(self.cores)}
        if self.gpus:
            amounts["GPU"] = float(self.gpus)
        if self.label is not None and self.label[0] == GPU:
            amounts[f"{KIND}{self.label[1]}"] = _SOME
        return amounts

    def selector(self, alive: Collection[str], avoided: Collection[str]) -> dict[str, str]:
        """The labels that its node must have. alive, avoided: nodes."""
        labels: dict[str, str] = {}
        if self.label is not None and self.label[0] != GPU:
            labels.update([self.label])
        if self.node in alive and self.node not in avoided:
            labels[NODE] = self.node
        elif avoided:
            labels[NODE] = f"!in({','.join(avoided)})"
        return labels

    def covers(self, other: Bundle) -> bool:
        """Whether another host has all that it needs in this bundle."""
        return other.label in (None, self.label) and other.fits(self.resources)

    def fits(self, free: Mapping[str, float]) -> bool:
        """Whether there is as much free."""
        return all(free.get(kind, 0.0) >= count for kind, count in self.resources.items())

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPU" if self.gpus else ""
        return f"{self.host} ({self.cores} CPU{gpus})"


def what_is_free(every: Mapping[str, float], free: Mapping[str, float]) -> str:
    """`1 of 2 CPU, 0 of 1 GPU free`: of all resources of a node."""
    kinds = [kind for kind in ("CPU", "GPU") if every.get(kind)] or ["CPU"]
    shown = (f"{free.get(k, 0.0):g} of {every.get(k, 0.0):g} {k}" for k in kinds)
    return f"{', '.join(shown)} free"
