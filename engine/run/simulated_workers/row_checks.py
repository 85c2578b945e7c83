"""Whether the rows that a simulated Worker is told to read are there, and the right ones.

Owns: which inputs of a message are checked against which keys. Does not own: the check of one
gather (outbox.py).
"""

from __future__ import annotations

from dataflow.errors import RunError
from dataflow.loss_terms import ROWS
from engine.protocol import messages as m
from engine.run.simulated_workers.kernel_times import Rows
from engine.run.simulated_workers.world import SharedWorld


def require_rows(world: SharedWorld, worker: str, message: Rows) -> None:
    """Raises RunError for rows that are wrong, gone without a death, or given by a rank."""
    match message:
        case m.TrainStep() | m.TrainPart() | m.RunChunk() if message.giver not in ("", worker):
            if any(message.inputs.values()):
                problem = f"{worker} is to fetch what {message.giver} gives it"
                raise RunError(f"{message.node}: {problem}")
        case m.TrainStep() | m.TrainPart():
            _require_sets(world, message)
        case m.Record():
            for recorded in world.plan.recorded:
                keys = message.keys[recorded.name]
                world.outbox.check(keys, message.inputs, (recorded,))
        case _:
            inputs = world.nodes[message.node].inputs
            world.outbox.check(message.keys, message.inputs, inputs)


def require_rows_ahead(world: SharedWorld, message: m.FetchAhead) -> None:
    """The same for rows of a Step that is still to come: some inputs may not be known yet."""
    for name, inputs in world.nodes[message.node].row_sets.items():
        known = [each for each in inputs if each.name in message.inputs]
        if known:
            world.outbox.check(message.keys[name], message.inputs, known)


def _require_sets(world: SharedWorld, message: m.TrainStep | m.TrainPart) -> None:
    """The rows of each set; one without a row in the Step has no inputs."""
    sets: dict[str, m.TrainStep | m.TrainPart | m.OwnRows] = {ROWS: message, **message.others}
    for name, inputs in world.nodes[message.node].row_sets.items():
        rows = sets.get(name)
        if rows is not None and (rows.total or len(rows.keys)):
            world.outbox.check(rows.keys, message.inputs, inputs)
        elif needless := [i.name for i in inputs if i.name in message.inputs]:
            raise RunError(f"{message.node}: {name} has no row, and inputs {needless}")
