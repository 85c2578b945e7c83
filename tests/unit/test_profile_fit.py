"""From measured cells to coefficients: what a fit recovers, and which cells a profile measures."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.graph import Graph
from dataflow.kernel import KernelNode
from dataflow.schema import Advantage, Rollout
from engine.plan.cost.devices import Coefficients, Kind, coefficients, device
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.models import Shape
from engine.plan.cost.profile import PeakCorrection, ProfileCell
from engine.predict.profile import generated_rows as generated
from engine.predict.profile import kernel_timing as measuring
from engine.predict.profile.fitting import fit_coefficients, fit_peaks
from engine.predict.profile.grid import choose_works
from engine.predict.profile.other_load import CoreWaits
from engine.predict.profile.predictions import (
    MeasuredCell,
    ProfiledWork,
    make_longest,
    predict_peak,
    predict_seconds,
)
from graphs.sft import sft
from tests.kit.graphs import grpo_graph
from tests.kit.plans import planned

CPU = device("cpu")
SHAPE = Shape(
    layers=4, hidden=256, intermediate=768, heads=8, kv_heads=8, head_dim=32, vocabulary=98,
    context=1024, tied=True,
)  # fmt: skip
SIZES = Sizes(parameters=3_500_000, shape=SHAPE, dtype="float32")


def work(kind: Kind, **changes: object) -> ProfiledWork:
    """Of a Model of 4 x 256."""
    whole = ProfiledWork(of=0, node="n", kind=kind, model=SIZES, kernel="torch", cores=1)
    return replace(whole, **changes)


def cells(*answers: int) -> list[ProfileCell]:
    """Rows and lengths in all combinations."""
    return [
        ProfileCell(rows=rows, prompt=prompt, answer=answer, samples=8, slots=256, budget=16384)
        for rows in (8, 32, 128)
        for prompt in (16, 128)
        for answer in answers
    ]


def truth(**shares: float) -> dict[Kind, Coefficients]:
    """What the made-up machine reaches: some times what the catalogue says."""
    found: dict[Kind, Coefficients] = {}
    for kind, known in coefficients(CPU).items():
        changed = {name: getattr(known, name) * share for name, share in shares.items()}
        found[kind] = replace(known, **changed)
    return found


def measured(of: ProfiledWork, how: Mapping[Kind, Coefficients], cell: ProfileCell) -> MeasuredCell:
    """A cell that takes just what the formulas say with these coefficients."""
    plain = make_longest(cell)
    return replace(plain, cell=replace(cell, seconds=predict_seconds(of, CPU, how, plain)))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["decode", "forward", "train"])
@pytest.mark.parametrize(
    "shares",
    [{"compute": 0.3}, {"compute": 2.0, "step": 0.5}, {"reads": 0.1}],
)
def test_a_fit_predicts_sizes_that_it_has_not_seen(kind: Kind, shares: dict[str, float]) -> None:
    of, how = work(kind, updates=2), truth(**shares)
    seen = [measured(of, how, cell) for cell in cells(1, 32)]
    shares_of_fit, fitted_seconds = fit_coefficients(of, CPU, seen)
    for cell, fit in zip(seen, fitted_seconds, strict=True):
        assert fit == pytest.approx(cell.cell.seconds, rel=0.05)
    for cell in (cells(16)[3], cells(24)[4]):
        expected = predict_seconds(of, CPU, how, make_longest(cell))
        complete = {**coefficients(CPU), **shares_of_fit}
        predicted = predict_seconds(of, CPU, complete, make_longest(cell))
        assert predicted == pytest.approx(expected, rel=0.05)
    assert {c.origin for c in shares_of_fit.values()} == {"fitted"}
    assert set(shares_of_fit) == ({"decode", "prefill"} if kind == "decode" else {kind})


def test_a_cell_without_enough_memory_counts_for_nothing() -> None:
    of = work("forward")
    seen = [measured(of, truth(), cell) for cell in cells(8)]
    lost = MeasuredCell(cell=replace(seen[-1].cell, seconds=None))
    both, said = fit_coefficients(of, CPU, [*seen, lost])
    assert both == fit_coefficients(of, CPU, seen)[0]
    assert said[-1] is None
    nothing, said = fit_coefficients(of, CPU, [lost])
    assert nothing["forward"].compute == coefficients(CPU)["forward"].compute
    assert said == [None]


sizes = st.lists(st.tuples(st.integers(1, 2**36), st.integers(1, 2**36)), min_size=1, max_size=12)


@given(sizes)
def test_no_measured_peak_is_above_its_prediction(pairs: list[tuple[int, int]]) -> None:
    seen = [peaked(peak, estimated) for peak, estimated in pairs]
    found = fit_peaks(seen)
    assert found.base >= 0
    assert found.factor > 0
    assert all(found.of(cell.cell.estimated) >= cell.cell.peak for cell in seen)


@given(st.integers(0, 2**30), st.floats(0.1, 2.5), st.lists(st.integers(2**20, 2**34), min_size=1))
def test_peaks_on_a_line_are_predicted_tightly(
    base: int, factor: float, estimates: list[int]
) -> None:
    seen = [peaked(int(base + factor * size), size) for size in estimates]
    found = fit_peaks(seen)
    for cell in seen:
        assert 1.0 <= found.of(cell.cell.estimated) / cell.cell.peak <= 1.25


def test_a_line_of_peaks_is_close_to_cells_near_the_runs() -> None:
    """Small cells, which need much less than the line says, do not turn it there."""
    near = [peaked(1300, 1000), peaked(2300, 2000), peaked(4300, 4000)]
    correction = fit_peaks([peaked(50, 10), peaked(60, 100), *near])
    assert all(correction.of(c.cell.estimated) <= 1.1 * c.cell.peak for c in near)


def peaked(peak: int, estimated: int) -> MeasuredCell:
    """A cell of which only the peak matters."""
    cell = ProfileCell(rows=1, prompt=1, answer=1, peak=peak, estimated=estimated)
    return MeasuredCell(cell=cell)


def test_without_peaks_nothing_is_corrected() -> None:
    assert fit_peaks([peaked(0, 1)]) == PeakCorrection()


def worked(
    graph: Graph, *, plans: int = 1, quick: bool = True, longest: float
) -> list[ProfiledWork]:
    """What is measured of so many plans of a graph, of which nothing is left out."""
    found, skipped = choose_works([planned(graph)] * plans, CPU, quick=quick, longest=longest)
    assert skipped == []
    return found


@pytest.mark.usefixtures("tiny")
def test_what_is_measured_of_a_plan() -> None:
    found = worked(grpo_graph(), quick=False, longest=1.0)
    names = {(each.node, each.kind) for each in found}
    assert names >= {("rollout", "decode"), ("train_policy", "train")}
    for each in found:
        estimates = [predict_peak(each, cell) for cell in each.cells]
        assert [cell.estimated for cell in each.cells] == sorted(estimates)
        assert len(set(each.cells)) == len(each.cells)
        for cell in each.cells:
            assert cell.rows % cell.samples == 0
            assert cell.prompt + cell.answer <= each.model.shape.context
    assert any(cell.answer == 1 for each in found for cell in each.cells)
    training = next(each.cells for each in found if each.kind == "train")
    ratios = [cell.answer / cell.prompt for cell in training]
    assert max(ratios) > 4 * min(ratios)


@pytest.mark.usefixtures("tiny")
def test_rows_fit_the_positions_of_a_model_whose_lengths_nobody_knows() -> None:
    config = Path("tiny/config.json")
    short = json.loads(config.read_text()) | {"max_position_embeddings": 600}
    config.write_text(json.dumps(short))  # 512 + 512 are assumed
    cells = worked(sft("tiny", "demos.jsonl"), longest=1e3)[0].cells
    assert max((c.prompt + c.answer, c.prompt) for c in cells) == (600, 300)


@pytest.mark.usefixtures("tiny")
def test_a_model_is_measured_once_for_each_kind_of_pass() -> None:
    once, twice = (worked(grpo_graph(), plans=plans, longest=1.0) for plans in (1, 2))
    assert [each.key for each in twice] == [each.key for each in once]


@pytest.mark.usefixtures("tiny")
def test_generations_with_other_samples_are_measured_apart() -> None:
    """As those of an evaluation are: one answer a prompt beside a group."""
    graphs = [grpo_graph(n=n) for n in (8, 2)]
    found, _ = choose_works([planned(g) for g in graphs], CPU, quick=True, longest=1.0)
    decodes = [each for each in found if each.kind == "decode"]
    assert [each.samples for each in decodes] == [8, 2]
    assert [{cell.samples for cell in each.cells} for each in decodes] == [{8}, {2}]


@pytest.mark.usefixtures("tiny")
def test_of_one_prompt_fewer_answers_are_measured() -> None:
    """Else a decode step's own time could not be told from that of its rows."""
    works = worked(grpo_graph(batch=1, n=32), quick=False, longest=1e3)
    rows = {(each.kind, cell.rows) for each in works for cell in each.cells}
    assert rows >= {("decode", 2), ("decode", 8), ("decode", 32), ("train", 32)}
    # A loss may need whole groups.
    assert not rows & {("train", 2), ("train", 8)}


