"""The one Worker of a run in one process.

Owns: what it is made of. Does not own: the Worker (engine/worker), several of them (supervisor.py).
"""

from __future__ import annotations

from contextlib import ExitStack

from engine.channels.inproc import InprocChannel
from engine.observe.runfolder import RunFolder
from engine.observe.samples import SamplesBehind, SampleWriter
from engine.options import RunOptions
from engine.plan.plan import Plan
from engine.record.place import RecordPlace
from engine.record.recorder import RowRecorder
from engine.worker.inproc import InprocWorkers
from engine.worker.newest import NewestRows
from engine.worker.worker import Worker


def one_worker(
    name: str, plan: Plan, folder: RunFolder, options: RunOptions, stack: ExitStack
) -> InprocWorkers:
    """The Workers of a run that has one, in this process. stack: of what has to end after it."""
    phase = plan.phase.number if plan.phase else 0
    every, first = options.samples_every, plan.first
    samples = SamplesBehind(SampleWriter(folder.samples, every=every, first=first, phase=phase))
    stack.callback(samples.close)
    place = RecordPlace.of(plan, folder.path, options)
    worker = Worker(
        name,
        plan,
        channel=InprocChannel(),
        inproc=options.inproc,
        samples=samples,
        newest=NewestRows(folder.path),
        recorder=RowRecorder(place, name, plan) if place is not None else None,
    )
    return InprocWorkers(worker)
