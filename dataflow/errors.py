"""The one exception family.

Owns: an error's text, and how several are shown at once. Every message names the place, what was
expected, what was found and the nearest fix. Does not own: the rules that find errors (rules/), the
process exit code (the command line).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.safe_text import printable


class DataflowError(Exception):
    """Base of everything that this project raises on purpose; its text has no control characters
    except line ends.
    """

    def __str__(self) -> str:
        return printable(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the text and the fields: a subclass may have a constructor of other arguments,
        which Exception's own pickling would call with the text.
        """
        return _restore_error, (type(self), self.args, self.__dict__)


def _restore_error(
    kind: type[DataflowError], args: tuple[Any, ...], fields: dict[str, Any]
) -> DataflowError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class GraphError(DataflowError, ValueError):
    """A graph, or a part of it, that makes no sense; carries every fault found.

    `faults` has them in the order of the source lines.
    """

    def __init__(self, faults: Sequence[Fault] | Fault) -> None:
        if isinstance(faults, Fault):
            faults = (faults,)
        self.faults: tuple[Fault, ...] = tuple(faults)
        lines = [str(fault) for fault in self.faults]
        super().__init__("\n".join(lines))


class PlanError(DataflowError, ValueError):
    """A checked graph that this cluster, or these kernels, cannot run."""


class DataError(DataflowError, ValueError):
    """A data file or a row that does not have the promised form."""


class KernelError(DataflowError, RuntimeError):
    """A kernel, or a user's function inside one, failed; names node and first row key."""


class ProcessLost(KernelError):
    """A process that a kernel has started and cannot do without has ended by itself. Its Worker
    ends with it, and begins again as any Worker that was lost.
    """


class ShortOfMemory(KernelError):
    """A kernel's memory ran out; its Worker goes on with lower limits, if it can."""


class RunError(DataflowError, RuntimeError):
    """A run that cannot go on: starvation, error budget spent, a node that keeps nothing."""


class StorageError(RunError):
    """A file that could not be written, or memory that could not be had: a full, failing or
    read-only disk. What was completely written before stays as it was.
    """


class CheckpointError(DataflowError, RuntimeError):
    """A checkpoint that is missing, damaged or belongs to another graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The place in the user's source where something was made."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing wrong. `rule` is the stable name of the rule that found it.

    `problem` is a sentence without its full stop that says what was expected and what was found;
    `fix`, likewise, is the nearest fix. Shown as `grpo.py:14 advantage: <problem>. Fix: <fix>.`
    """

    rule: str
    where: str
    problem: str
    fix: str
    origin: Origin | None = None

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}. Fix: {self.fix}."
        return f"{self.origin} {text}" if self.origin else text


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphWarning(Fault):
    """Something that looks wrong in a graph that can run; a value, not an exception.

    `rule` is its stable name. Shown like a fault, followed by its name: `grpo.py:14 generate
    'rollout': <problem>. Fix: <fix>. [greedy_group]`.
    """

    def __str__(self) -> str:
        return f"{Fault.__str__(self)} [{self.rule}]"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None if none is close."""
    import difflib  # here: few processes have such an error

    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def nearest_or_all(name: str, known: Sequence[str]) -> str:
    """The fix for a wrong name: the known one closest to it; if none is close, all of them."""
    return nearest(name, known) or f"one of {', '.join(known)}"
