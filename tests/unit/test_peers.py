"""Each dialect against what its peer's own code returned, recorded in tests/peers/vectors/.

`make peers` records anew; inputs and outputs are in the files, so nothing of a peer is needed here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.batch import Batch, Keys, Ragged
from dataflow.loss import Now, Tensors
from dataflow.schema import Advantage, Logprobs, Reward, Rollout, Values
from dataflow.user import Columns
from operators import advantage_formulas as formulas
from operators import loss_formulas, policy_formulas
from operators.kernels.torch.reduce import count_weights

VECTORS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parents[1] / "peers" / "vectors").glob("*.json"))
}
CASES = [
    pytest.param(peer, i, id=f"{peer}-{case['batch']}-{case['called']}-{case['name']}-{i}")
    for peer, vectors in VECTORS.items()
    for i, case in enumerate(vectors["cases"])
]
DIALECT = {"trl_ppo": "trl"}
Rows = list[list[float]]
How = Mapping[str, Any]


class RecordedRows:
    """A recorded batch as our columns and tensors."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        group = given["group"]
        self.lengths = [len(row) for row in given["mask"]]
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self.keys = Keys.of(group, [group[:i].count(g) for i, g in enumerate(group)])

    def ragged(self, rows: Rows, kind: Any = np.float32) -> Ragged:
        return Ragged(np.array(list(itertools.chain(*rows)), kind), self.offsets)

    def columns(self, schema: Any, **columns: Any) -> Columns[Any]:
        return Columns(Batch.make(self.keys, columns, schema), schema)

    def rollout(self) -> Columns[Any]:
        mask = self.given["mask"]
        return self.columns(
            Rollout,
            completion_ids=self.ragged(mask, np.int32),
            completion_mask=self.ragged(mask, np.uint8),
            sampler_logprobs=self.ragged(self.given["now"]),
        )

    @property
    def score(self) -> Columns[Any]:
        return self.columns(Reward, reward=np.array(self.given["reward"], np.float32))

    def flat(self, name: str) -> torch.Tensor:
        return torch.tensor(list(itertools.chain(*self.given[name])), dtype=torch.float64)

    def now(self, **said: torch.Tensor) -> Now:
        groups = torch.tensor(self.given["group"])
        row = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))
        return Now(
            mask=self.flat("mask"),
            row=row,
            group=groups[row],
            row_group=groups,
            rows=len(groups),
            groups=int(groups.max()) + 1,
            step=1,
            **said,  # type: ignore[arg-type]
        )

    def cut(self, flat: Any) -> Rows:
        return [flat[a:b].tolist() for a, b in itertools.pairwise(self.offsets)]


def plain(rows: RecordedRows) -> Columns[Any]:
    return rows.columns(Advantage, advantage=rows.ragged(rows.given["returns"]))


def baseline_advantage(rows: RecordedRows) -> Columns[Any]:
    baseline = rows.columns(Reward, reward=np.array(rows.given["baseline"], np.float32))
    return formulas.baseline_advantage(rows.rollout(), rows.score, baseline)


def gae(rows: RecordedRows, **how: Any) -> Columns[Any]:
    values = rows.columns(Values, values=rows.ragged(rows.given["value"]))
    return formulas.gae(rows.rollout(), rows.score, values, **how)


ADVANTAGES = {
    "group_advantage": lambda rows, **how: formulas.group_advantage(
        rows.rollout(), rows.score, ragged=True, **how
    ),
    "returns": lambda rows, **how: formulas.returns(rows.rollout(), rows.score, **how),
    "gae": gae,
    "whiten": lambda rows, shift, dialect: formulas.whiten(
        plain(rows), rows.rollout(), shift=shift, dialect=dialect
    ),
    "baseline_advantage": lambda rows, dialect: baseline_advantage(rows),
}
"""Each also in a form that is whitened afterwards."""


def advantage(name: str, rows: RecordedRows, how: How, dialect: str) -> dict[str, Any]:
    columns = ADVANTAGES[name.removesuffix("_whitened")](rows, dialect=dialect, **how)
    if name.endswith("_whitened"):
        columns = formulas.whiten(columns, rows.rollout(), shift=True, dialect=dialect)
    return {"advantage": rows.cut(columns["advantage"].values)}


