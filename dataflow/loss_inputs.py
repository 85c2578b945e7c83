"""Now, Tensors, Terms: what a loss function sees of a micro-batch, and what it returns.

Owns: the protocol. Does not own: declarations of losses (loss.py), who fills it in (the train
kernel).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from dataflow.calls import call_site
from dataflow.errors import KernelError, nearest
from dataflow.schema import Schema

if TYPE_CHECKING:
    from torch import Tensor

S = TypeVar("S", bound=Schema)


@dataclass(slots=True, kw_only=True)
class Now:
    """The trained model's numbers for the micro-batch, packed over its completion tokens.

    logprobs [tokens]: of the written tokens, with gradient (head lm). values [tokens]: head scalar,
    with gradient. scores [rows]: the scalar head at each row's last token, and entropy [tokens]: of
    the next-token distribution, only if the loss declares them. at_ids [tokens, k]: log-probs, with
    gradient, of the ids that the loss declares. vocabulary: how many tokens the model knows.
    mask [tokens]: 1.0 where the model wrote the token. row, group int64 [tokens]: segment ids,
    0 .. rows-1 and 0 .. groups-1; row_group int64 [rows]: the group of each row. sampler_logprobs
    [tokens], version int32 [tokens]: recorded at generation; None if the rows are no Rollout.
    sampler_mass [tokens]: the log of what top-k and top-p kept, None if they truncated nothing.
    step: the Step, for schedules.

    Rollout in dataflow/schema.py says which distributions these are. `sampler_logprobs` are those
    of the sampling policy, over the whole vocabulary: the `old` of a ratio. `behaviour` is the
    distribution that was really drawn from: the denominator of an importance weight.
    """

    mask: Tensor
    row: Tensor
    group: Tensor
    row_group: Tensor
    rows: int
    groups: int
    step: int
    logprobs: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    entropy: Tensor | None = None
    at_ids: Tensor | None = None
    vocabulary: int = 0
    sampler_logprobs: Tensor | None = None
    sampler_mass: Tensor | None = None
    version: Tensor | None = None

    @property
    def behaviour(self) -> Tensor | None:
        """[tokens]: log-probs of what was drawn, after top-k and top-p; None if the rows are no
        Rollout.
        """
        if self.sampler_logprobs is None or self.sampler_mass is None:
            return self.sampler_logprobs
        return self.sampler_logprobs - self.sampler_mass

    def row_sum(self, tokens: Tensor) -> Tensor:
        """Sum over each row's tokens that the model wrote, [tokens] -> [rows]."""
        return tokens.new_zeros(self.rows).index_add(0, self.row, tokens * self.mask)

    def group_sum(self, rows: Tensor) -> Tensor:
        """Sum over each group's rows, [rows] -> [groups]."""
        return rows.new_zeros(self.groups).index_add(0, self.row_group, rows)


class Tensors(Generic[S]):
    """The columns of one port as packed tensors: `t["advantage"]` is [tokens] for a token column,
    [rows] for others.
    """

    __slots__ = ("columns",)

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = columns

    def __getitem__(self, name: str) -> Tensor:
        """Return a column. Raises KernelError that names the columns and the line that asks."""
        if name not in self.columns:
            columns = ", ".join(self.columns) or "none"
            problem = f"expected a column of the port, found {name!r}; there are: {columns}"
            near = nearest(name, self.columns)
            fix = near or "one of these, or a schema with that column"
            raise KernelError(f"{call_site()}: {problem}. Fix: {fix}.")
        return self.columns[name]


@dataclass(slots=True)
class Terms:
    """Unreduced: `loss` is [tokens], [rows] or [groups] by the loss's scope; metrics are (sum,
    count).
    """

    loss: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor | float]] = field(default_factory=dict)
