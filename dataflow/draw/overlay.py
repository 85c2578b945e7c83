"""What a drawing shows beyond the graph: places, figures, room for a page.

Owns: the Overlay, and its facts in words. Does not own: where they stand in any form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dataflow.draw.measure import named
from dataflow.draw.node_places import Placed, PlacedWorker
from dataflow.draw.picture import Box
from dataflow.safe_text import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """life: room for a page's figures. notes: lines by node, by edge (`a->b`; of weights
    `model->reader`) or State.
    """

    life: bool = False
    placed: Placed | None = None
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def noted(self, name: str) -> list[str]:
        """The lines about something."""
        return [one_line(line) for line in self.notes.get(name, ())]

    def of_box(self, box: Box) -> list[str]:
        """The lines about a node; about each node of a folded chain, with its name."""
        if not box.members:
            return self.noted(box.name)
        return [f"{m.name}: {line}" for m in box.members for line in self.noted(m.name)]

    def workers_of(self, box: Box) -> tuple[str, ...]:
        """Where a node runs; empty if nothing is placed, or it is left out."""
        return tuple(self.placed.nodes.get(box.first, ())) if self.placed else ()

    def place(self, box: Box) -> str:
        """`x3 on gen, gen2, gen3`, `2 ranks on a, b`; empty on one Worker."""
        workers = self.workers_of(box)
        if self.placed is None or len(workers) < 2:
            return ""
        ranks = self.placed.ranks.get(box.first, 1)
        replicas = len(workers) // ranks
        on = f"on {named([one_line(worker) for worker in workers], most=6)}"
        if ranks == 1:
            return f"x{replicas} {on}"
        return f"{ranks} ranks {on}" if replicas == 1 else f"x{replicas} of {ranks} ranks {on}"

    def group(self, workers: Sequence[str]) -> tuple[str, list[str]]:
        """`gen, gen2`, and facts about them like `host a`, `GPUs 0 1`."""
        known = self.placed.workers if self.placed else ()
        names = named([one_line(name) for name in workers], most=3)
        return names, _facts([w for w in known if w.name in workers])

    def title(self, workers: Sequence[str]) -> str:
        """`Worker gen (GPU 0)`."""
        names, facts = self.group(workers)
        kind = "Worker" if len(workers) == 1 else "Workers"
        return f"{kind} {names}" + (f" ({', '.join(facts)})" if facts else "")

    def columns(self, boxes: Sequence[Box]) -> list[tuple[str, ...]]:
        """The sets of Workers that run the same nodes: those of one host side by side, else as
        their first nodes come.
        """
        groups = list(dict.fromkeys(map(self.workers_of, boxes)))
        hosts = {w.name: w.host for w in self.placed.workers} if self.placed else {}
        first = [hosts.get(group[0], "") if group else "" for group in groups]
        order = sorted(range(len(groups)), key=lambda i: (first.index(first[i]), i))
        return [groups[i] for i in order]


def _facts(workers: Sequence[PlacedWorker]) -> list[str]:
    hosts = list(dict.fromkeys(one_line(w.host) for w in workers if w.host))
    devices = list(dict.fromkeys(d for w in workers for d in w.devices))
    threads = [w.threads for w in workers if w.threads]
    found = [f"host{'s' * (len(hosts) > 1)} {' '.join(hosts)}"] if hosts else []
    if devices:
        found.append(f"GPU{'s' * (len(devices) > 1)} {' '.join(map(str, devices))}")
    elif threads:
        least, most = min(threads), max(threads)
        count = str(most) if least == most else f"{least} to {most}"
        found.append(f"{count} thread{'s' * (most > 1)}{' each' * (len(workers) > 1)}")
    return found
