"""Kernels alone on rows of one length, as a profile draws them, and on rows as uneven as a run's.

Owns: uneven rows, and the ratio. Does not own: the Models (predicted.py), opening the kernel
(gpu_kernels.py), runs (gpu_steps.py).

Both have the same number of rows, and about as many tokens: if the uneven ones take longer, a
profile says too little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu_kernels import open_node, time_each
from benchmarks.report import SideResult
from dataflow.batch import Batch
from dataflow.kernel import Assignment, Chunk, KernelNode
from dataflow.ragged import Ragged
from dataflow.schema import TokenPrompt
from engine.plan.cost.profile import ProfileCell
from engine.plan.plan import Plan, PlannedNode
from engine.predict.profile.generated_rows import draw_inputs, draw_prompts
from engine.run.worker.kernel_loader import kernel_node

SAMPLES, PROMPT, ANSWER = 8, 128, 64
"""Answers of a prompt; the longest prompt and answer."""
_LEAST_PROMPT = 64
_MEAN_ANSWER = 400.0
"""Of a policy that ends by chance, before answers are cut at ANSWER."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenLengths:
    """Tokens of each prompt, and of each answer."""

    prompts: np.ndarray
    answers: np.ndarray


def draw_lengths(groups: int) -> UnevenLengths:
    """Draw lengths as those of the runs in gpu_steps.py: prompts alike, most answers cut."""
    draw = np.random.default_rng(3)
    answers = draw.geometric(1.0 / _MEAN_ANSWER, groups * SAMPLES)
    return UnevenLengths(
        prompts=draw.integers(_LEAST_PROMPT, PROMPT + 1, groups),
        answers=np.minimum(answers, ANSWER),
    )


def cut_rows(column: Ragged, lengths: np.ndarray) -> Ragged:
    """Keep the first so many values of each row. lengths: int [rows], at most the rows' own."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    taken = np.repeat(column.offsets[:-1], lengths) + within
    return Ragged(column.values[taken], offsets)


def cut_inputs(
    inputs: Mapping[str, Batch], node: KernelNode, lengths: UnevenLengths
) -> dict[str, Batch]:
    """Cut the token columns of each input to these lengths."""
    by_axis = {"P": np.repeat(lengths.prompts, SAMPLES), "T": lengths.answers}
    batches: dict[str, Batch] = {}
    for name, batch in inputs.items():
        schema = node.schemas[name]
        columns: dict[str, Any] = {}
        for column_name in batch.names:
            axis = schema.columns[column_name].axis
            if axis in by_axis:
                columns[column_name] = cut_rows(batch.ragged(column_name), by_axis[axis])
            else:
                columns[column_name] = batch.array(column_name)
        batches[name] = Batch.make(batch.keys, columns, schema)
    return batches


def uneven_results(planned: Plan, groups: int, repeats: int) -> Iterator[SideResult]:
    """Seconds of each node that computes, on even and on uneven rows."""
    lengths = draw_lengths(groups)
    even = UnevenLengths(
        prompts=np.full(groups, round(float(lengths.prompts.mean()))),
        answers=np.full(groups * SAMPLES, round(float(lengths.answers.mean()))),
    )
    for planned_node in planned.nodes:
        if not planned_node.traits.computes:
            continue
        seconds: dict[str, float] = {}
        for kind, drawn in (("even", even), ("uneven", lengths)):
            seconds[kind] = _time_kernel(planned, planned_node, drawn, repeats)
            name = f"{planned_node.name} alone, {kind} rows"
            yield SideResult(name=name, value=1e3 * seconds[kind], unit="ms")
        yield SideResult(
            name=f"{planned_node.name} alone, uneven over even",
            value=seconds["uneven"] / seconds["even"],
            unit="ratio",
        )


def _time_kernel(
    planned: Plan, planned_node: PlannedNode, lengths: UnevenLengths, repeats: int
) -> float:
    """Median seconds of a call; the first two do not count."""
    assert planned.program is not None
    node = kernel_node(planned_node, planned.program)
    if planned_node.work == "decode":
        params = {"n": SAMPLES, "max_tokens": ANSWER, "max_prompt_tokens": PROMPT}
        node = replace(node, params={**node.params, **params}, returns=())
    kernel = open_node(planned_node, node, planned_node.layout, {}).kernel
    call = _make_call(kernel, planned_node, node, lengths)
    durations = time_each(call, repeats + 2)[2:]
    kernel.close()
    return median(durations)


def _make_call(
    kernel: Any, planned_node: PlannedNode, node: KernelNode, lengths: UnevenLengths
) -> Callable[[], object]:
    """Draw rows of the greatest lengths, cut them, and make a call of the kernel with them."""
    row_count = len(lengths.answers)
    cell = ProfileCell(rows=row_count, prompt=PROMPT, answer=ANSWER, samples=SAMPLES)
    if planned_node.work == "decode":
        longest = draw_prompts(cell, kernel.vocabulary)
        columns = {"prompt": cut_rows(longest.ragged("prompt"), lengths.prompts)}
        prompts = Batch.make(longest.keys, columns, TokenPrompt)
        chunk = Chunk(id=0, step=1, keys=prompts.keys, inputs={"prompt": prompts})
        return lambda: list(kernel.run(chunk))
    inputs = cut_inputs(draw_inputs(cell, node, kernel.vocabulary), node, lengths)
    keys = inputs["rows"].keys
    if planned_node.work == "train":
        assignment = Assignment(sequence=1, step=1, keys=keys, inputs=inputs)
        return lambda: kernel.step(assignment)
    chunk = Chunk(id=0, step=1, keys=keys, inputs=inputs)
    return lambda: list(kernel.run(chunk))
