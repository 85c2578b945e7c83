"""What the formulas say of the rows that a profile measures.

Owns: how one node's settings and rows are put into the formulas. Does not own: the formulas
(engine/plan/cost), which rows are measured (grid.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from engine.plan.cost import memory, training
from engine.plan.cost.decode import DecodeBatch, schedule_decode
from engine.plan.cost.devices import Coefficients, Device, Kind, Place
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.memory import Work
from engine.plan.cost.model_passes import Sizes
from engine.plan.cost.profile import PassKey, ProfileCell, model_key


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledWork:
    """What one child process measures: a node with so many threads. of: its plan's number.
    samples: answers of one prompt. entropy: whether its loss reads the entropy.
    """

    of: int
    node: str
    kind: Kind
    model: Sizes
    kernel: str
    samples: int = 1
    cores: int
    epochs: int = 1
    updates: int = 1
    entropy: bool = False
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

    def kept(self, said: float | None) -> ProfileCell:
        """The cell with the fit's seconds, and with the tokens that answers really had."""
        if not self.answers:
            return self.cell
        mean = round(sum(self.answers) / len(self.answers))
        return replace(self.cell, fitted=said, answer=max(1, mean))


def seconds(
    work: ProfiledWork, of: Device, how: Mapping[Kind, Coefficients], cell: MeasuredCell
) -> float:
    """Of a cell's rows."""
    where = Place(device=of, coefficients=how, cores=1 if of.is_gpu else work.cores)
    prompts, answers = np.array(cell.prompts), np.array(cell.answers)
    said = cell.cell
    if work.kind == "decode":
        slots, budget = said.slots, said.budget
        batch = DecodeBatch(
            prompts=prompts, answers=answers, shared=said.samples, slots=slots, budget=budget
        )
        return schedule_decode(work.model, where, batch).seconds
    rows = training.pack_rows(prompts, answers, budget=said.budget, shared=said.samples)
    if work.kind == "train":
        updates, epochs = work.updates, work.epochs
        return training.train_time(work.model, where, rows, updates=updates, epochs=epochs).seconds
    return training.forward_time(work.model, where, rows).seconds


def as_planned(cell: ProfileCell) -> MeasuredCell:
    """A cell that nobody has measured, with every row as long as it may be."""
    return MeasuredCell(
        cell=cell, prompts=(cell.prompt,) * cell.rows, answers=(cell.answer,) * cell.rows
    )


def peak_bytes(work: ProfiledWork, cell: ProfileCell) -> int:
    """Of a cell's rows: the weights, and all that the node holds as it runs."""
    model = work.model
    lengths = Lengths(prompt=cell.prompt, completion=cell.answer)
    done = Work(
        lengths=lengths,
        prompts=-(-cell.rows // cell.samples),
        rows=cell.rows,
        budget=cell.budget,
        slots=cell.slots,
        entropy=work.entropy,
        minibatches=max(1, work.updates // work.epochs),
    )
    shape, dtype = model.shape, model.dtype
    if work.kind == "train":
        parts = memory.train_parts(model.parameters, shape, done, dtype, model.head)
    elif work.kind == "decode":
        parts = memory.decode_parts(shape, done, dtype)
    else:
        parts = memory.forward_parts(shape, done, dtype, model.head)
    return memory.peak([parts | {"weights": model.weight_bytes}])