def penalty(rows: RecordedRows, how: How, dialect: str) -> dict[str, Any]:
    """The estimates alone: beta is -1, and the reward 0."""
    nothing = rows.columns(Reward, reward=np.zeros(len(rows.lengths), np.float32))
    reference = rows.columns(Logprobs, logprobs=rows.ragged(rows.given["reference"]))
    penalised = formulas.kl_in_reward(
        rows.rollout(), nothing, reference, beta=-1.0, dialect=dialect, **how
    )
    return {"penalty": rows.cut(penalised["token_reward"].values)}


def overlong(rows: RecordedRows, how: How, dialect: str) -> dict[str, Any]:
    penalised = formulas.overlong_penalty(rows.rollout(), rows.score, dialect=dialect, **how)
    return {"reward": penalised["reward"].tolist()}


POLICY_PORTS = {"advantage": "advantage", "old": "logprobs"}
LOSSES = {
    "value_loss": (loss_formulas.value, {"returns": "returns", "old_value": "values"}),
    "kl_loss": (loss_formulas.kl, {"reference": "logprobs"}),
    "clipped_policy_loss": (policy_formulas.clipped_policy, POLICY_PORTS),
    "clipped_weight_loss": (policy_formulas.clipped_weight, POLICY_PORTS),
    "soft_clipped_policy_loss": (policy_formulas.soft_clipped_policy, POLICY_PORTS),
}
"""Each with its ports, in order: what was recorded -> the column."""
WITHOUT_DIALECT = ("value_loss", "clipped_weight_loss")


def trained(name: str, rows: RecordedRows, how: dict[str, Any], dialect: str) -> dict[str, Any]:
    """The loss, averaged as train does it, and its gradient, in float64."""
    aggregate, constant = how.pop("aggregate"), how.pop("constant", 1.0)
    how = {k: tuple(v) if isinstance(v, list) else v for k, v in how.items()}
    how |= {} if name in WITHOUT_DIALECT else {"dialect": dialect}
    formula, ports = LOSSES[name]
    if "beta" in how:
        ports = {**ports, "reference": "logprobs"}
    of_values = name == "value_loss"
    said = rows.flat("value" if of_values else "now").requires_grad_()
    now = rows.now(**{"values" if of_values else "logprobs": said})
    given = [Tensors({column: rows.flat(recorded)}) for recorded, column in ports.items()]
    terms = formula(now, *given, **how)
    counts = np.array([sum(row) for row in rows.given["mask"]])
    chosen, groups = np.arange(len(counts)), np.array(rows.given["group"])
    weights = count_weights(counts, groups, chosen, aggregate=aggregate, constant=constant)
    loss = (terms.loss * torch.from_numpy(weights.token)[now.row] * now.mask).sum()
    (gradient,) = torch.autograd.grad(loss, said)
    return {"loss": loss.item(), "gradient": rows.cut(gradient)}


def ours(name: str, rows: RecordedRows, how: How, dialect: str) -> dict[str, Any]:
    if name in LOSSES:
        return trained(name, rows, dict(how), dialect)
    if name in ("kl_in_reward", "overlong_penalty"):
        return {"kl_in_reward": penalty, "overlong_penalty": overlong}[name](rows, how, dialect)
    return advantage(name, rows, how, dialect)


@pytest.mark.parametrize(("peer", "number"), CASES)
def test_ours_is_what_the_peer_returned(peer: str, number: int) -> None:
    vectors = VECTORS[peer]
    case = vectors["cases"][number]
    rows = RecordedRows(vectors["batches"][case["batch"]])
    found = ours(case["name"], rows, case["how"], DIALECT.get(peer, peer))
    assert found.keys() == case["outputs"].keys()
    for name, wanted in case["outputs"].items():
        if name in ("loss", "reward"):
            assert found[name] == pytest.approx(wanted, rel=1e-6, abs=1e-6)
            continue
        for row, theirs in zip(found[name], wanted, strict=True):
            assert row == pytest.approx(theirs, rel=1e-6, abs=1e-6), name


def test_the_releases_that_were_read_are_those_that_were_recorded() -> None:
    releases = {peer: vectors["release"] for peer, vectors in VECTORS.items()}
    said = (Path(__file__).parents[2] / "operators" / "advantage_dialects.py").read_text()
    assert releases.keys() == {"trl", "trl_ppo", "verl", "openrlhf"}
    for release in releases.values():
        assert release in said
