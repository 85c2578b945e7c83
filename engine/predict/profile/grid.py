"""Which nodes of a plan are measured, and on which rows.

Owns: the choice of nodes, and the grid of threads x rows x lengths of each. Does not own: the rows
themselves (generated_rows.py), measuring them (kernel_timing.py).

One node is measured for each Model (by shape, dtype and head), kind of pass, kernel and number of
answers a prompt: others with the same have the same times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dataflow.model import Model
from engine.plan.cost.devices import Device, coefficients
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.models import model_cost
from engine.plan.cost.profile import PassKey, ProfileCell
from engine.plan.lengths import all_lengths
from engine.plan.plan import Plan, PlannedNode
from engine.plan.profiled_passes import kernel_family, kind_of_pass, samples_of
from engine.predict.profile.predictions import ProfiledWork, as_planned, peak_bytes, seconds

LENGTHS = ((1 / 8, 1 / 8), (1 / 2, 1 / 2), (1 / 8, 1.0), (1.0, 1.0))
"""Of the greatest prompt and answer of the plan, as shares. Answers are not always short beside
prompts, and a token of one costs other work than a token of the other.
"""
GROUPS = (1 / 16, 1 / 4, 1.0)
"""Of the prompts of a Step."""
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


def works(
    plans: Sequence[Plan], of: Device, *, quick: bool, longest: float
) -> tuple[list[ProfiledWork], list[SkippedNode]]:
    """What is measured of these plans on such devices, and what is not. longest: seconds of a cell,
    by the catalogue; a grid whose largest would take longer has fewer rows, then shorter ones.
    """
    works_by_key: dict[PassKey, list[ProfiledWork]] = {}
    skipped: list[SkippedNode] = []
    for number, plan in enumerate(plans):
        lengths = _lengths(plan)
        for node in plan.nodes:
            if not node.traits.computes:
                continue
            made = _work(plan, number, node)
            if isinstance(made, SkippedNode):
                skipped.append(made)
            elif made.key not in works_by_key:
                largest = _largest(plan, node, made, lengths[node.name])
                largest = _short(replace(made, cores=1), of, largest, longest)
                sized = _grid(made, largest, quick=quick)
                cores = [made.cores] if of.is_gpu else _cores(made.cores, quick=quick)
                works_by_key[made.key] = [
                    replace(made, cores=count, cells=sized) for count in cores
                ]
    return [each for many in works_by_key.values() for each in many], skipped


def _lengths(plan: Plan) -> dict[str, Lengths]:
    assert plan.program is not None
    states = [s for s in plan.program.states if isinstance(s, Model)]
    return all_lengths(plan.program, {s.name: model_cost(s.base, s.head).shape for s in states})


def _cores(planned: int, *, quick: bool) -> list[int]:
    """Threads: what is planned, and with more time one, and powers of four between."""
    if quick or planned == 1:
        return [planned]
    steps = range(math.ceil(math.log(planned, 4)))
    return sorted({4**power for power in steps} | {planned})


def _work(plan: Plan, number: int, node: PlannedNode) -> ProfiledWork | SkippedNode:
    """What there is to measure of a node; as yet without cells."""
    assert plan.program is not None
    use = next(u for u in node.models if u.param != "tokenizer")
    model = next(s for s in plan.program.states if s.name == use.model)
    assert isinstance(model, Model)
    cost = model_cost(model.base, model.head)
    if cost.parameters is None or cost.shape is None:
        return SkippedNode(node=node.name, why=cost.why)
    params = plan.program.node(node.name).params
    epochs = int(params.get("epochs", 1))
    sizes = Sizes(parameters=cost.parameters, shape=cost.shape, dtype=model.dtype, head=model.head)
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
        entropy="loss" in params and any(t.function.entropy for t in params["loss"].terms),
    )


def _largest(plan: Plan, node: PlannedNode, work: ProfiledWork, lengths: Lengths) -> ProfileCell:
    """A Step's rows at the greatest lengths, within bounds."""
    samples, context = work.samples, work.model.shape.context
    batch = next((s.batch for s in plan.sources if s.name == node.source), 1)
    context = context or 2 * MOST_TOKENS
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


def _short(work: ProfiledWork, of: Device, cell: ProfileCell, longest: float) -> ProfileCell:
    """One that takes no longer: with fewer prompts, and where one takes longer, shorter ones."""
    how = coefficients(of)
    while seconds(work, of, how, as_planned(cell)) > longest:
        if cell.rows > _LEAST * cell.samples:
            cell = replace(cell, rows=cell.rows // cell.samples // 2 * cell.samples)
        elif cell.answer + cell.prompt > 2:
            shorter = {"prompt": max(1, cell.prompt // 2), "answer": max(1, cell.answer // 2)}
            cell = replace(cell, **shorter)
        else:
            break
    return cell


def _grid(work: ProfiledWork, largest: ProfileCell, *, quick: bool) -> tuple[ProfileCell, ...]:
    """Parts of the largest, in ascending order of what they should need; generation also of one
    token a row, which is its prefill.
    """
    prompts = largest.rows // largest.samples
    cells: dict[ProfileCell, None] = {}
    for share in QUICK_GROUPS if quick else GROUPS:
        for of_prompt, of_answer in QUICK_LENGTHS if quick else LENGTHS:
            answer = max(1, round(of_answer * largest.answer))
            for tokens in (answer, 1) if work.kind == "decode" else (answer,):
                cell = replace(
                    largest,
                    rows=max(1, round(share * prompts)) * largest.samples,
                    prompt=max(1, round(of_prompt * largest.prompt)),
                    answer=tokens,
                )
                cells[replace(cell, estimated=peak_bytes(work, cell))] = None
    return tuple(sorted(cells, key=lambda cell: (cell.estimated, cell.tokens)))
