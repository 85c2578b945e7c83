"""A loss of your own: a decorated function on packed tensors that returns unreduced terms.

    python examples/user_loss.py

`train` reduces them; the function takes no mean and sees no padding. This one is TOPR's, tapered
off-policy REINFORCE (arXiv:2503.14286).
"""

from __future__ import annotations

import tiny
from user_reward import short_digits

from dataflow import Advantage, Graph, Model, Now, Rollout, Tensors, Terms, loss
from engine.api import Result, run
from graphs.grpo import grpo
from operators.train import train


# begin: what you add
@loss(scope="token")
def tapered_loss(now: Now, advantage: Tensors[Advantage], *, most: float = 1.0) -> Terms:
    """-A log pi; bad answers weigh as their probability now over the sampler's, at most `most`."""
    assert now.logprobs is not None
    assert now.behaviour is not None
    gain = advantage["advantage"]
    ahead = (now.logprobs - now.behaviour).masked_fill(now.mask == 0, 0.0)
    ratio = now.row_sum(ahead).exp().clamp(max=most).detach()
    weight = ratio[now.row].where(gain < 0, 1.0)
    metrics = {"policy/weight": ((weight * now.mask).sum(), now.mask.sum())}
    return Terms(-weight * gain * now.logprobs, metrics)


# end


def graph(*, most: float = 1.0) -> Graph:
    """GRPO's rows and advantages, trained with that loss in two updates per Step."""
    files = tiny.make()
    g = grpo(files.model, files.train, short_digits, n=8, batch=8, max_tokens=8)
    policy = Model("policy", files.model, trainable=True)
    new = tapered_loss(g.port("advantage", Advantage), most=most)
    return Graph(
        "tapered", train(policy, g.port("rollout", Rollout), loss=new, lr=5e-3, minibatches=2)
    )


def main(steps: int = 12) -> Result:
    """A short run."""
    return run(graph(), tiny.options("user_loss", steps=steps), on_step=[tiny.show])


if __name__ == "__main__":
    main()
