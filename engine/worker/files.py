"""Files of a Worker: the state of its kernels, finished rows, samples.

Owns: carrying out the loop's requests (Save, Restore, KeepRows, SaveWeights). Does not own: the
directory and whether it is complete (engine/checkpoint), the format of weights (the kernels).
"""

from __future__ import annotations

from engine.checkpoint.cut import write_rows
from engine.coordinator.refs import Ref
from engine.observe.samples import SamplesBehind, SampleWriter
from engine.plan.plan import Plan
from engine.run.workers import Ask, KeepRows, Restore, Save, SaveWeights
from engine.worker.kernel_loader import OpenKernels
from engine.worker.rows import WorkerRows
from engine.worker.timing import Timing


class WorkerFiles:
    """Of one Worker."""

    def __init__(
        self,
        plan: Plan,
        kernels: OpenKernels,
        rows: WorkerRows,
        timing: Timing,
        samples: SampleWriter | SamplesBehind | None,
    ) -> None:
        self._plan = plan
        self._kernels = kernels
        self._rows = rows
        self._timing = timing
        self._samples = samples

    def answer(self, request: Ask) -> Ref | None:
        """The Ref of KeepRows, else None. Raises PeerLost for rows that are gone with a Worker."""
        match request:
            case Save():
                self._save(request)
            case Restore():
                self._restore(request)
            case SaveWeights(node=node, directory=directory):
                with self._timing.during(node, f"save weights to {directory.name}", counted=False):
                    self._kernels[node].save_weights(directory)
            case KeepRows():
                return self._rows.keep_file(request.file)
        return None

    def _save(self, request: Save) -> None:
        if self._samples is not None:
            self._samples.flush()
        for node, path in request.nodes.items():
            with self._timing.during(node, "save", counted=False):
                self._kernels[node].save(request.directory / path)
        for name, (keys, gather) in request.rows.items():
            rows = self._rows.collected(keys, gather)
            write_rows(request.directory / "rows" / f"{name}.arrow", rows)

    def _restore(self, request: Restore) -> None:
        """Read weights back, and tell every reader of a follower its version."""
        for node, path in request.nodes.items():
            with self._timing.during(node, "restore", counted=False):
                self._kernels[node].restore(request.directory / path)
        for model in self._plan.models:
            for reader in model.readers if model.follows else ():
                if reader in self._kernels.nodes:
                    self._kernels[reader].load((), request.step - request.step % model.every)
