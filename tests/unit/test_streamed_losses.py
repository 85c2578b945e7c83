"""Parts of a synchronous Step whose rows are lost with their Worker before they are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.protocol import messages as m
from tests.kit.streamed_world import StreamedWorld
from tests.unit.test_streamed_steps import STEPS, length, parts_of, run, streamed_plan

Change = Callable[[m.Event], list[m.Event]]
"""What happens in the place of an event."""


class LosingWorld(StreamedWorld):
    """A world in which Workers are lost and begin again. change: asked until it changes one."""

    def __init__(self, change: Change, seed: int) -> None:
        super().__init__(streamed_plan(), STEPS, length, seed=seed)
        self._change = change
        self.is_changed = False

    def _hear(self, event: m.Event) -> None:
        events = [event] if self.is_changed else self._change(event)
        self.is_changed |= events != [event]
        for each in events:
            if isinstance(each, m.WorkerLost):
                self._queues[each.worker].clear()
            super()._hear(each)
            if isinstance(each, m.WorkerLost):
                self._queues[each.worker].append(_open_again(each.worker))


def _open_again(worker: str) -> Iterator[m.Event]:
    yield m.WorkerOpened(worker=worker, epoch=1)


LOSS = m.WorkerLost(worker="a", epoch=0, error="killed")


def rows_go_before_a_part_is_told(event: m.Event) -> list[m.Event]:
    """Its values are there, what they were computed of is not."""
    is_last = isinstance(event, m.ChunkDone) and event.node == "values"
    return [LOSS, event] if is_last else [event]


def rows_go_before_a_part_is_fetched(event: m.Event) -> list[m.Event]:
    """A train node was told of a part, and finds nobody there."""
    if not isinstance(event, m.PartTrained):
        return [event]
    return [m.FetchFailed(id=event.id, worker=event.worker, peer="a"), LOSS]


def require_all_parts_trained(change: Change) -> None:
    """Require the parts of a run in which nobody is lost, each of them trained once."""
    undisturbed = parts_of(run(streamed_plan(), 0))
    for seed in range(4):
        world = LosingWorld(change, seed)
        world.run()
        assert world.is_changed
        parts = {part[:2]: part for part in parts_of(world)}
        assert list(parts.values()) == undisturbed
        trained = [event.id for event in world.heard if isinstance(event, m.PartTrained)]
        assert len(trained) == len(set(trained)) == len(undisturbed)


def test_a_part_whose_rows_are_being_made_again_is_trained_with_them() -> None:
    require_all_parts_trained(rows_go_before_a_part_is_told)


def test_a_part_that_could_not_be_fetched_is_told_once_more() -> None:
    require_all_parts_trained(rows_go_before_a_part_is_fetched)
