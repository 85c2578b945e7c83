"""A kernel that waits for environments: what is told of it meanwhile, and afterwards."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from engine.channels.inproc import InprocChannel
from engine.protocol import messages as m
from engine.protocol.reports import Report
from engine.run.worker.in_process_worker import InprocWorkers
from engine.run.worker.worker import Worker
from tests.kit import host_plans
from tests.kit.supervisors import Start

pytestmark = pytest.mark.timeout(120)
WAIT = "flow/outside/numbers@source/environments"
FLIGHT = "flow/in_flight/numbers@source"
PLAN = host_plans.plan(source=host_plans.WaitsOutside)


def values_of(reports: list[Report], name: str) -> list[float]:
    return [value for reported, value, _ in reports if reported == name]


def test_a_wait_in_a_workers_process_comes_with_its_heartbeats(start: Start) -> None:
    with start(PLAN) as supervisor:
        supervisor.reports()
        supervisor.tell(host_plans.chunk(1, range(4)))
        waits_seen: set[str] = set()
        while supervisor.next(0.1) is None:
            waits_seen |= {doing.waits_for for doing in supervisor.doing()}
        host_plans.until(supervisor, m.ChunkDone)
        reports = supervisor.reports()
        assert "environments" in waits_seen
        assert len(values_of(reports, WAIT)) > 1, "no heartbeat came within it"
        assert values_of(reports, FLIGHT) == [4.0, 0.0]
        (waited,) = values_of(reports, "time/numbers/environments")
        assert sum(values_of(reports, WAIT)) == pytest.approx(waited)
        assert waited <= sum(values_of(reports, "time/numbers"))
        (wait,) = [span for span in supervisor.spans() if span.waits]
        assert (wait.track, wait.name) == ("source/numbers", "waits for environments")
        assert supervisor.live_reports() == []


def test_a_wait_in_the_loops_own_process_is_seen_by_other_threads() -> None:
    host_plans.WAITING.clear()
    host_plans.RELEASED.clear()
    worker = Worker("source", PLAN, channel=InprocChannel())
    with closing(InprocWorkers(worker)) as workers:
        list(workers.open())
        workers.tell(host_plans.chunk(1, range(4)))
        loop = threading.Thread(target=lambda: host_plans.until(workers, m.ChunkDone))
        loop.start()
        try:
            assert host_plans.WAITING.wait(30.0)
            (doing,) = workers.doing()
            assert (doing.node, doing.waits_for) == ("numbers", "environments")
            meanwhile = workers.live_reports()
        finally:
            host_plans.RELEASED.set()
            loop.join()
        reports = workers.reports()
        assert values_of(meanwhile, FLIGHT) == [4.0]
        assert values_of(reports, FLIGHT) == [0.0]
        waited = sum(values_of([*meanwhile, *reports], WAIT))
        assert values_of(reports, "time/numbers/environments") == [pytest.approx(waited)]
        assert workers.doing()[0].waits_for == ""
