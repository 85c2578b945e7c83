"""The benchmark of published results: what counts as reproduced, and that its schedules are what
they say. Which numbers are reproduced is a result of the benchmark, and no test asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import published
from benchmarks.ppo_plans import PpoPlan, list_sides, plan_ppo
from benchmarks.published import UNTUNED, earl, fit_of, inputs, rows, sizes
from benchmarks.published_areal import AdmissionRule, asynchronous
from benchmarks.published_ours import StreamSplits, areal_by_us, streamrl_by_us
from benchmarks.published_schedules import (
    Engines,
    Pool,
    Rollouts,
    Trainer,
    allocation,
    best_streamed,
    colocated,
    cost_gain,
    gpus,
    overlapped,
    streamed,
    synchronous,
)
from benchmarks.published_table import NOTHING, REACHED, WITHIN, Row, ordered, summary, table
from engine.plan.cost.devices import KINDS, catalogue
from engine.plan.cost.distribution import constant_length, lognormal
from engine.plan.cost.model_passes import Sizes

ROLLOUTS = Rollouts(rows=256, prompt=100, lengths=lognormal(2000, 0.8, 8000), microbatch=32768)


@cache
def found(*, fitted: bool = False) -> Mapping[str, Row]:
    """All rows of a quick run, by name."""
    fit = fit_of(inputs()) if fitted else UNTUNED
    return {row.name: row for row in rows(quick=True, fit=fit)}


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
def test_no_number_rests_on_a_published_result_unless_that_is_asked_for() -> None:
    assert {row.fitted for row in found().values()} == {()}
    assert all("fitted" not in row.verdict for row in found().values())


@pytest.mark.long
def test_with_what_was_fitted_nothing_is_called_reproduced() -> None:
    fitted = found(fitted=True)
    assert list(fitted) == list(found())
    assert not [row.name for row in fitted.values() if "reproduced" in row.verdict]
    free = {name for name, row in fitted.items() if not row.fitted}
    assert free == {"earl/32768x128/of_the_cache_with_tp_4"}, "memory alone"
    assert {name for name in found() if found()[name].simulated == fitted[name].simulated} >= free


@pytest.mark.long
def test_every_fitted_number_names_what_it_rests_on() -> None:
    by_prefix = {
        "areal/": {"decode.step", "decode.layer", "train.compute"},
        "streamrl/72B/": {"decode.step", "decode.layer", "train.compute"},
        "streamrl/cost_by_memory": {"share"},
        "streamrl/cost_by_decode": {"share", "decode.step", "decode.layer"},
        "earl/1024x8": {"decode.step", "decode.layer"},
    }
    for prefix, names in by_prefix.items():
        some = [row for name, row in found(fitted=True).items() if name.startswith(prefix)]
        assert some
        assert all(set(row.fitted) == names for row in some)


def test_the_catalogue_has_none_of_the_fitted_values() -> None:
    fit, own = fit_of(inputs()), catalogue().coefficients["gpu"]
    assert fit.reached is not None
    assert set(fit.reached) == set(KINDS)
    assert all(each.origin == "fitted" for each in fit.reached.values())
    for name in fit.passes:
        kind, part = name.split(".")
        assert getattr(fit.reached[kind], part) != getattr(own[kind], part)


def test_fitted_coefficients_reach_every_place() -> None:
    fit = fit_of(inputs())
    devices = pool(reached=fit.reached)
    for where in (devices.engines(8).where, devices.trainer(8).where, gpus("H20", fit.reached)):
        assert where.coefficients == fit.reached
    assert gpus("H20").coefficients == catalogue().coefficients["gpu"]


@pytest.mark.long
def test_the_cost_of_heterogeneous_devices_is_that_of_memory_and_price() -> None:
    assert cost_gain(0.35, 0.29) == pytest.approx(1.0 / (0.65 + 0.29 * 0.35))
    assert found(fitted=True)["streamrl/cost_by_memory"].simulated == pytest.approx(
        cost_gain(0.35, 3.35 / 4.0 / 2.85)
    )


@pytest.mark.long
def test_earl_has_all_cells_and_the_cell_that_does_not_fit() -> None:
    cells = [row for name, row in found().items() if row.unit == "%"]
    assert len(cells) == 29
    right = sum(row.ratio is not None and row.ratio > 0 for row in cells)
    assert right == found()["earl/signs"].simulated
    assert found()["earl/32768x128/of_the_cache_with_tp_4"].simulated > 4


def test_with_a_smaller_cache_more_of_earls_signs_are_right() -> None:
    def right(memory: float) -> float:
        data: dict[str, Any] = inputs() | {"earl": inputs()["earl"] | {"memory": memory}}
        return {row.name: row.simulated for row in earl(data, UNTUNED)}["earl/signs"]

    assert right(0.9) < right(0.6) == 29


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
    rollouts = replace(ROLLOUTS, lengths=constant_length(1000))
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


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row(name="near", published=2.0, simulated=2.4), "reproduced"),
        (Row(name="far", published=2.0, simulated=2.6), "not reproduced"),
        (Row(name="less", published=-20.0, simulated=-16.0, unit="%"), "reproduced"),
        (Row(name="sign", published=-20.0, simulated=20.0, unit="%"), "not reproduced"),
        (Row(name="all", published=3, simulated=3, within=0.0), "reproduced"),
        (Row(name="most", published=29, simulated=28, within=0.0), "not reproduced"),
        (Row(name="a", published=2.0, simulated=2.0, fitted=("share",)), "fitted"),
        (Row(name="b", published=2.0, simulated=9.0, fitted=("share",)), "fitted"),
        (Row(name="c", published=2.0, simulated=2.0, assumed=True), "rows assumed"),
        (Row(name="d", published=2.0, simulated=9.0, assumed=True), "not reproduced"),
        (Row(name="e", published=None, simulated=1.2, most=1.25), "in the published range"),
        (Row(name="f", published=None, simulated=1.3, most=1.25), "not reproduced"),
        (Row(name="g", published=None, simulated=1.3), ""),
    ],
    ids=lambda value: value.name if isinstance(value, Row) else "",
)
def test_when_a_number_is_reproduced(row: Row, verdict: str) -> None:
    assert row.verdict == verdict


def test_the_furthest_come_first_with_their_ratio() -> None:
    near = Row(name="near", published=2.0, simulated=2.1)
    far = Row(name="far", published=2.0, simulated=1.0)
    wrong = Row(name="wrong", published=1.0, simulated=-1.0, unit="%")
    beyond = Row(name="beyond", published=None, simulated=1.3, most=1.25)
    bare = Row(name="bare", published=None, simulated=1.0)
    some = [near, bare, far, wrong, beyond]
    assert [row.name for row in ordered(some)] == ["wrong", "far", "beyond", "near", "bare"]
    head, cells = table(some)
    shown = [dict(zip(head, each, strict=True)) for each in cells]
    assert [each["ratio"] for each in shown] == ["-1.00", "0.50", "1.04", "1.05", ""]
    assert {each["fitted"] for each in shown} == {NOTHING}
    assert shown[2]["published"] == "to 1.25 x"
    assert summary(some) == "1 of 3 published numbers are reproduced"
    fitted = replace(near, fitted=("share",))
    told = "0 of 2 published numbers are reproduced, 1 rest on something fitted"
    assert summary([fitted, far]) == told
    assert table([fitted])[1][0][4] == "share"


def test_a_number_that_counts_has_its_bounds_in_the_results() -> None:
    row = Row(name="a", published=2.0, simulated=3.0)
    assert [(r.name, r.goal, r.holds) for r in row.results()] == [
        ("a/least", 2.0 * (1 - WITHIN), True),
        ("a/most", 2.0 * (1 + WITHIN), False),
    ]
    for other in (replace(row, fitted=("share",)), replace(row, published=None)):
        assert [(r.name, r.goal, r.holds) for r in other.results()] == [("a", None, None)]


def test_what_our_coordinator_gives_is_a_column_where_there_is_any() -> None:
    rows_ = [Row(name="a", published=2.0, simulated=3.0), Row(name="b", published=1, simulated=1)]
    assert "with this coordinator" not in table(rows_)[0]
    head, cells = table([replace(rows_[0], ours=2.5), rows_[1]])
    assert head[3:5] == ("with this coordinator", "of its own")
    assert {c[0]: c[3:5] for c in cells} == {"a": ("2.5 x", "0.833 x"), "b": ("", "")}


def test_our_coordinator_is_to_reach_nine_tenths_of_the_own_schedule() -> None:
    slower = Row(name="a", published=None, simulated=90.0, unit="s", ours=100.0)
    assert slower.reached == pytest.approx(0.9)
    shares = [r for r in replace(slower, ours=101.0).results() if r.goal is not None]
    assert [(r.name, r.goal, r.holds) for r in shares] == [
        ("a/with this coordinator/of its own", REACHED, False)
    ]
    gain = Row(name="b", published=None, simulated=2.0, ours=1.9)
    assert gain.reached == pytest.approx(0.95), "more is better of a ratio"
    assert replace(gain, ours=None).reached is None


@pytest.mark.long
def test_our_coordinator_runs_a_published_run_where_it_fits(all_installed: None) -> None:
    areal = inputs()["areal"] | {"rows": 512}
    results = dict(areal_by_us(areal, {"model": "1_5B", "gpus": 16, "tensor": 1}, small()))
    assert set(results) == {
        "areal/1_5B/synchronous_step",
        "areal/1_5B/asynchronous_step",
        "areal/1_5B/asynchronous",
    }
    assert results["areal/1_5B/asynchronous"] > 1.0, "that Steps overlap"
    large = {"model": "32B", "gpus": 16, "tensor": 2}
    assert not dict(areal_by_us(areal, large, sizes(inputs(), "32B"))), "which does not fit"


def ppo(**how: object) -> PpoPlan:
    """Few rows of the model of 1.5B on two hosts."""
    plan = PpoPlan(
        model=small(),
        device="H800",
        generating=8,
        training=8,
        tensor=(1, 2),
        rows=64,
        longest=4000,
        longest_prompt=512,
        microbatch=32768,
    )
    return replace(plan, **how)


def test_actor_and_critic_train_where_reference_and_critic_score(
    all_installed: None, tmp_path: Path
) -> None:
    [plan] = plan_ppo(tmp_path, ppo(stream="arrival"))
    actor, critic = plan.node("train_policy"), plan.node("train_critic")
    assert actor.workers == critic.workers == plan.node("reference").workers
    assert (actor.layout.tensor, actor.layout.tokens) == (2, 32768)
    assert {n.name for n in plan.nodes if n.work == "forward"} == {"reference", "value"}
    assert (actor.in_parts, critic.in_parts) == (True, True), "the stream goes through to both"
    (source,) = plan.sources
    assert source.part_tokens == 32768 * 4 // 2


def test_with_a_lag_the_actor_scores_too(all_installed: None, tmp_path: Path) -> None:
    [plan] = plan_ppo(tmp_path, ppo(max_lag=1))
    assert plan.node("old").workers == plan.node("train_policy").workers
    assert plan.node("rollout").binds_late


def test_forward_passes_get_devices_by_their_share_of_the_work() -> None:
    published_side, *tiers = list_sides(ppo(training=40, tensor=(1, 8)))
    [side] = published_side
    assert (side.scoring, side.tensor, side.scored, side.shard) == (0, 8, 8, False)
    assert tiers[0][0] == replace(side, may_wait=True)
    tiers[0] = tiers[0][1:]
    # Of 40, with 8 passes of training and one each of two others.
    assert [tier[0].scoring for tier in tiers] == [0, 0, 4, 8, 8]
    assert [tier[0].scored for tier in tiers] == [8, 8, 1, 8, 8]
    for tier in tiers:
        assert [side.tensor for side in tier] == [8, 4, 2, 1]
        assert all(side.shard for side in tier)
    longest = [tier[0].tokens == 4512 for tier in tiers]
    assert longest == [False, True, False, False, True], "the tokens of the longest row"


def test_weights_that_no_device_holds_have_ranks_and_wait_on_the_host(
    all_installed: None, tmp_path: Path
) -> None:
    large = ppo(model=sizes(inputs(), "72B"), generating=64, training=64, tensor=(8, 8))
    plans = plan_ppo(tmp_path, replace(large, rows=1024, longest=20000, stream="arrival"))
    nodes = [plan.node(name) for plan in plans for name in ("reference", "value")]
    assert {node.layout.tensor for node in nodes} == {8, 4}
    assert {(node.layout.offload, len(node.workers)) for node in nodes} == {("weights", 64)}
    assert all(node.in_parts for node in nodes)


def test_each_way_to_split_training_that_fits_is_planned(
    all_installed: None, tmp_path: Path
) -> None:
    """72B does not fit by tensor ranks alone."""
    model = sizes(inputs(), "72B")
    plans = plan_ppo(tmp_path, ppo(model=model, generating=16, training=40, tensor=(8, 8)))
    layouts = [plan.node("train_critic").layout for plan in plans]
    assert [layout.tensor for layout in layouts] == [8, 4]
    assert [layout.shard for layout in layouts] == [True, True]
    assert all(layout.data * layout.tensor == 40 for layout in layouts)
    assert plans[0].node("reference").layout.offload == "weights"


@pytest.mark.parametrize(("ranks", "cards"), [((16, 1), 4), ((8, 4), 2), ((8, 8), 1), ((2, 4), 4)])
def test_data_ranks_on_several_hosts_have_the_cards_of_one(
    ranks: tuple[int, int], cards: int
) -> None:
    """At most what the link between devices has, which is that of four cards."""
    data, tensor = ranks
    where = gpus("H800", data=data, tensor=tensor)
    assert where.between == cards * where.device.network


@pytest.mark.long
def test_our_coordinator_runs_streams_where_they_fit(all_installed: None) -> None:
    streamrl = inputs()["streamrl"] | {"rows": 64}
    run = {"model": "7B", "gpus": 32, "tensor": [1, 2]}
    splits = StreamSplits(streamed=16, overlapped=16)
    steps = dict(streamrl_by_us(streamrl, run, sizes(inputs(), "7B"), splits))
    assert set(steps) == {
        f"streamrl/7B/{kind}_step"
        for kind in ("streamed", "streamed_in_order", "one_step_off", "asynchronous")
    }
    assert steps["streamrl/7B/asynchronous_step"] < steps["streamrl/7B/streamed_step"]
    large = {"model": "72B", "gpus": 32, "tensor": [8, 8]}
    assert not dict(streamrl_by_us(streamrl, large, sizes(inputs(), "72B"), splits))


def test_the_best_streamed_split_is_that_of_all() -> None:
    answers, devices = ROLLOUTS.answers(0, ROLLOUTS.rows), pool()
    seconds, split = best_streamed(devices, ROLLOUTS, answers)
    assert seconds == streamed(devices, ROLLOUTS, answers)
    assert split in devices.splits


def test_lengths_are_those_of_the_log() -> None:
    logged = inputs()["areal"]["lengths"]
    short = lognormal(**(logged | {"longest": 16384}))
    assert 7000 < short.mean < 8300
    assert np.mean(short.lengths == 16384) == pytest.approx(0.12, abs=0.01)
    assert np.mean(lognormal(**logged).lengths == logged["longest"]) < 0.05
    assert published.DATA.is_file()
