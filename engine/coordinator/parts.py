"""The parts of the coordinator, each with those that it is told of.

Owns: which part is told of which. Does not own: what any of them does, nor who asks them
(coordinator.py, course.py, losses.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.coordinator.blocks import Blocks
from engine.coordinator.checkpoint_schedule import CheckpointDue
from engine.coordinator.dispatch import Dispatch
from engine.coordinator.evaluation import Evaluation
from engine.coordinator.memory_limits import LoweredLimits
from engine.coordinator.next_rows import NextRows
from engine.coordinator.next_wave import NextWave
from engine.coordinator.recovery import Recovery
from engine.coordinator.relayouts import Relayouts
from engine.coordinator.replicas import Replicas
from engine.coordinator.run_region import RunRegion
from engine.coordinator.run_settings import Settings
from engine.coordinator.sources import Sources
from engine.coordinator.task_ledger import Outstanding
from engine.coordinator.training import Training
from engine.coordinator.versions import Versions
from engine.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorParts:
    """One run's. regions: by the region of a node, in the order in which they hear of a loss."""

    outstanding: Outstanding
    blocks: Blocks
    dispatch: Dispatch
    sources: Sources
    next_rows: NextRows
    next_wave: NextWave
    training: Training
    evaluation: Evaluation
    versions: Versions
    recovery: Recovery
    replicas: Replicas
    checkpoints: CheckpointDue
    relayouts: Relayouts
    regions: Mapping[str, RunRegion]


def make_parts(plan: Plan, settings: Settings) -> CoordinatorParts:
    """Make the parts of a run that has not begun."""
    outstanding = Outstanding()
    has_parts = any(source.part_tokens for source in plan.sources)
    blocks = Blocks(weigh=has_parts or any(node.chunks > 1 for node in plan.nodes))
    sources = Sources(plan, settings, blocks)
    limits = LoweredLimits(plan, settings.limits)
    dispatch = Dispatch(plan, blocks, outstanding, sources.pools, limits)
    training = Training(plan, blocks, dispatch, outstanding, sources)
    evaluation = Evaluation(plan, blocks, dispatch, outstanding)
    versions = Versions(plan, outstanding)
    recovery = Recovery(plan.workers, plan.spare)
    replicas = Replicas(plan, settings)
    for part in (recovery, replicas, versions):
        part.on_able = dispatch.consider
    outstanding.on_chunk.append(replicas.runs)
    return CoordinatorParts(
        outstanding=outstanding,
        blocks=blocks,
        dispatch=dispatch,
        sources=sources,
        next_rows=NextRows(plan, blocks, sources),
        next_wave=NextWave(plan, sources),
        training=training,
        evaluation=evaluation,
        versions=versions,
        recovery=recovery,
        replicas=replicas,
        checkpoints=CheckpointDue(settings),
        relayouts=Relayouts(plan, settings, sources),
        # A Step that lacks rows gives its prompts back before the stream looks for the harmed ones.
        regions={"step": training, "evaluation": evaluation, "stream": sources},
    )
