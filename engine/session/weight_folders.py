"""Where the folders of a run have the weights that a plan trains.

Owns: the names of these folders within a checkpoint, and which evaluate nodes keep their best
versions. Does not own: writing them (engine/run/loop/checkpoint_files.py), the best versions
(engine/keep/checkpoint/best_versions.py).
"""

from __future__ import annotations

from pathlib import Path

from engine.keep.checkpoint.best_versions import BestVersions
from engine.keep.run_folder import RunFolder
from engine.plan.plan import Plan


def trained_folders(plan: Plan, checkpoint: Path) -> dict[str, Path]:
    """Find the Hugging Face directory of each Model that the plan trains, in one of its
    checkpoints.
    """
    return {model.name: checkpoint / model.writer for model in plan.models if model.writer}


def weights_folder(plan: Plan, model_name: str) -> str:
    """Name the folder within a checkpoint of this plan that has a Model's weights."""
    writer = next(model.writer for model in plan.models if model.name == model_name)
    return writer or f"followers/{model_name}"


def best_versions(plan: Plan, folder: RunFolder) -> BestVersions:
    """Open the best versions that evaluate nodes of this plan keep."""
    return BestVersions(folder.checkpoints, _best_counts(plan), phase=plan.phase_number)


def _best_counts(plan: Plan) -> dict[str, int]:
    """Count the best versions that each evaluate node keeps, by node; those that keep none are
    left out.
    """
    assert plan.program is not None
    counts: dict[str, int] = {}
    for planned in plan.nodes:
        if planned.work == "evaluate":
            node = plan.program.node(planned.name)
            if node.params["keep_best"]:
                counts[node.name] = node.params["keep_best"]
    return counts
