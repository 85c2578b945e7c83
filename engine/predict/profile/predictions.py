"""What the formulas say of the rows that a profile measures.

Owns: how one node's settings and rows are put into the formulas. Does not own: the formulas
(engine/plan/cost), which rows are measured (grid.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dataflow.attention_paths import AttentionPath
from engine.plan.cost import memory, training
from engine.plan.cost.decode import DecodeBatch, schedule_decode
from engine.plan.cost.devices import Coefficients, Device, Kind, Place
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import Work
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.profile import PassKey, ProfileCell, model_key
from engine.plan.cost.static_decode import static_decode_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledWork:
    """What one child process measures: a node with so many threads. of: its plan's number.
    on_gpu: whether it computes there. samples: answers of one prompt. entropy: whether its loss
    reads the entropy. attention: the path of its attention over the prefix tree.
    """

    of: int
    node: str
    kind: Kind
    model: Sizes
    kernel: str
    on_gpu: bool = False
    samples: int = 1
    cores: int
    epochs: int = 1
    updates: int = 1
    entropy: bool = False
    attention: AttentionPath = "dense"
    cells: tuple[ProfileCell, ...] = ()

    @property
    def key(self) -> PassKey:
        """What counts for its times, besides the cores."""
        return PassKey(
            model=model_key(self.model), kind=self.kind, kernel=self.kernel, samples=self.samples
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCell:
    """A cell with what was measured, and the tokens of each row that the kernel really had.
    opening: seconds until the process's first kernel was open.
    """

    cell: ProfileCell
    prompts: tuple[int, ...] = ()
    answers: tuple[int, ...] = ()
    opening: float = 0.0

    def with_fit(self, seconds: float | None) -> ProfileCell:
        """Give the cell with the fit's seconds, and with the tokens that answers really had."""
        if not self.answers:
            return self.cell
        mean = round(sum(self.answers) / len(self.answers))
        return replace(self.cell, fitted=seconds, answer=max(1, mean))


def predict_seconds(
    work: ProfiledWork,
    device: Device,
    coefficients: Mapping[Kind, Coefficients],
    cell: MeasuredCell,
) -> float:
    """Work out the seconds of a cell's rows."""
    # Rates of a CPU are those of one core, of a GPU those of all of it.
    cores = 1 if device.is_gpu else work.cores
    place = Place(device=device, coefficients=coefficients, cores=cores)
    prompts, answers = np.array(cell.prompts), np.array(cell.answers)
    samples, budget = cell.cell.samples, cell.cell.budget
    if work.kind == "decode":
        batch = DecodeBatch(
            prompts=prompts,
            answers=answers,
            shared=samples,
            slots=cell.cell.slots,
            budget=budget,
            copied=device.is_gpu and work.kernel == "torch",
        )
        return schedule_decode(work.model, place, batch).seconds
    rows = training.pack_rows(prompts, answers, budget=budget, shared=samples)
    if work.kind == "train":
        updates, epochs = work.updates, work.epochs
        return training.train_time(work.model, place, rows, updates=updates, epochs=epochs).seconds
    return training.forward_time(work.model, place, rows).seconds


def make_longest(cell: ProfileCell) -> MeasuredCell:
    """Give every row of a cell that nobody has measured the length that it may have."""
    prompts, answers = (cell.prompt,) * cell.rows, (cell.answer,) * cell.rows
    return MeasuredCell(cell=cell, prompts=prompts, answers=answers)


def predict_peak(work: ProfiledWork, cell: ProfileCell) -> int:
    """Work out the peak bytes of a cell's rows: the weights, and all that the node holds as it
    runs.
    """
    model = work.model
    pass_work = Work(
        lengths=Lengths(prompt=cell.prompt, completion=cell.answer),
        prompts=-(-cell.rows // cell.samples),
        rows=cell.rows,
        budget=cell.budget,
        slots=cell.slots,
        entropy=work.entropy,
        minibatches=max(1, work.updates // work.epochs),
        attention=work.attention,
    )
    shape, dtype = model.shape, model.dtype
    if work.kind == "train":
        passed = shape
        if model.trained is not None:
            passed = replace(shape, layers=model.trained.layers)
        parameters = model.trained_parameters(1)
        parts = memory.train_parts(parameters, passed, pass_work, dtype, model.head)
    elif work.kind == "decode" and work.on_gpu and work.kernel == "torch":
        parts = static_decode_parts(shape, pass_work, dtype)
    elif work.kind == "decode":
        parts = memory.decode_parts(shape, pass_work, dtype)
    else:
        parts = memory.forward_parts(shape, pass_work, dtype, model.head)
    return memory.peak([parts | {"weights": model.weight_bytes}])
