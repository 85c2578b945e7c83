"""What losses report beside their terms, and what their constructors declare and refuse.

Their numbers are held to textbook forms in test_loss_numbers.py, and to plain loops in
test_policy_losses.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dataflow.errors import GraphError
from dataflow.loss import Loss, Now, Tensors, Terms
from dataflow.model import linear
from dataflow.node import Node, Port
from dataflow.operator import Nothing, Operator
from dataflow.schema import Advantage, Logprobs, Preference, Returns, Reward, Rollout
from operators import loss_formulas, losses, policy_formulas

LOGPROBS = torch.tensor([-0.5, -1.0, -2.0, -0.25])
SAMPLED = torch.tensor([-0.75, -1.0, -1.5, -3.0])


def now(**given: Any) -> Now:
    """Four rows of one token in two groups; the second row is not trained."""
    row, group = torch.arange(4), torch.tensor([0, 0, 1, 1])
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    fields = {"logprobs": LOGPROBS, "sampler_logprobs": SAMPLED} | given
    return Now(mask=mask, step=1, row=row, group=group, row_group=group, rows=4, groups=2, **fields)


def port(**columns: list[float]) -> Tensors[Any]:
    return Tensors({name: torch.tensor(values) for name, values in columns.items()})


GAIN, REFERENCE = port(advantage=[1.0, -1.0, 0.5, -2.0]), port(logprobs=[-1.0, -3.0, -2.0, -0.5])


def reported(terms: Terms, metric: str) -> tuple[float, float]:
    total, count = terms.metrics[metric]
    return float(total), float(count)


def test_old_none_is_what_the_sampler_recorded() -> None:
    recorded = policy_formulas.clipped_policy(now(), GAIN, Tensors({"logprobs": SAMPLED}))
    assert torch.equal(policy_formulas.clipped_policy(now(), GAIN).loss, recorded.loss)
    with pytest.raises(GraphError, match=r"clipped_policy_loss: expected the sampler's log-probs"):
        policy_formulas.clipped_policy(now(sampler_logprobs=None), GAIN)


def test_the_weights_that_a_cap_holds_are_counted() -> None:
    terms = policy_formulas.clipped_weight(now(), GAIN, cap=1.25)
    assert reported(terms, "policy/clip_fraction") == (2, 3)


def test_the_distance_to_the_reference_is_reported_even_where_it_weighs_nothing() -> None:
    terms = policy_formulas.clipped_policy(now(), GAIN, None, REFERENCE, kl="k1", beta=0.0)
    assert reported(terms, "policy/kl_reference") == (0.5 + 0.0 + 0.25, 3)


def test_the_mean_entropy_is_that_of_trained_tokens() -> None:
    terms = loss_formulas.entropy(now(entropy=torch.tensor([1.0, 50.0, 2.0, 0.5])))
    assert reported(terms, "policy/entropy") == (3.5, 3)


def test_pairs_report_how_many_are_right_and_by_how_much() -> None:
    terms = loss_formulas.dpo(now(), port(sign=[1, -1, -1, 1]), REFERENCE, beta=0.5)
    # Margins 0.5 and 0 (its second row is not trained), then 0 and 0.25.
    assert reported(terms, "dpo/accuracy") == (2, 2)
    assert reported(terms, "dpo/margin") == (0.5 * 0.5 + 0.5 * 0.25, 2)
    turned = loss_formulas.dpo(now(), port(sign=[-1, 1, -1, 1]), REFERENCE, beta=0.5)
    assert reported(turned, "dpo/accuracy") == (1, 2)


def port_of(schema: Any) -> Port[Any]:
    operator = Operator(path="t:T", name="x", work="host", rows=Nothing(), outputs=(schema,))
    return Node(operator, "x").port()


ADVANTAGE, RETURNS, OLD = port_of(Advantage), port_of(Returns), port_of(Logprobs)
PAIRS, REWARD = port_of(Preference), port_of(Reward)


def test_constructors_name_ports_parameters_and_what_they_need_of_a_model() -> None:
    params = {"clip": (0.2, 0.28), "beta": linear(0.1, 0.0, 5)}
    bound, inputs = losses.clipped_policy_loss(ADVANTAGE, reference=OLD, **params).bound()
    assert set(inputs) == {"clipped_policy_loss.advantage", "clipped_policy_loss.reference"}
    assert params.items() <= dict(bound.terms[0].params).items()
    clipped, entropy = bound.terms[0].function, losses.ENTROPY
    assert (clipped.zero, clipped.recorded) == ((("reference", "beta"),), True)
    assert entropy.entropy
    assert losses.VALUE.head == "scalar"


EVERY = [
    losses.clipped_policy_loss(ADVANTAGE),
    losses.policy_gradient_loss(ADVANTAGE),
    losses.decoupled_policy_loss(ADVANTAGE, proximal=OLD),
    losses.entropy_loss(),
    losses.supervised_loss(),
    losses.value_loss(RETURNS),
    losses.dpo_loss(PAIRS, reference=OLD),
    losses.trajectory_balance_loss(REWARD, reference=OLD, beta=0.1),
]


@pytest.mark.parametrize("loss", EVERY, ids=lambda loss: loss.terms[0].function.name)
def test_every_parameter_of_a_formula_is_given_by_its_constructor(loss: Loss) -> None:
    (term,) = loss.terms
    assert {name for name, _ in term.params} == set(term.function.parameters)
    of_groups = term.function.name in ("dpo_loss", "trajectory_balance_loss")
    assert (term.function.scope == "group") == of_groups


@pytest.mark.parametrize(("call", "told"), [
    (
        lambda: losses.clipped_policy_loss(ADVANTAGE, epsilon=0.1),  # type: ignore[call-arg]
        r"unknown parameter 'epsilon'.*clip=",
    ),
    (lambda: losses.value_loss(RETURNS, clip=0.2), r"clip=0\.2 needs old="),
    (
        lambda: losses.policy_gradient_loss(Rollout),  # type: ignore[arg-type]
        r"expected Port\[Advantage\]",
    ),
], ids=["of another system", "a bound without its middle", "a schema for a port"])  # fmt: skip
def test_wrong_calls_say_the_nearest_fix(call: Callable[[], Loss], told: str) -> None:
    with pytest.raises(GraphError, match=told):
        call()