@pytest.mark.usefixtures("tiny")
def test_a_shorter_limit_gives_smaller_cells_not_fewer() -> None:
    long, short = (worked(grpo_graph(), quick=False, longest=s) for s in (1e3, 0.1))
    assert [(w.node, w.cores) for w in long] == [(w.node, w.cores) for w in short]
    for one, other in zip(long, short, strict=True):
        assert max(c.tokens for c in other.cells) < max(c.tokens for c in one.cells)
        assert len(other.cells) >= len(one.cells) // 2


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
def test_generated_rows_have_the_cells_lengths(
    prompts: int, samples: int, prompt: int, answer: int
) -> None:
    cell = ProfileCell(rows=prompts * samples, prompt=prompt, answer=answer, samples=samples)
    of_answers = ("completion_ids", "completion_mask", "sampler_logprobs")
    node = KernelNode(
        name="n",
        operator="train",
        reads={"rows": ("prompt_ids", *of_answers), "loss.advantage": ("advantage",)},
        schemas={"rows": Rollout, "loss.advantage": Advantage},
    )
    found = generated.draw_inputs(cell, node, 50)
    rows, answers = found["rows"], [answer] * cell.rows
    assert rows.ragged("prompt_ids").lengths.tolist() == [prompt] * cell.rows
    for name in of_answers:
        assert rows.ragged(name).lengths.tolist() == answers
    assert found["loss.advantage"].ragged("advantage").lengths.tolist() == answers
    assert rows.ragged("completion_ids").values.max() < 50
    assert (rows.ragged("completion_mask").values == 1).all()
    ids = rows.ragged("prompt_ids").values.reshape(prompts, samples, prompt)
    assert (ids == ids[:, :1]).all(), "samples of one prompt have one prompt"


