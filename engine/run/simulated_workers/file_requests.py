"""What the loop asks of a simulated Worker: files and rows of checkpoints.

Owns: carrying a request out, and its answer. Does not own: when its turn comes
(simulated_worker.py), what a checkpoint is (store.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine.protocol.workers import Ask, KeepRows, Restore, Save, SaveWeights, WorkerGone
from engine.run.simulated_workers.store import SavedRows
from engine.run.simulated_workers.world import RunningWorker, SharedWorld

Done = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRequest:
    """What the loop asks for. number: the same for all Workers asked at one time."""

    number: int
    request: Ask


class FileRequests:
    """Those of one Worker."""

    def __init__(self, worker: RunningWorker, world: SharedWorld) -> None:
        self._worker, self._world = worker, world

    def do(self, asked: FileRequest, done: Done) -> None:
        """Carry a request out, answer it, and call `done`."""
        match asked.request:
            case Save(nodes=nodes):
                self._save(asked, tuple(nodes), done)
            case SaveWeights(node=node):
                self._save(asked, (node,), done)
            case Restore():
                self._answer_after(self._world.kernels.files(), asked, None, done)
            case KeepRows(file=file):
                rows = self._world.disk[file]
                ref = self._world.outbox.keep(
                    self._worker.name, self._world.nodes[file.stem], *rows
                )
                self._answer_after(0.0, asked, ref, done)

    def _save(self, asked: FileRequest, left: tuple[str, ...], done: Done) -> None:
        """Save one node after another, each with all of its ranks; then the rows, if any."""
        if left:
            save = partial(self._save, asked, left[1:], done)
            seconds = self._world.kernels.files()
            self._worker.with_all(("save", left[0], asked.number), seconds, save)
            return
        request = asked.request
        answer = self._rows_of(request) if isinstance(request, Save) else None
        self._answer_after(0.0, asked, answer, done)

    def _rows_of(self, save: Save) -> dict[Path, SavedRows] | WorkerGone:
        """The content of each file of rows; WorkerGone if a Worker that kept some has died."""
        outbox, name = self._world.outbox, self._worker.name
        if lost := outbox.absent(gather for _, gather in save.rows.values()):
            return WorkerGone(lost, f"it was lost while {name} was asked for its rows")
        for keys, gather in save.rows.values():
            outbox.check_rows(keys, gather)
        rows, folder = save.rows.items(), save.directory / "rows"
        return {folder / f"{n}.arrow": (k, outbox.versions(g)) for n, (k, g) in rows}

    def _answer_after(self, seconds: float, asked: FileRequest, answer: Any, done: Done) -> None:
        def end() -> None:
            self._world.answer(self._worker.name, asked.number, answer)
            done()

        self._worker.after(seconds, end)
