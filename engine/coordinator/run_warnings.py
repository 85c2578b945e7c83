"""What looks wrong in a run, and can be seen in no graph and no plan.

Owns: these warnings. Does not own: those of graphs (dataflow/rules/suspect_graphs.py) and plans
(engine/plan/warnings.py), nor who shows them, each once (engine/session/run_log.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import GraphWarning
from dataflow.loss_terms import ROWS
from dataflow.rules.suspect_graphs import large_batch
from engine.plan.plan import Plan, PlannedNode
from engine.protocol.messages import Warn


def warn_of_small_data(plan: Plan, source: str, rows: int) -> Iterator[Warn]:
    """Warn where the batch of a source that has opened is larger than its data."""
    batch = next((s.batch for s in plan.sources if s.name == source), 0)
    if plan.program is not None and rows < batch:
        yield Warn(warning=large_batch(plan.program.node(source), rows))


def warn_of_given_up(plan: Plan, worker: str, why: str, most: int) -> Warn:
    """Warn of a replica that has died again and again, and that the run can do without. most: how
    many are left.
    """
    node = next(node for node in plan.nodes if worker in node.workers)
    warning = GraphWarning(
        rule="replica_given_up",
        where=node.name,
        problem=f"{why}. It is given up, and the run goes on with at most {most} of them",
        fix=f"what it died of; the end of the log of {worker} says more",
        origin=plan.origin(node.name),
    )
    return Warn(warning=warning)


def warn_of_empty_step(
    plan: Plan, train: PlannedNode, step: int, prompts: int, row_set: str = ROWS
) -> Warn:
    """Warn of a Step of so many prompts that has no row of a set for a train node, so that none is
    trained.
    """
    selects = _selects_above(plan, train, row_set)
    if len(train.row_sets) == 1:
        lacking = "no row to train, and its weights stay as they are"
    else:
        lacking = f"no row for {train.name}.{row_set}, whose terms train nothing"
    names = " and ".join(map(repr, selects)) or "nothing"
    where = selects[-1] if selects else train.name
    warning = GraphWarning(
        rule="empty_step",
        where=where,
        problem=f"step {step} has {lacking}: {names} kept none of its {prompts} prompts",
        fix="refill=True in select(...), an easier or harder task, or another condition",
        origin=plan.origin(where),
    )
    return Warn(warning=warning)


def _selects_above(plan: Plan, train: PlannedNode, row_set: str) -> list[str]:
    """The selects that the rows of a set come through, in running order."""
    above = {i.gate for i in train.row_sets[row_set]}
    selects: list[str] = []
    for node in reversed(plan.nodes):
        if node.name not in above:
            continue
        above.update(node.gates)
        if node.relation == "subset":
            selects.append(node.name)
    return selects[::-1]
