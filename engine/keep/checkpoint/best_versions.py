"""The best versions by an evaluation, as Hugging Face directories.

Owns: which versions stay, their directories and scores. Does not own: the evaluation (its kernel),
the weights' files (the train kernel's save_weights), checkpoints (store.py).

    checkpoints/best_<evaluate node>/step_N/   config.json, *.safetensors, tokenizer, score.json
    checkpoints/best_phase_2_<evaluate node>/  of a phase of a Program

A displaced version stays until the next checkpoint is on disk, so a run that resumes from the last
one finds every version that was among the best then.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from dataflow.errors import CheckpointError
from dataflow.storage import sync_folder, sync_tree, writing
from engine.keep.checkpoint.step_folders import delete_folder, steps_of_names, temp_of

SCORE = "score.json"


class BestVersions:
    """keep: how many, by evaluate node. Higher scores are better, then earlier versions. phase: of
    a Program, whose phases may have evaluate nodes of one name; 0 for a graph alone.
    """

    def __init__(self, directory: Path, keep: Mapping[str, int], *, phase: int = 0) -> None:
        if phase:
            of = f"best_phase_{phase}_"
        else:
            of = "best_"
        self._folders = {name: directory / f"{of}{name}" for name in keep}
        self._keep = dict(keep)

    def offer(self, name: str, step: int, score: float, save: Callable[[Path], None]) -> bool:
        """Keep this version, which `save` writes, if it is among the best. Raises StorageError."""
        if name not in self._keep or not math.isfinite(score):
            return False
        others = [version for version in self._rank(name) if version[1] != step]
        if sum(version <= (-score, step) for version in others) >= self._keep[name]:
            return False
        final = self._folders[name] / f"step_{step}"
        temp = temp_of(final)
        try:
            with writing(f"version {step}, one of the best by {name},", final):
                shutil.rmtree(temp, ignore_errors=True)
                temp.mkdir(parents=True)
                save(temp)
                text = json.dumps({"step": step, "score": score}) + "\n"
                (temp / SCORE).write_text(text, encoding="ascii")
                sync_tree(temp)
                if final.exists():  # the same version, evaluated again
                    delete_folder(final)
                temp.rename(final)
                sync_folder(final.parent)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        return True

    def prune(self) -> None:
        """Delete displaced versions, once a checkpoint is on disk or the run is over."""
        for name, keep in self._keep.items():
            for _, step in self._rank(name)[keep:]:
                delete_folder(self._folders[name] / f"step_{step}")

    def truncate_after(self, step: int) -> None:
        """Delete versions after this Step, from which the run resumes, and unfinished ones."""
        for name, folder in self._folders.items():
            for torn in folder.glob(".tmp-*"):
                shutil.rmtree(torn)
            for _, version in self._rank(name):
                if version > step:
                    delete_folder(folder / f"step_{version}")

    def paths(self) -> dict[str, tuple[Path, ...]]:
        """The kept directories by evaluate node, the best first."""
        paths = {}
        for name, folder in self._folders.items():
            best = self._rank(name)[: self._keep[name]]
            paths[name] = tuple(folder / f"step_{step}" for _, step in best)
        return paths

    def _rank(self, name: str) -> list[tuple[float, int]]:
        """(-score, step), the best first."""
        folder = self._folders[name]
        if folder.is_dir():
            names = [path.name for path in folder.iterdir()]
        else:
            names = []
        return sorted((-_score(folder / f"step_{step}"), step) for step in steps_of_names(names))


def _score(path: Path) -> float:
    try:
        return float(json.loads((path / SCORE).read_text(encoding="ascii"))["score"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"expected the score of a kept version, found {type(error).__name__}: {error}"
        raise CheckpointError(f"{path / SCORE}: {problem}. Fix: delete that folder.") from None
