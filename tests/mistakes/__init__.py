"""Beginners' mistakes, each as the command that a beginner types, and what its message means.

docs/troubleshooting.md is made of them and of the golden messages in tests/golden/mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

GRAPH = (
    "graphs.grpo:grpo --base model --data train.jsonl --reward-fn rewards.py:exact --max-tokens 8"
)
"""A command's TARGET and flags, without a mistake."""
RUN = f"dataflow run {GRAPH} --batch 4 --n 2 --steps 1 --threads 1 --no-progress"
CHECK = f"dataflow check {GRAPH}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """what: as a heading. why: what the message means, and what to do. files: name -> text, written
    in place of those that are right. change: does more to the folder.
    """

    what: str
    why: str
    command: str = CHECK
    files: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[Path], None] | None = None

    @property
    def name(self) -> str:
        """Of its golden file."""
        return self.what.lower().replace(" ", "_").replace("`", "")


def changed(old: str, new: str, command: str = CHECK) -> str:
    """A command with one part of it another."""
    assert old in command, old
    return command.replace(old, new)
