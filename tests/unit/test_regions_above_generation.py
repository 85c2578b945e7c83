"""What stands above a generation runs in the stream, a forward reader at lag 0 too."""

from __future__ import annotations

from dataflow.graph import Graph
from dataflow.limits import whole
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.operator import Input, Operator, Same
from dataflow.regions import regions
from dataflow.schema import Prompt
from operators.advantage import gae
from operators.data import prompts
from operators.forward import scores, values
from operators.generate import generate
from operators.losses import value_loss
from operators.train import train

RANKED = Operator(
    path="tests.unit.test_regions_above_generation:RANKED",
    name="ranked",
    work="forward",
    rows=Same("prompt"),
    inputs=(Input(name="prompt", schema=Prompt),),
    outputs=(Prompt,),
    reads=("model",),
    limits={"max_lag": whole(0, like=0)},
)


def ranked(model: Model, prompt: Port[Prompt]) -> Port[Prompt]:
    node = Node(
        RANKED, "ranked", states={"model": model}, inputs={"prompt": prompt}, params={"max_lag": 0}
    )
    return node.port()


def test_a_forward_reader_at_lag_0_is_in_the_stream_if_a_generation_stands_on_it() -> None:
    critic = Model("critic", "base", trainable=True, head="scalar")
    prompt = ranked(critic, prompts("x.parquet", batch=2))
    rollout = generate(Model("policy", "base"), prompt, max_tokens=4, name="rollout")
    returns = gae(rollout, scores(critic, rollout), values(critic, rollout))
    graph = Graph("ranked", train(critic, rollout, loss=value_loss(returns), lr=1e-3))
    of = regions(graph).of
    assert of["ranked"] == "stream"
    assert of["rollout"] == "stream"
    assert of["values"] == "step"
