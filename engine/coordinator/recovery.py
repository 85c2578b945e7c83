"""Which Workers there are, and when to stop restarting one.

    a worker is   waits for                    left by
    there         -                            WorkerLost -> down
                                               its retirement -> absent
    down          its process, its kernels     WorkerOpened of the next epoch -> there
                                               WorkerLost -> down, with the epoch after that
    absent        to be begun (replicas.py)    `begin` -> down

Owns: incarnations, the order of what each one says, whose outbox spills, and the limit on deaths.
Does not own: what a loss means for rows (prompt_table.py, dispatch.py), for weights (versions.py)
or for the Step (training.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from engine.coordinator.ordered_inbox import OrderedInbox
from engine.protocol.messages import Event, From, Spilled, WorkerLost, WorkerOpened

DEATHS = 3
"""A Worker that dies so often without finishing an assignment in between, nor being there as a Step
ends, is not begun again.
"""


class Recovery:
    """The Workers of a run. Each counts as there at first, in incarnation 0, but for spare ones."""

    def __init__(self, workers: Iterable[str], spare: Iterable[str] = ()) -> None:
        self._inboxes = {worker: OrderedInbox[Event]() for worker in workers}
        self._absent = set(spare)
        self._down = set(self._absent)
        self._spilling: set[str] = set()
        self.on_able: Callable[[str], None] = nobody_considers
        """Called with a Worker that is there again."""
        self._deaths: dict[str, list[str]] = {}
        """What each Worker died of since it last finished something."""
        self._excused: set[str] = set()

    def in_order(self, event: Event | From) -> Iterator[Event]:
        """The events that this one lets through, each to be handled before the next: a Worker in
        another process may repeat or overtake itself, or be heard after its end, to which one of
        these events may lead.
        """
        if not isinstance(event, From):
            yield event
            return
        inbox = self._inboxes[event.worker]
        for each in inbox.take(event.epoch, event.number, event.event):
            # The event before may have ended its sender: then the rest counts no more (0036).
            if not self.counts(event):
                return
            if isinstance(each, Spilled):
                self._note_spilled(each)
            yield each

    def _note_spilled(self, event: Spilled) -> None:
        if event.nbytes:
            self._spilling.add(event.worker)
        else:
            self._spilling.discard(event.worker)

    def counts(self, message: Event | From) -> bool:
        """Whether the process that says this has not been ended meanwhile."""
        if not isinstance(message, From):
            return True
        return self._inboxes[message.worker].epoch == message.epoch

    @property
    def spilling(self) -> bool:
        """Whether the outbox of some Worker has gone over its memory."""
        return bool(self._spilling)

    def note_lost(self, event: WorkerLost) -> bool:
        """Note that a Worker is gone; False if that is known, or a later incarnation is there."""
        inbox = self._inboxes[event.worker]
        # The same end may be told twice, or once the next incarnation has begun.
        if event.epoch != inbox.epoch:
            return False
        inbox.close()
        self._down.add(event.worker)
        self._spilling.discard(event.worker)
        if event.worker in self._excused:
            self._excused.discard(event.worker)
        else:
            self._deaths.setdefault(event.worker, []).append(event.error)
        return True

    def excuse(self, worker: str) -> None:
        """Its next death does not count: it was short of memory, and has lower limits after it."""
        self._excused.add(worker)

    def note_opened(self, event: WorkerOpened) -> bool:
        """Note that a Worker is there; False if it was, or another incarnation is meant."""
        if event.epoch != self._inboxes[event.worker].epoch or event.worker not in self._down:
            return False
        self._down.discard(event.worker)
        self.on_able(event.worker)
        return True

    def retire(self, worker: str) -> None:
        """A Worker is ended, and nothing of this incarnation counts from now on."""
        self._inboxes[worker].close()
        self._spilling.discard(worker)
        self._down.add(worker)
        self._absent.add(worker)

    def stay_away(self, worker: str) -> None:
        """A Worker that was lost is not begun again: that death does not count."""
        self._absent.add(worker)
        if deaths := self._deaths.get(worker):
            deaths.pop()

    def begin(self, worker: str) -> None:
        """An absent Worker is to open."""
        self._absent.discard(worker)

    def there(self, worker: str) -> bool:
        """Whether a Worker can be told something."""
        return worker not in self._down

    def note_finished(self, worker: str) -> None:
        """Forget what a Worker died of, as it has finished something since."""
        self._deaths.pop(worker, None)

    def step_ended(self) -> None:
        """The run gets on: what Workers that are there died of in other Steps counts no more."""
        for worker in self._deaths.keys() - self._down:
            del self._deaths[worker]

    def hopeless(self, worker: str) -> str:
        """Why a Worker is not restarted, in words; empty while it is."""
        errors = self._deaths.get(worker, [])
        if len(errors) < DEATHS:
            return ""
        return (
            f"worker {worker} died {len(errors)} times without finishing anything in between. The"
            f" first time: {errors[0]}"
        )

    def last_words(self, worker: str) -> str:
        """What a Worker died of the last time."""
        errors = self._deaths.get(worker, [])
        return errors[-1] if errors else "rows that it had are gone"

    def waiting(self) -> list[str]:
        """For the watchdog, in words."""
        lines = [
            f"worker {worker}: has died and is not open again"
            for worker in sorted(self._down - self._absent)
            if self._deaths.get(worker)
        ]
        for worker, inbox in self._inboxes.items():
            if inbox.missing is not None:
                lines.append(
                    f"worker {worker}: its message {inbox.missing} has not come, later ones have"
                )
        return lines


def nobody_considers(worker: str) -> None:
    """What is called where nobody wants to know."""
    del worker
