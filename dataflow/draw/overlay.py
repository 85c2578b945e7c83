"""What a drawing shows beyond the graph: places, figures, room for a page.

Owns: the Overlay, and its facts in words. Does not own: where they stand in any form, how they are
decided or measured (the engine).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dataflow.draw.measure import join_names
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

    def notes_about(self, name: str) -> list[str]:
        """The lines about something."""
        return [one_line(line) for line in self.notes.get(name, ())]

    def notes_about_box(self, box: Box) -> list[str]:
        """The lines about a node; about each node of a folded chain, with its name."""
        if not box.members:
            return self.notes_about(box.name)
        lines: list[str] = []
        for member in box.members:
            lines += [f"{member.name}: {line}" for line in self.notes_about(member.name)]
        return lines

    def workers_of(self, box: Box) -> tuple[str, ...]:
        """Where a node runs; empty if nothing is placed, or it is left out."""
        if self.placed is None:
            return ()
        # A chain is folded only where all of it runs on the same Workers.
        return tuple(self.placed.nodes.get(box.first, ()))

    def describe_place(self, box: Box) -> str:
        """`x3 on gen, gen2, gen3`, `2 ranks on a, b`; empty on one Worker."""
        workers = self.workers_of(box)
        if self.placed is None or len(workers) < 2:
            return ""
        ranks = self.placed.ranks.get(box.first, 1)
        replicas = len(workers) // ranks
        names = join_names([one_line(worker) for worker in workers], most=6)
        if ranks == 1:
            return f"x{replicas} on {names}"
        if replicas == 1:
            return f"{ranks} ranks on {names}"
        return f"x{replicas} of {ranks} ranks on {names}"

    def describe_workers(self, workers: Sequence[str]) -> tuple[str, list[str]]:
        """`gen, gen2`, and facts about them like `host a`, `GPUs 0 1`."""
        placed_workers = self.placed.workers if self.placed else ()
        names = join_names([one_line(name) for name in workers], most=3)
        return names, _facts([worker for worker in placed_workers if worker.name in workers])

    def title(self, workers: Sequence[str]) -> str:
        """`Worker gen (GPU 0)`."""
        names, facts = self.describe_workers(workers)
        kind = "Worker" if len(workers) == 1 else "Workers"
        if not facts:
            return f"{kind} {names}"
        return f"{kind} {names} ({', '.join(facts)})"

    def columns(self, boxes: Sequence[Box]) -> list[tuple[str, ...]]:
        """The sets of Workers that run the same nodes: those of one host side by side, else as
        their first nodes come.
        """
        groups = list(dict.fromkeys(map(self.workers_of, boxes)))
        placed_workers = self.placed.workers if self.placed else ()
        hosts = {worker.name: worker.host for worker in placed_workers}
        group_hosts = [hosts.get(group[0], "") if group else "" for group in groups]
        by_host: dict[str, list[tuple[str, ...]]] = {}
        for host, group in zip(group_hosts, groups, strict=True):
            by_host.setdefault(host, []).append(group)
        return list(itertools.chain.from_iterable(by_host.values()))


def _facts(workers: Sequence[PlacedWorker]) -> list[str]:
    """Hosts, and GPUs or else threads, each in words."""
    hosts: dict[str, None] = {}
    for worker in workers:
        if worker.host:
            hosts[one_line(worker.host)] = None
    devices = list_devices(workers)
    threads = [worker.threads for worker in workers if worker.threads]
    facts: list[str] = []
    if hosts:
        names = " ".join(hosts)
        facts.append(f"host{_plural(len(hosts))} {names}")
    if devices:
        numbers = " ".join(map(str, devices))
        facts.append(f"GPU{_plural(len(devices))} {numbers}")
    elif threads:
        facts.append(_describe_threads(min(threads), max(threads), len(workers)))
    return facts


def list_devices(workers: Sequence[PlacedWorker]) -> list[int]:
    """The GPUs of all of them, each once."""
    devices: dict[int, None] = {}
    for worker in workers:
        devices |= dict.fromkeys(worker.devices)
    return list(devices)


def _describe_threads(least: int, most: int, workers: int) -> str:
    """`2 threads`, `2 to 4 threads each`."""
    count = str(most) if least == most else f"{least} to {most}"
    each = " each" if workers > 1 else ""
    return f"{count} thread{_plural(most)}{each}"


def _plural(count: int) -> str:
    return "s" if count > 1 else ""
