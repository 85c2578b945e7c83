"""What a simulated Worker does next, of what ranks do together."""

from __future__ import annotations

from engine.run.simulated_workers.task_queue import Done, Task, TaskQueue, Waiting


def named(name: str, begun: list[str]) -> Task:
    def begin(done: Done) -> None:
        begun.append(name)
        done()

    return begin


def carry_out(queue: TaskQueue, most: int = 100) -> None:
    for _ in range(most):
        task = queue.take(decoding=False)
        if task is None:
            return
        task(lambda: None)


def test_ranks_begin_together_in_the_order_in_which_they_were_told() -> None:
    """Also where one waits behind a chunk of several ranks, and the next comes after that chunk."""
    begun: list[str] = []
    queue = TaskQueue()
    queue.add(Waiting(named("chunk of ranks", begun), chunk=True, together=True))
    queue.add(Waiting(named("chunk", begun), chunk=True))
    queue.add_go(named("first go", begun))
    carry_out(queue, most=1)
    queue.add_go(named("second go", begun))
    carry_out(queue)
    assert begun == ["chunk of ranks", "first go", "second go", "chunk"]
