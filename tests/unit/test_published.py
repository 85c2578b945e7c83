"""The benchmark of published results: its goals hold, and its schedules are what they say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from benchmarks import published
from benchmarks.published import (
    Row,
    earl,
    inputs,
    ordered,
    rows,
    sizes,
    table,
)
from benchmarks.published_areal import AdmissionRule, asynchronous
from benchmarks.published_ours import areal_by_us
from benchmarks.published_schedules import (
    Engines,
    Pool,
    Rollouts,
    Trainer,
    allocation,
    colocated,
    cost_gain,
    gpus,
    overlapped,
    streamed,
    synchronous,
)
from engine.cost.distribution import constant, lognormal
from engine.cost.passes import Sizes

ROLLOUTS = Rollouts(rows=256, prompt=100, lengths=lognormal(2000, 0.8, 8000), microbatch=32768)


@cache
def found() -> dict[str, Row]:
    """All rows of a quick run, by name."""
    return {row.name: row for row in rows(quick=True)}


@cache
def small() -> Sizes:
    """The model of 1.5B."""
    return sizes(inputs(), "1_5B")


def sides() -> tuple[Engines, Trainer]:
    """Three engines, and a trainer on one device."""
    engines = Engines(model=small(), where=gpus("H800"), replicas=3, memory=0.8)
    return engines, Trainer(model=small(), where=gpus("H800"))


def pool(devices: int = 32, **how: object) -> Pool:
    """Devices with the model of 7B."""
    return replace(
        Pool(
            model=sizes(inputs(), "7B"),
            device="H800",
            gpus=devices,
            tensor=(1, 1),
            node=8,
            memory=0.9,
        ),
        **how,
    )


@pytest.mark.long
def test_no_goal_is_missed() -> None:
    held = {row.name for row in found().values() if row.holds}
    assert [row.name for row in found().values() if row.holds is False] == []
    models = ("7B", "32B", "72B")
    assert held >= {
        "areal/1_5B/asynchronous",
        "areal/7B/asynchronous",
        "areal/sizes_in_order",
        *(f"streamrl/{model}/{kind}" for model in models for kind in ("streamed", "allocation")),
        "earl/signs",
    }


@pytest.mark.long
def test_the_heterogeneous_cost_is_that_of_memory_and_price() -> None:
    assert found()["streamrl/cost_by_memory"].simulated == pytest.approx(1.33, abs=0.005)
    assert cost_gain(0.35, 0.29) == pytest.approx(1.0 / (0.65 + 0.29 * 0.35))


@pytest.mark.long
def test_earl_has_all_cells_and_the_cell_that_does_not_fit() -> None:
    cells = [row for name, row in found().items() if row.unit == "%"]
    assert len(cells) == 29
    assert sum(row.wrong for row in cells) == 29 - found()["earl/signs"].simulated
    assert found()["earl/32768x128/of_the_cache_with_tp_4"].simulated > 4


def test_with_a_smaller_cache_all_of_earls_signs_are_right() -> None:
    data = inputs()
    for memory, right in ((0.9, 25), (0.74, 25), (0.7, 29)):
        changed = {**data, "earl": {**data["earl"], "memory": memory}}
        assert {row.name: row.simulated for row in earl(changed)}["earl/signs"] == right


def test_every_row_with_a_published_number_names_its_source() -> None:
    assert all("arXiv:" in row.source for row in found().values() if row.published is not None)


def test_without_lag_the_asynchronous_run_is_the_synchronous_one() -> None:
    engines, trainer = sides()
    waiting = synchronous(ROLLOUTS, engines, trainer, batches=8)
    run = asynchronous(ROLLOUTS, engines, trainer, AdmissionRule(eta=0), steps=16, scale=1)
    assert run.lag == 0
    assert run.seconds == pytest.approx(waiting, rel=0.05)


@pytest.mark.parametrize("eta", [1, 2, 4])
def test_only_the_exact_intake_bounds_the_lag(eta: int) -> None:
    plain, exact = (
        asynchronous(ROLLOUTS, *sides(), AdmissionRule(eta=eta, exact=e), steps=12, scale=1)
        for e in (False, True)
    )
    assert exact.lag <= eta
    assert exact.late == 0.0
    assert plain.lag > eta
    if eta == 1:  # the first Steps of a run with more lag are not like the others
        assert plain.seconds < exact.seconds


def test_equal_lengths_leave_nothing_to_overtake() -> None:
    rollouts = replace(ROLLOUTS, lengths=constant(1000))
    assert asynchronous(rollouts, *sides(), AdmissionRule(eta=1), steps=8, scale=1).lag <= 1


def test_a_full_cache_sends_rows_back_and_every_row_is_trained_all_the_same() -> None:
    engines, trainer = sides()
    tight = replace(engines, memory=0.045)  # room for some ten rows
    assert tight.room < 30_000
    wide = asynchronous(ROLLOUTS, engines, trainer, AdmissionRule(eta=1), steps=6, scale=1)
    full = asynchronous(ROLLOUTS, tight, trainer, AdmissionRule(eta=1), steps=6, scale=1)
    assert full.seconds > wide.seconds


def test_streaming_hides_training_but_not_the_longest_row() -> None:
    answers = ROLLOUTS.answers(0, ROLLOUTS.rows)
    devices = pool()
    longest = float(devices.engines(24).ends(ROLLOUTS, answers).max())
    assert longest < streamed(devices, ROLLOUTS, answers)
    assert streamed(devices, ROLLOUTS, answers) < longest + devices.trainer(8).seconds(
        ROLLOUTS, answers
    )


def test_colocated_is_generation_and_training_on_all_devices() -> None:
    answers, devices = ROLLOUTS.answers(0, ROLLOUTS.rows), pool()
    parts = devices.engines(32).ends(ROLLOUTS, answers).max()
    parts += devices.trainer(32).seconds(ROLLOUTS, answers)
    assert parts < colocated(devices, ROLLOUTS, answers) < parts + 1


def test_the_best_allocation_is_that_of_all_splits() -> None:
    answers, devices = ROLLOUTS.answers(0, ROLLOUTS.rows), pool(64, trained=2, scored=3)
    gain, best = allocation(devices, ROLLOUTS, answers)
    each = [overlapped(devices, split, ROLLOUTS, answers) for split in devices.splits]
    assert overlapped(devices, best, ROLLOUTS, answers) == min(each)
    assert gain == overlapped(devices, 32, ROLLOUTS, answers) / min(each) >= 1.0


def test_misses_come_first_then_wrong_signs_then_the_worst() -> None:
    near = Row(name="near", published=2.0, simulated=2.1)
    far = Row(name="far", published=2.0, simulated=1.0)
    wrong = Row(name="wrong", published=1.0, simulated=-1.0, unit="%", wrong=True)
    missed = Row(name="missed", published=1.0, simulated=1.01, least=1.2)
    assert [row.name for row in ordered([near, far, wrong, missed])] == [
        *("missed", "wrong", "far", "near")
    ]
    assert [c[5] for c in table([near, far, wrong, missed])[1]] == ["NO", "wrong sign", "", ""]


def test_a_goal_with_two_bounds_is_two_results() -> None:
    row = Row(name="a", published=2.0, simulated=3.0, least=1.0, most=2.5)
    assert [(r.name, r.goal, r.holds) for r in row.results()] == [
        ("a/least", 1.0, True),
        ("a/most", 2.5, False),
    ]
    assert row.holds is False
    assert row.error == pytest.approx(50.0)


def test_what_our_coordinator_gives_is_a_column_where_there_is_any() -> None:
    rows_ = [Row(name="a", published=2.0, simulated=3.0), Row(name="b", published=1, simulated=1)]
    assert "with this coordinator" not in table(rows_)[0]
    head, cells = table([replace(rows_[0], ours=2.5), rows_[1]])
    assert head[3] == "with this coordinator"
    assert {c[0]: c[3] for c in cells} == {"a": "2.5 x", "b": ""}


@pytest.mark.long
def test_our_coordinator_runs_a_published_run_where_it_fits(all_installed: None) -> None:
    areal = inputs()["areal"] | {"rows": 256}
    results = dict(areal_by_us(areal, {"model": "1_5B", "gpus": 16}, small()))
    assert set(results) == {
        "areal/1_5B/synchronous_step",
        "areal/1_5B/asynchronous_step",
        "areal/1_5B/asynchronous",
    }
    assert results["areal/1_5B/asynchronous"] > 1.0
    large = dict(areal_by_us(areal, {"model": "32B", "gpus": 16}, sizes(inputs(), "32B")))
    assert large == {}, "activations of 28,000 tokens"


def test_lengths_are_those_of_the_log() -> None:
    logged = inputs()["areal"]["lengths"]
    short = lognormal(**(logged | {"longest": 16384}))
    assert 7000 < short.mean < 8300
    assert np.mean(short.lengths == 16384) == pytest.approx(0.12, abs=0.01)
    assert np.mean(lognormal(**logged).lengths == logged["longest"]) < 0.05
    assert published.DATA.is_file()
