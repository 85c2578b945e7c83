"""The planner's passes, in their order.

Owns: the list, and why each has its place. Does not own: any pass, a pure function of a Draft.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.plan.draft import Draft
from engine.plan.passes.batching import batching
from engine.plan.passes.cores import cores
from engine.plan.passes.correct import correct
from engine.plan.passes.engines import engines
from engine.plan.passes.estimate import estimate
from engine.plan.passes.kernels import choose_kernels
from engine.plan.passes.modules import modules
from engine.plan.passes.place import place
from engine.plan.passes.processes import processes
from engine.plan.passes.project import project
from engine.plan.passes.prune import prune
from engine.plan.passes.resolve import resolve
from engine.plan.passes.shape import shape
from engine.plan.passes.verify import verify

PASSES: tuple[Callable[[Draft], Draft], ...] = (
    prune,  # first: nothing else should look at what is dead
    resolve,  # before shape: it still rewrites the graph, and is the last to do so
    shape,  # the structure that all others speak of
    project,  # after shape: needs rows; before estimate: bytes are those of the columns that travel
    choose_kernels,  # before place: a kernel may ask for devices
    place,  # which Workers there are: all that follows speaks of them
    batching,  # after place: what streams depends on who works beside whom
    cores,  # after place: Workers that compute at the same time share the host's
    modules,  # after place: nodes share a module within a Worker only
    engines,  # after place: nodes share an engine within a Worker only; before estimate: its size
    estimate,  # after every decision: memory is counted for each Worker, modules once
    correct,  # after estimate: by the peaks that a profile measured
    processes,  # after correct: what a profile has measured is not assumed once more
    verify,  # last: changes nothing
)
