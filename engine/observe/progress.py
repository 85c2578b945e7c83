"""What the user sees while a run goes on.

Owns: the live display on a terminal, and a line a Step elsewhere. Does not own: any number.
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

from dataflow.shown import one_line

_log = logging.getLogger(__name__)

REFRESH_HZ = 4
_RECENT = 20
"""Steps whose mean time predicts the rest."""

_SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("lag", "policy/lag/max", "{:.0f}"),
    ("length", "completion/length/mean", "{:.1f}"),
    ("s/step", "time/step", "{:.2f}"),
    ("tok/s", "throughput/tokens_per_second", "{:,.0f}"),
)

_LEFT_OUT = ("/reward", "/rows")
"""Numbers of an evaluation that its functions' own say better; metrics.jsonl has them all."""


class Progress:
    """Shows each Step's metrics row; a context manager, which always restores the terminal.

    steps: of the whole run, None where the data decides; of a Program up to the end of the phase.
    phase: which one it is, in words; first: the Steps before it. On a terminal rich redraws a
    panel, with other output above it; elsewhere every Step is one line.
    """

    def __init__(
        self,
        steps: int | None,
        *,
        title: str = "",
        phase: str = "",
        first: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._title = one_line(title)
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._phase = one_line(phase)
        self._first = first
        self._done = first
        self._figures: list[tuple[str, str]] = []
        self._evals: dict[str, float] = {}
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._before = 0.0
        self._live: Live | None = None
        self._quiet = False

    def __enter__(self) -> Progress:
        self._before = self._clock()
        if self._stream.isatty():
            self._live = Live(
                console=Console(file=self._stream),
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

    def update(self, row: Mapping[str, float]) -> None:
        """Show a Step's metrics row with `step`."""
        now = self._clock()
        self._durations.append(row.get("time/step", now - self._before))
        self._before = now
        self._done = int(row["step"])
        evals = {name: value for name, value in row.items() if _is_shown(name)}
        self._evals |= evals
        # rich draws from a thread of its own, so the list is new, never one that changes
        self._figures = self._texts(row, self._evals if self._live is not None else evals)
        if self._live is None:
            self._print(self.line())

    def line(self) -> str:
        """The last Step as one line of text."""
        figures = [f"{label} {text}" for label, text in self._figures]
        named = [self._phase] if self._phase else []
        return "  ".join([*named, f"step {self._count()}", *figures])

    def _texts(self, row: Mapping[str, float], evals: Mapping[str, float]) -> list[tuple[str, str]]:
        """(label, text) of everything shown except the Step."""
        shown = [(label, form.format(row[name])) for label, name, form in _SHOWN if name in row]
        shown += [(name, f"{value:.3f}") for name, value in evals.items()]
        if self._steps:
            shown.append(("eta", _duration(self._remaining(self._steps))))
        return shown

    def _count(self) -> str:
        return f"{self._done}/{self._steps}" if self._steps else f"{self._done}"

    def _remaining(self, steps: int) -> float:
        """Seconds left at the pace of the last Steps; nan before the first."""
        left = max(0, steps - self._done)
        return left * sum(self._durations) / len(self._durations) if self._durations else math.nan

    def _panel(self) -> Table:
        """What rich draws: a bar with the Step, and the figures below."""
        head = Table.grid(padding=(0, 1))
        total = None if self._steps is None else self._steps - self._first
        bar = ProgressBar(total=total, completed=self._done - self._first, width=40)
        title = "  ".join(filter(None, [self._title, self._phase]))
        head.add_row(Text(title), bar, self._count())
        panel = Table.grid()
        panel.add_row(head)
        panel.add_row(Text("  ".join(f"{label} {text}" for label, text in self._figures)))
        return panel

    def _print(self, text: str) -> None:
        """Print one line; once the output has no reader, the run goes on without a display."""
        if self._quiet:
            return
        try:
            self._stream.write(one_line(text) + "\n")
            self._stream.flush()
        except OSError as error:  # its reader is gone, or its disk is full
            self._quiet = True
            problem = "the progress cannot be shown any more (%s); the run goes on without"
            _log.warning(problem, error.strerror)


def _is_shown(name: str) -> bool:
    """Whether a metric is an evaluation's, after Step 0, that is shown."""
    later = name.startswith("eval/") and not name.startswith("eval/initial/")
    return later and not name.endswith(_LEFT_OUT)


def _duration(seconds: float) -> str:
    """`42s`, `3m07s`, `2h05m`; `?` where it is not known."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
