"""What the user sees while a run goes on.

Owns: the live display on a terminal, lines elsewhere, and which Steps have one. Does not own: any
number, nor which of them are shown (figures.py).
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dataflow.safe_text import one_line
from dataflow.width import pack_parts, screen_width
from engine.session.figures import Figure, evaluations, figures

_log = logging.getLogger(__name__)

REFRESH_HZ = 4
_RECENT = 20
"""Steps whose mean time predicts the rest."""
EACH_STEP_UNTIL, THEN_EVERY = 100, 10
"""Elsewhere than on a terminal: the Steps of a run that all have a line, and how many later ones
share one.
"""
_BAR = 40
"""Columns of the bar, where there is room."""


class Progress:
    """Shows each Step's metrics row; a context manager, which always restores the terminal.

    steps: of the whole run, None where the data decides; of a Program up to the end of the phase.
    phase: which one it is, in words; first: the Steps before it. lag: rows may be older than a
    version. On a terminal rich redraws a panel, with other output above it; elsewhere Steps are
    lines: every one up to EACH_STEP_UNTIL, then every THEN_EVERY-th (or every `every`-th, if that
    is not 0), those with an evaluation, and the last.
    """

    def __init__(
        self,
        steps: int | None,
        *,
        title: str = "",
        phase: str = "",
        first: int = 0,
        every: int = 0,
        lag: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._title = one_line(title)
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._phase = one_line(phase)
        self._first = first
        self._every = every
        self._lag = lag
        self._done = first
        self._figures: list[Figure] = []
        self._evals: dict[str, float] = {}
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._before = 0.0
        self._live: Live | None = None
        self._console: Console | None = None
        self._left_out = False
        self._quiet = False

    def __enter__(self) -> Progress:
        self._before = self._clock()
        if self._stream.isatty():
            self._console = Console(file=self._stream)
            self._live = Live(
                console=self._console,
                get_renderable=self._panel,
                refresh_per_second=REFRESH_HZ,
                vertical_overflow="crop",
            )
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
        elif self._left_out:
            self._print()

    def update(self, row: Mapping[str, float]) -> None:
        """Show a Step's metrics row with `step`."""
        now = self._clock()
        self._durations.append(row.get("time/step", now - self._before))
        self._before = now
        self._done = int(row["step"])
        evals = evaluations(row)
        self._evals |= evals
        # rich draws from a thread of its own, so the list is new, never one that changes
        if self._live is not None:
            self._figures = self._choose_figures(row, self._evals)
            return
        self._figures = self._choose_figures(row, evals)
        self._left_out = not (evals or self._is_due())
        if not self._left_out:
            self._print()

    def line(self) -> str:
        """Write the last Step as one line of text."""
        return "  ".join(self._parts())

    def _parts(self) -> list[str]:
        parts = [self._phase] if self._phase else []
        return [*parts, f"step {self._count()}", *_texts_of(self._figures)]

    def _is_due(self) -> bool:
        """Whether the last Step has a line, whatever its numbers."""
        if self._every:
            return self._done % self._every == 0
        return self._done <= EACH_STEP_UNTIL or self._done % THEN_EVERY == 0

    def _choose_figures(self, row: Mapping[str, float], evals: Mapping[str, float]) -> list[Figure]:
        """Choose everything that is shown but the Step."""
        chosen = figures(row, lag=self._lag)
        for name, number in evals.items():
            chosen.append((name, f"{number:.3f}"))
        if self._steps:
            chosen.append(("eta", _duration(self._remaining(self._steps))))
        return chosen

    def _count(self) -> str:
        if self._steps:
            return f"{self._done}/{self._steps}"
        return f"{self._done}"

    def _remaining(self, steps: int) -> float:
        """Estimate the seconds left at the pace of the last Steps; nan before the first."""
        if not self._durations:
            return math.nan
        remaining = max(0, steps - self._done)
        return remaining * sum(self._durations) / len(self._durations)

    def _panel(self) -> Table:
        """Make what rich draws: a bar with the Step, and the figures below."""
        assert self._console is not None
        width = self._console.width  # anew each time: a terminal may change its width
        count = self._count()
        room = width - len(count) - 3
        panel = Table.grid()
        head = Table.grid(padding=(0, 1))
        title = "  ".join(filter(None, [self._title, self._phase]))
        if len(title) + _BAR > room:  # a line of its own
            panel.add_row(Text(title, no_wrap=True, overflow="ellipsis"))
            title = ""
        total = None
        if self._steps is not None:
            total = self._steps - self._first
        completed = self._done - self._first
        bar = ProgressBar(total=total, completed=completed, width=max(1, min(_BAR, room)))
        if title:
            head.add_row(Text(title), bar, count)
        else:
            head.add_row(bar, count)
        panel.add_row(head)
        for line in pack_parts(_texts_of(self._figures), width):
            panel.add_row(Text(line, no_wrap=True, overflow="ellipsis"))
        return panel

    def _print(self) -> None:
        """Print the last Step; once the output has no reader, the run goes on without a display."""
        self._left_out = False
        if self._quiet:
            return
        width = screen_width(sys.maxsize, self._stream)
        lines = [one_line(text) for text in pack_parts(self._parts(), width, indent="  ")]
        try:
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()
        except OSError as error:  # its reader is gone, or its disk is full
            self._quiet = True
            problem = "the progress cannot be shown any more (%s); the run goes on without"
            _log.warning(problem, error.strerror)


def _texts_of(figures: list[Figure]) -> list[str]:
    return [f"{label} {text}" for label, text in figures]


def _duration(seconds: float) -> str:
    """`42s`, `3m07s`, `2h05m`; `?` where it is not known."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
