"""Each dialect against what its peer's own code returned, recorded in tests/peers/vectors/.

`make peers` records anew; inputs and outputs are in the files, so nothing of a peer is needed here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.batch import Batch, Keys, Ragged
from dataflow.loss import Now, Tensors, Terms
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

    def rollout(self, sampler: str = "now") -> Columns[Any]:
        mask, ids = self.given["mask"], self.ragged(self.given["mask"], np.int32)
        return self.columns(
            Rollout,
            completion_ids=ids,
            completion_mask=self.ragged(mask, np.uint8),
            sampler_logprobs=self.ragged(self.given[sampler]),
        )

    @property
    def score(self) -> Columns[Any]:
        return self.columns(Reward, reward=np.array(self.given["reward"], np.float32))

    def flat(self, name: str) -> torch.Tensor:
        return torch.tensor(list(itertools.chain(*self.given[name])), dtype=torch.float64)

    def port(self, column: str, name: str) -> Tensors[Any]:
        return Tensors({column: self.flat(name)})

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


def advantage_of(rows: RecordedRows, made: Columns[Any]) -> dict[str, Any]:
    return {"advantage": rows.cut(made["advantage"].values)}


def group_advantage(rows: RecordedRows, how: How, dialect: str) -> Columns[Any]:
    return formulas.group_advantage(rows.rollout(), rows.score, ragged=True, dialect=dialect, **how)


def whitened(rows: RecordedRows, made: Columns[Any], dialect: str, shift: bool = True) -> Any:
    return formulas.whiten(made, rows.rollout(), shift=shift, dialect=dialect)


def returns(rows: RecordedRows, how: How, dialect: str) -> Columns[Any]:
    return formulas.returns(rows.rollout(), rows.score, dialect=dialect, **how)


def gae(rows: RecordedRows, how: How, dialect: str) -> Columns[Any]:
    values = rows.columns(Values, values=rows.ragged(rows.given["value"]))
    return formulas.gae(rows.rollout(), rows.score, values, dialect=dialect, **how)


def plain(rows: RecordedRows) -> Columns[Any]:
    return rows.columns(Advantage, advantage=rows.ragged(rows.given["returns"]))


def baseline_advantage(rows: RecordedRows) -> Columns[Any]:
    baseline = rows.columns(Reward, reward=np.array(rows.given["baseline"], np.float32))
    return formulas.baseline_advantage(rows.rollout(), rows.score, baseline)


def penalty(rows: RecordedRows, how: How, dialect: str) -> dict[str, Any]:
    """The estimates alone: beta is -1, and the reward 0."""
    nothing = rows.columns(Reward, reward=np.zeros(len(rows.lengths), np.float32))
    reference = rows.columns(Logprobs, logprobs=rows.ragged(rows.given["reference"]))
    found = formulas.kl_in_reward(
        rows.rollout(), nothing, reference, beta=-1.0, dialect=dialect, **how
    )
    return {"penalty": rows.cut(found["token_reward"].values)}


def overlong(rows: RecordedRows, how: How, dialect: str) -> dict[str, Any]:
    found = formulas.overlong_penalty(rows.rollout(), rows.score, dialect=dialect, **how)
    return {"reward": found["reward"].tolist()}


def trained(
    formula: Callable[..., Terms], rows: RecordedRows, column: str, how: dict[str, Any], *ports: Any
) -> dict[str, Any]:
    """The loss, averaged as train does it, and its gradient, in float64."""
    aggregate, constant = how.pop("aggregate"), how.pop("constant", 1.0)
    how = {k: tuple(v) if isinstance(v, list) else v for k, v in how.items()}
    said = rows.flat(column).requires_grad_()
    now = rows.now(**{"values" if column == "value" else "logprobs": said})
    terms = formula(now, *ports, **how)
    counts = np.array([sum(row) for row in rows.given["mask"]])
    chosen, groups = np.arange(len(counts)), np.array(rows.given["group"])
    weights = count_weights(counts, groups, chosen, aggregate=aggregate, constant=constant)
    loss = (terms.loss * torch.from_numpy(weights.token)[now.row] * now.mask).sum()
    (gradient,) = torch.autograd.grad(loss, said)
    return {"loss": loss.item(), "gradient": rows.cut(gradient)}


def policy(formula: Callable[..., Terms], rows: RecordedRows, how: How) -> dict[str, Any]:
    ports = [rows.port("advantage", "advantage"), rows.port("logprobs", "old")]
    if "beta" in how:
        ports.append(rows.port("logprobs", "reference"))
    return trained(formula, rows, "now", dict(how), *ports)


def value(rows: RecordedRows, how: How) -> dict[str, Any]:
    ports = rows.port("returns", "returns"), rows.port("values", "old_value")
    return trained(loss_formulas.value, rows, "value", dict(how), *ports)


def divergence(rows: RecordedRows, how: How) -> dict[str, Any]:
    reference = rows.port("logprobs", "reference")
    return trained(loss_formulas.kl, rows, "now", dict(how), reference)


OURS: Mapping[str, Callable[[RecordedRows, How, str], dict[str, Any]]] = {
    "group_advantage": lambda r, how, d: advantage_of(r, group_advantage(r, how, d)),
    "group_advantage_whitened": lambda r, how, d: advantage_of(
        r, whitened(r, group_advantage(r, how, d), d)
    ),
    "returns_whitened": lambda r, how, d: advantage_of(r, whitened(r, returns(r, how, d), d)),
    "gae_whitened": lambda r, how, d: advantage_of(r, whitened(r, gae(r, how, d), d)),
    "whiten": lambda r, how, d: advantage_of(r, whitened(r, plain(r), d, **how)),
    "baseline_advantage": lambda r, how, d: advantage_of(r, baseline_advantage(r)),
    "kl_in_reward": penalty,
    "overlong_penalty": overlong,
    "value_loss": lambda r, how, d: value(r, how),
    "kl_loss": lambda r, how, d: divergence(r, {**how, "dialect": d}),
    "clipped_policy_loss": lambda r, how, d: policy(
        policy_formulas.clipped_policy, r, {**how, "dialect": d}
    ),
    "clipped_weight_loss": lambda r, how, d: policy(policy_formulas.clipped_weight, r, how),
    "soft_clipped_policy_loss": lambda r, how, d: policy(
        policy_formulas.soft_clipped_policy, r, {**how, "dialect": d}
    ),
}


@pytest.mark.parametrize(("peer", "number"), CASES)
def test_ours_is_what_the_peer_returned(peer: str, number: int) -> None:
    vectors = VECTORS[peer]
    case = vectors["cases"][number]
    rows = RecordedRows(vectors["batches"][case["batch"]])
    found = OURS[case["name"]](rows, case["how"], DIALECT.get(peer, peer))
    assert found.keys() == case["outputs"].keys()
    for name, wanted in case["outputs"].items():
        if name in ("loss", "reward"):
            assert found[name] == pytest.approx(wanted, rel=1e-6, abs=1e-6)
            continue
        for ours, theirs in zip(found[name], wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize(
    ("one", "other", "batch"),
    [("trl", "openrlhf", "even"), ("verl", "openrlhf", "ragged"), ("openrlhf", "verl", "even")],
)
def test_another_dialect_is_not_what_the_peer_returned(one: str, other: str, batch: str) -> None:
    """The comparison can fail: each peer's numbers differ from another's in every batch."""
    vectors, differing = VECTORS[one], 0
    for case in vectors["cases"]:
        if case["batch"] != batch or "advantage" not in case["outputs"]:
            continue
        rows = RecordedRows(vectors["batches"][batch])
        found = OURS[case["name"]](rows, case["how"], other)["advantage"]
        wanted = case["outputs"]["advantage"]
        pairs = zip(itertools.chain(*found), itertools.chain(*wanted), strict=True)
        differing += any(a != pytest.approx(b, rel=1e-6, abs=1e-6) for a, b in pairs)
    assert differing


def test_the_releases_that_were_read_are_those_that_were_recorded() -> None:
    releases = {peer: vectors["release"] for peer, vectors in VECTORS.items()}
    said = (Path(__file__).parents[2] / "operators" / "advantage_dialects.py").read_text()
    assert releases.keys() == {"trl", "trl_ppo", "verl", "openrlhf"}
    for release in releases.values():
        assert release in said
