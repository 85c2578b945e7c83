"""The planner's passes, in their order.

Owns: the list, and why each has its place. Does not own: any pass, a pure function of a Draft.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.plan.draft import Draft
from engine.plan.passes.batching import batch_rows
from engine.plan.passes.compiled import choose_compiled
from engine.plan.passes.cores import share_cores
from engine.plan.passes.correct import correct_peaks
from engine.plan.passes.dispatch import choose_dispatch
from engine.plan.passes.engines import size_engines
from engine.plan.passes.estimate import estimate_costs
from engine.plan.passes.intake_fit import fit_intake
from engine.plan.passes.kernels import choose_kernels
from engine.plan.passes.limit import limit_short_nodes
from engine.plan.passes.loads import divide_loads
from engine.plan.passes.memory_fit import fit_memory
from engine.plan.passes.modules import share_modules
from engine.plan.passes.park_keys import park_keys, state_parked
from engine.plan.passes.place import place_nodes
from engine.plan.passes.processes import estimate_processes
from engine.plan.passes.project import project_columns
from engine.plan.passes.prune import prune_graph
from engine.plan.passes.resolve import resolve_parameters
from engine.plan.passes.route_fit import fit_routes
from engine.plan.passes.shape import shape_nodes
from engine.plan.passes.streaming import stream_steps
from engine.plan.passes.verify import verify_plan

PASSES: tuple[Callable[[Draft], Draft], ...] = (
    # First: nothing else should look at what is dead.
    prune_graph,
    # Before shape_nodes: it still rewrites the graph, and is the last to do so.
    resolve_parameters,
    # The structure that all others speak of.
    shape_nodes,
    # After shape_nodes: needs rows. Before estimate_costs: bytes are those of the columns that
    # travel.
    project_columns,
    # Before place_nodes: a kernel may ask for devices.
    choose_kernels,
    # Which Workers there are: all that follows speaks of them.
    place_nodes,
    # After place_nodes: by the devices of a node.
    choose_compiled,
    # After place_nodes: what streams depends on who works beside whom.
    batch_rows,
    # After batch_rows: it changes what it says of chunks.
    stream_steps,
    # After place_nodes: Workers that compute at the same time share the host's.
    share_cores,
    # After place_nodes: nodes share a module within a Worker only.
    share_modules,
    # After place_nodes: nodes share an engine within a Worker only. Before estimate_costs: its size
    # counts.
    size_engines,
    # After size_engines: an engine keeps such keys in its cache. Before estimate_costs: they count.
    state_parked,
    # After size_engines: a cache limits what is decoded at once. Before estimate_costs: a prompt
    # that several replicas have counts for each.
    choose_dispatch,
    # After choose_dispatch: a tail has chunks of its own. Before estimate_costs: the most that a
    # replica has counts.
    divide_loads,
    # After choose_dispatch: it lowers what that has chosen. Before estimate_costs: it counts.
    limit_short_nodes,
    # After every decision: memory is counted for each Worker, modules once.
    estimate_costs,
    # After estimate_costs: by the peaks that a profile measured.
    correct_peaks,
    # After correct_peaks: what a profile has measured is not assumed once more.
    estimate_processes,
    # After all estimates. Before fit_routes and fit_memory: it costs least.
    fit_intake,
    # After all estimates: what weights by IPC take of a GPU has to fit there.
    fit_routes,
    # After fit_routes, which costs less; changes layouts where they do not fit, and estimates these
    # anew.
    fit_memory,
    # After fit_memory: of what is free then.
    park_keys,
    # Last: changes nothing.
    verify_plan,
)