def test_prompts_come_as_token_ids() -> None:
    made = generated.draw_prompts(ProfileCell(rows=12, prompt=7, answer=1, samples=4), 50)
    assert made.ragged("prompt").lengths.tolist() == [7, 7, 7]


def run_that_raises(error: Exception) -> measuring.CellRun:
    """A cell whose call raises this."""
    return measuring.CellRun(cell=cells(8)[0], call=Mock(side_effect=error))


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")],
)
def test_too_little_memory_is_a_value(error: Exception) -> None:
    run = run_that_raises(error)
    assert not run.call_once()
    assert run.summarise(1, repeats=3).cell.seconds is None


def test_any_other_error_is_one() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"):
        run_that_raises(RuntimeError("shapes differ")).call_once()


def test_a_call_is_timed_until_the_device_has_done_what_it_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([100.0, 107.0, 200.0])
    clocks = SimpleNamespace(perf_counter=clock.__next__, process_time=lambda: 0.0)
    monkeypatch.setattr(measuring, "time", clocks)
    order: list[str] = []
    monkeypatch.setattr(measuring, "wait_for_device", lambda: order.append("device"))
    call = Mock(side_effect=lambda: order.append("call") or ((1,), (1,)))
    run = measuring.CellRun(cell=cells(8)[0], call=call)
    run.call_once()
    assert order == ["call", "device"]
    assert [timed.seconds for timed in run.calls] == [7.0]
    run_that_raises(MemoryError()).call_once()
    assert order == ["call", "device"], "nothing was launched that could be waited for"


