"""Which nodes of a plan are measured, and on which rows.

Owns: the choice of nodes, and the grid of threads x rows x lengths of each. Does not own: the rows
themselves (generated_rows.py), measuring them (kernel_timing.py).

One node is measured for each Model (by shape, dtype and head), kind of pass, kernel and number of
answers a prompt: others with the same have the same times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from dataflow.model import Model
from engine.plan.cost.devices import Device, coefficients
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.models import cost_of_model, counted_dtype
from engine.plan.cost.profile import PassKey, ProfileCell
from engine.plan.lengths import greatest_lengths
from engine.plan.plan import Plan, PlannedNode
from engine.plan.profiled_passes import kernel_family, kind_of_pass, samples_of
from engine.predict.profile.predictions import (
    ProfiledWork,
    make_longest,
    predict_peak,
    predict_seconds,
)

LENGTHS = ((1 / 8, 1 / 8), (1 / 2, 1 / 2), (1 / 8, 1.0), (1.0, 1.0))
"""Of the greatest prompt and answer of the plan, as shares. Answers are not always short beside
prompts, and a token of one costs other work than a token of the other.
"""
GROUPS = (1 / 16, 1 / 4, 1.0)
"""Of the prompts of a Step. Less than one prompt of generation is a part of its answers, as a plan
may spread them.
"""
QUICK_LENGTHS = ((1 / 4, 1 / 4), (1 / 4, 1.0), (1.0, 1.0))
QUICK_GROUPS = (1 / 4, 1.0)
_LEAST = 4
"""Prompts of the largest cell, before its rows become shorter."""
MOST_ROWS = 512
"""Of one cell: a profile is fitted to passes, of which more rows only make more."""
MOST_TOKENS = 512
"""Of a prompt or an answer, for the same reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedNode:
    """A node that computes with a Model, and why it is not measured."""

    node: str
    why: str


def choose_works(
    plans: Sequence[Plan], device: Device, *, quick: bool, longest: float
) -> tuple[list[ProfiledWork], list[SkippedNode]]:
    """Choose what is measured of these plans on such devices, and say what is not. longest: seconds
    of a cell, by the catalogue; a grid whose largest would take longer has fewer rows, then shorter
    ones.
    """
    keys: set[PassKey] = set()
    works: list[ProfiledWork] = []
    skipped: list[SkippedNode] = []
    for number, plan in enumerate(plans):
        assert plan.program is not None
        lengths = greatest_lengths(plan.program)
        for node in plan.nodes:
            if not node.traits.computes:
                continue
            work = _make_work(plan, number, node)
            if isinstance(work, SkippedNode):
                skipped.append(work)
                continue
            work = replace(work, on_gpu=device.is_gpu)
            if work.key not in keys:
                keys.add(work.key)
                largest = _largest_cell(plan, node, work, lengths[node.name])
                # With one thread, which takes longest, so that all have the same cells.
                largest = _shorten(replace(work, cores=1), device, largest, longest)
                cells = _make_grid(work, largest, quick=quick)
                counts = [work.cores] if device.is_gpu else _thread_counts(work.cores, quick=quick)
                works += (replace(work, cores=count, cells=cells) for count in counts)
    return works, skipped


def _thread_counts(planned: int, *, quick: bool) -> list[int]:
    """What is planned, and with more time one, and powers of four between."""
    if quick or planned == 1:
        return [planned]
    steps = range(math.ceil(math.log(planned, 4)))
    return sorted({4**power for power in steps} | {planned})


