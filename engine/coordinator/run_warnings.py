"""What looks wrong in a run, and can be seen in no graph and no plan.

Owns: these warnings. Does not own: those of graphs (dataflow/rules/doubtful.py) and plans
(engine/plan/warnings.py), nor who shows them, each once (engine/session/run_log.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.errors import GraphWarning
from dataflow.loss_terms import ROWS
from dataflow.rules.doubtful import large_batch
from engine.plan.plan import Plan, PlannedNode
from engine.protocol.messages import Warn


def opened(plan: Plan, source: str, rows: int) -> Iterator[Warn]:
    """A source has opened: its batch may be larger than its data."""
    batch = next((s.batch for s in plan.sources if s.name == source), 0)
    if plan.program is not None and rows < batch:
        yield Warn(warning=large_batch(plan.program.node(source), rows))


def given_up(plan: Plan, worker: str, why: str, most: int) -> Warn:
    """A replica that the run can do without has died again and again. most: how many are left."""
    node = next(node for node in plan.nodes if worker in node.workers)
    warning = GraphWarning(
        rule="replica_given_up",
        where=node.name,
        problem=f"{why}. It is given up, and the run goes on with at most {most} of them",
        fix=f"what it died of; the end of the log of {worker} says more",
        origin=plan.origin(node.name),
    )
    return Warn(warning=warning)


def empty(plan: Plan, train: PlannedNode, step: int, prompts: int, row_set: str = ROWS) -> Warn:
    """A Step of so many prompts has no row of a set for a train node: none is trained."""
    above, selects = {i.gate for i in train.row_sets[row_set]}, list[str]()
    for node in reversed(plan.nodes):
        if node.name in above:
            above.update(node.gates)
            selects += [node.name] if node.relation == "subset" else []
    by = " and ".join(map(repr, reversed(selects))) or "nothing"
    told = (
        "no row to train, and its weights stay as they are"
        if len(train.row_sets) == 1
        else f"no row for {train.name}.{row_set}, whose terms train nothing"
    )
    problem = f"step {step} has {told}: {by} kept none of its {prompts} prompts"
    fix = "refill=True in select(...), an easier or harder task, or another condition"
    where = (selects or [train.name])[0]
    found = GraphWarning(
        rule="empty_step", where=where, problem=problem, fix=fix, origin=plan.origin(where)
    )
    return Warn(warning=found)
