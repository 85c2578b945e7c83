"""The one Worker of a run in one process, put together.

Owns: what it is made of. Does not own: what it does (engine/run/worker/in_process_worker.py),
several of them (supervisor.py).
"""

from __future__ import annotations

from contextlib import ExitStack

from engine.channels.inproc import InprocChannel
from engine.keep.record.place import RecordPlace
from engine.keep.record.recorder import RowRecorder
from engine.keep.run_folder import RunFolder
from engine.keep.samples import SamplesBehind, SampleWriter
from engine.plan.options import RunOptions
from engine.plan.plan import Plan
from engine.run.worker.in_process_worker import InprocWorkers
from engine.run.worker.newest_rows import NewestRows
from engine.run.worker.worker import Worker


def one_worker(
    name: str, plan: Plan, folder: RunFolder, options: RunOptions, stack: ExitStack
) -> InprocWorkers:
    """The Workers of a run that has one, in this process. stack: of what has to end after it."""
    every, first, phase = options.samples_every, plan.first, plan.phase_number
    samples = SamplesBehind(SampleWriter(folder.samples, every=every, first=first, phase=phase))
    stack.callback(samples.close)
    recorder = None
    if (place := RecordPlace.of(plan, folder.path, options)) is not None:
        recorder = RowRecorder(place, name, plan)
    worker = Worker(
        name,
        plan,
        channel=InprocChannel(),
        inproc=options.inproc,
        samples=samples,
        newest=NewestRows(folder.path),
        recorder=recorder,
    )
    return InprocWorkers(worker)