def _make_work(plan: Plan, number: int, node: PlannedNode) -> ProfiledWork | SkippedNode:
    """What there is to measure of a node; as yet without cells."""
    assert plan.program is not None
    use = next(use for use in node.models if use.param != "tokenizer")
    model = next(state for state in plan.program.states if state.name == use.model)
    assert isinstance(model, Model)
    cost = cost_of_model(model)
    if cost.parameters is None or cost.shape is None:
        return SkippedNode(node=node.name, why=cost.why)
    params = plan.program.node(node.name).params
    terms = params["loss"].terms if "loss" in params else ()
    epochs = int(params.get("epochs", 1))
    sizes = Sizes(
        parameters=cost.parameters,
        shape=cost.shape,
        dtype=counted_dtype(model),
        head=model.head,
        trained=cost.trained,
    )
    return ProfiledWork(
        of=number,
        node=node.name,
        kind=kind_of_pass(node),
        model=sizes,
        kernel=kernel_family(node),
        samples=samples_of(node),
        cores=node.layout.threads,
        epochs=epochs,
        updates=epochs * int(params.get("minibatches", 1)),
        entropy=any(term.function.entropy for term in terms),
        attention=node.estimate.tree_path,
    )


def _largest_cell(
    plan: Plan, node: PlannedNode, work: ProfiledWork, lengths: Lengths
) -> ProfileCell:
    """A Step's rows at the greatest lengths, within bounds."""
    samples = work.samples
    batches = {source.name: source.batch for source in plan.sources}
    batch = batches.get(node.source, 1)
    context = work.model.shape.context or 2 * MOST_TOKENS
    answer = max(1, min(lengths.completion, MOST_TOKENS))
    if lengths.row > context:  # both are guesses, or one is
        answer = max(1, min(answer, context // 2))
    room = context - answer
    return ProfileCell(
        rows=max(1, min(batch, MOST_ROWS // samples)) * samples,
        prompt=max(1, min(lengths.prompt, MOST_TOKENS, room)),
        answer=answer,
        samples=samples,
        slots=node.layout.slots,
        budget=node.layout.tokens,
    )


def _shorten(work: ProfiledWork, device: Device, cell: ProfileCell, longest: float) -> ProfileCell:
    """One that takes no longer: with fewer prompts, and where one takes longer, shorter ones."""
    by_kind = coefficients(device)
    while predict_seconds(work, device, by_kind, make_longest(cell)) > longest:
        if cell.rows > _LEAST * cell.samples:
            cell = replace(cell, rows=cell.rows // cell.samples // 2 * cell.samples)
        elif cell.answer + cell.prompt > 2:
            prompt, answer = max(1, cell.prompt // 2), max(1, cell.answer // 2)
            cell = replace(cell, prompt=prompt, answer=answer)
        else:
            # A few rows of a token each: it takes what it takes.
            break
    return cell


def _make_grid(work: ProfiledWork, largest: ProfileCell, *, quick: bool) -> tuple[ProfileCell, ...]:
    """Parts of the largest, in ascending order of what they should need."""
    cells: dict[ProfileCell, None] = {}
    for cell in _list_parts(largest, quick=quick, cuts_groups=work.kind == "decode"):
        cells[_estimate_peak(work, cell)] = None
        if work.kind == "decode":
            # Generation of one token a row is its prefill.
            cells[_estimate_peak(work, replace(cell, answer=1))] = None
    return tuple(sorted(cells, key=lambda cell: (cell.estimated, cell.tokens)))


def _list_parts(largest: ProfileCell, *, quick: bool, cuts_groups: bool) -> Iterator[ProfileCell]:
    prompt_count = largest.rows // largest.samples
    groups, lengths = (QUICK_GROUPS, QUICK_LENGTHS) if quick else (GROUPS, LENGTHS)
    for share, (of_prompt, of_answer) in product(groups, lengths):
        prompts = share * prompt_count
        samples = largest.samples
        if cuts_groups and prompts < 1:
            samples = max(1, round(prompts * samples))
        yield replace(
            largest,
            rows=max(1, round(prompts)) * samples,
            samples=samples,
            prompt=max(1, round(of_prompt * largest.prompt)),
            answer=max(1, round(of_answer * largest.answer)),
        )


def _estimate_peak(work: ProfiledWork, cell: ProfileCell) -> ProfileCell:
    return replace(cell, estimated=predict_peak(work, cell))
