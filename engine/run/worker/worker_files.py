"""Files of a Worker: the state of its kernels, finished rows, samples.

Owns: carrying out the loop's requests (Save, Restore, KeepRows, SaveWeights). Does not own: the
directory and whether it is complete (engine/keep/checkpoint), the format of weights (the kernels).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.keep.checkpoint.cut import write_waiting_rows
from engine.keep.samples import SamplesBehind, SampleWriter
from engine.plan.plan import Plan
from engine.protocol.refs import Ref
from engine.protocol.workers import Ask, KeepRows, Restore, Save, SaveWeights
from engine.run.worker.kernel_loader import OpenKernels
from engine.run.worker.rows import WorkerRows
from engine.run.worker.timing import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFiles:
    """The files of one Worker. samples: the recorder's."""

    plan: Plan
    kernels: OpenKernels
    rows: WorkerRows
    timing: Timing
    samples: SampleWriter | SamplesBehind | None

    def answer(self, request: Ask) -> Ref | None:
        """The Ref of KeepRows, else None. Raises PeerLost for rows that are gone with a Worker."""
        match request:
            case Save():
                self._save(request)
            case Restore():
                self._restore(request)
            case SaveWeights(node=node, directory=directory):
                what = f"save weights to {directory.name}"
                with self.timing.during(node, "save weights", what, counted=False, computes=False):
                    self.kernels[node].save_weights(directory)
            case KeepRows():
                return self.rows.keep_file(request.file)
        return None

    def _save(self, request: Save) -> None:
        if self.samples is not None:
            self.samples.flush()
        for node, path in request.nodes.items():
            with self.timing.during(node, "save", counted=False, computes=False):
                self.kernels[node].save(request.directory / path)
        for name, (keys, gather) in request.rows.items():
            rows = self.rows.collect_rows(keys, gather)
            write_waiting_rows(request.directory / "rows" / f"{name}.arrow", rows)

    def _restore(self, request: Restore) -> None:
        """Read weights back, and tell every reader of a follower its version."""
        for node, path in request.nodes.items():
            with self.timing.during(node, "restore", counted=False, computes=False):
                self.kernels[node].restore(request.directory / path)
        followers = (model for model in self.plan.models if model.follows)
        for model in followers:
            version = request.step - request.step % model.every  # the last one that it took
            for reader in model.readers:
                if reader in self.kernels.nodes:
                    self.kernels[reader].load((), version)