def timed_run(*calls: tuple[float, float, float]) -> measuring.CellRun:
    """A cell whose calls took these seconds, those of CPU, and waited so long for cores."""
    timed = [
        measuring.TimedCall(seconds=seconds, cpu=cpu, waits=CoreWaits(cpu, waited))
        for seconds, cpu, waited in calls
    ]
    return measuring.CellRun(cell=cells(8)[0], call=Mock(), calls=timed)


@pytest.mark.parametrize(
    ("cores", "waited", "seconds", "by_cpu"),
    [(1, 0.01, 2.5, False), (1, 1.0, 2.0, True), (2, 1.0, 2.5, False)],
)
def test_seconds_are_means_and_cpu_seconds_where_one_thread_waited(
    cores: int, waited: float, seconds: float, by_cpu: bool
) -> None:
    told = timed_run((2.0, 1.0, waited), (3.0, 3.0, waited)).summarise(cores, repeats=2).cell
    assert (told.seconds, told.cpu, told.by_cpu) == (seconds, 2.0, by_cpu)
    assert told.others == pytest.approx(2 * waited / (4.0 + 2 * waited))


def test_the_calls_that_waited_least_count_however_long_they_took() -> None:
    run = timed_run((1.0, 1.0, 1.0), (5.0, 5.0, 0.0), (2.0, 2.0, 0.5), (4.0, 4.0, 0.0))
    told = run.summarise(2, repeats=2).cell
    assert (told.seconds, told.others) == (4.5, 0.0)


@pytest.mark.parametrize(
    ("waits", "calls"),
    [([0.0] * 9, 3), ([9.0, 0.0, 0.0, 9.0, 0.0], 5), ([9.0] * 9, 5)],
    ids=["quiet", "quiet after a while", "never quiet"],
)
def test_disturbed_calls_are_made_again_until_enough_were_quiet(
    monkeypatch: pytest.MonkeyPatch, waits: list[float], calls: int
) -> None:
    """Three are wanted, and two more allowed; each wait is that of one call."""
    each = iter(waits)
    looked = iter(lambda: CoreWaits(), None)
    monkeypatch.setattr(measuring, "read_core_waits", looked.__next__)
    monkeypatch.setattr(CoreWaits, "since", lambda now, before: CoreWaits(1.0, next(each)))
    run = measuring.CellRun(cell=cells(8)[0], call=Mock(return_value=((1,), (1,))))
    measuring.call_until_quiet([run], repeats=3, further=2)
    assert len(run.calls) == calls


def test_the_peak_is_what_came_on_top() -> None:
    peak = measuring.ProcessPeak()
    peak.begin()
    peak.again()
    held = mmap.mmap(-1, 64 << 20)  # not from what this process has kept of freed memory
    held.write(bytes(64 << 10) * 1024)
    assert 60 << 20 < peak.most < 200 << 20
    held.close()
    peak.again()
    assert peak.most < 60 << 20


def test_models_that_differ_are_told_apart() -> None:
    key = work("train").key
    assert work("train", cores=2).key == key
    assert work("train", samples=8).key != key, "an answer shares its prompt with others"
    assert work("train", model=replace(SIZES, dtype="bfloat16")).key != key
