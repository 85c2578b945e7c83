"""OpenRLHF's numbers: advantages of its experience maker, divergences, losses, length penalty.

Runs in OpenRLHF's environment, from the root of the repository: python -m
tests.peers.record_openrlhf. Its package imports deepspeed, ray and vLLM as a whole; its formula
files alone need torch, so they are imported without the package's own `__init__` files, and what
they import of the others is never called.
"""

from __future__ import annotations

import importlib
import sys
import types
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.peers.inputs import EVEN, PeerVectors, cut, rows
from tests.peers.tensors import keep_loss, tensor

NOT_CALLED = ("deepspeed", "ray", "openrlhf.trainer.ray.launcher")
PACKAGES = ("openrlhf", "models", "trainer", "trainer.ppo_utils", "trainer.ray", "utils")


def formulas() -> tuple[Any, Any, Any, Any]:
    """The modules loss, utils, experience_maker and length_penalty."""
    spec = find_spec("openrlhf")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    for name in PACKAGES:
        path = "openrlhf" if name == "openrlhf" else f"openrlhf.{name}"
        package = types.ModuleType(path)
        package.__path__ = [str(root / name.replace(".", "/")) if path != name else str(root)]
        sys.modules[path] = package
    for name in NOT_CALLED:
        sys.modules[name] = types.ModuleType(name)
    sys.modules["openrlhf.trainer.ray.launcher"].RayActorGroup = object  # type: ignore[attr-defined]
    experience = types.ModuleType("openrlhf.trainer.ppo_utils.experience")
    experience.Experience = object  # type: ignore[attr-defined]
    sys.modules["openrlhf.trainer.ppo_utils.experience"] = experience
    names = ("models.loss", "models.utils", "trainer.ppo_utils.experience_maker")
    made = [importlib.import_module(f"openrlhf.{name}") for name in names]
    penalty = importlib.import_module("openrlhf.trainer.ppo_utils.length_penalty")
    return made[0], made[1], made[2], penalty


LOSS, UTILS, MAKER, PENALTY = formulas()


def advantages(made: PeerVectors, given: Any) -> None:
    mask, like, gamma, lam = tensor(given["mask"]), given["mask"], 0.9, 0.8

    def keep(estimator: str, name: str, how: Any, gamma: float = 1.0) -> None:
        advantage = SimpleNamespace(estimator=estimator, gamma=gamma, lambd=lam, no_std_norm=False)
        args = SimpleNamespace(
            algo=SimpleNamespace(advantage=advantage),
            rollout=SimpleNamespace(n_samples_per_prompt=EVEN[0]),
            reward=SimpleNamespace(clip_range=None),
        )
        maker = MAKER.RemoteExperienceMaker.__new__(MAKER.RemoteExperienceMaker)
        maker.strategy = SimpleNamespace(args=args)
        maker.advantage_estimator = estimator
        maker.kl_ctl = SimpleNamespace(value=0.0)
        experience = SimpleNamespace(
            rewards=torch.tensor(given["reward"], dtype=torch.float64),
            index=list(range(len(like))),
            action_mask=mask,
            kl=torch.zeros_like(mask),
            values=tensor(given["value"]),
            info={},
        )
        maker.compute_advantages_and_returns([experience])
        found = (experience.advantages * mask).tolist()
        made.case("even", f"compute_advantages_and_returns {estimator}", name, how,
                  advantage=cut(found, like))  # fmt: skip

    keep("rloo", "group_advantage", {"baseline": "leave_one_out", "scale": "none"})
    keep("dr_grpo", "group_advantage", {"baseline": "mean", "scale": "none"})
    keep("group_norm", "group_advantage", {"baseline": "mean", "scale": "std"})
    plain = {"baseline": "mean", "scale": "none"}
    keep("reinforce_baseline", "group_advantage_whitened", plain)
    keep("gae", "gae_whitened", {"gamma": gamma, "lam": lam}, gamma)
    keep("reinforce", "returns_whitened", {"gamma": gamma}, gamma)


def lengths(made: PeerVectors, given: Any) -> None:
    """Of answers up to three times max_tokens."""
    found = SimpleNamespace(
        rewards=torch.tensor(given["reward"], dtype=torch.float64),
        response_length=torch.tensor([len(m) for m in given["mask"]]),
    )
    how = {"max_tokens": 4, "buffer": 2, "factor": 0.5}
    PENALTY.apply_overlong_penalty([found], how["max_tokens"], how["buffer"], how["factor"])
    outputs = {"reward": found.rewards.tolist()}
    made.case("even", "apply_overlong_penalty", "overlong_penalty", how, **outputs)


def losses(made: PeerVectors, batch: str, given: Any) -> None:
    mask, like = tensor(given["mask"]), given["mask"]
    old, gain = tensor(given["old"]), tensor(given["advantage"])

    keep = partial(keep_loss, made, batch, given)
    clip = {"clip": [0.2, 0.28]}
    for by_token, dual in ((True, None), (False, None), (True, 3.0)):
        policy = LOSS.PolicyLoss(0.2, 0.28, dual_clip=dual, token_level_loss=by_token)
        how = clip | {"aggregate": "token_mean" if by_token else "sequence_mean"}
        how |= {"dual_clip": dual}
        ppo = lambda said, policy=policy: policy(said, old, gain, action_mask=mask)[0]
        keep("PolicyLoss ppo", "clipped_policy_loss", how, ppo)
    policy = LOSS.PolicyLoss(0.2, 0.28, policy_loss_type="gspo")
    how = clip | {"aggregate": "sequence_mean", "level": "sequence"}
    gspo = lambda said: policy(said, old, gain, action_mask=mask)[0]
    keep("PolicyLoss gspo", "clipped_policy_loss", how, gspo)
    reference = tensor(given["reference"])
    for kind in ("k1", "k2", "k3"):
        how = {"kind": kind, "aggregate": "token_mean"}

        def divergence(said: torch.Tensor, kind: str = kind) -> torch.Tensor:
            apart = UTILS.compute_approx_kl(said, reference, kl_estimator=kind)
            return LOSS.aggregate_loss(apart, mask)

        keep("compute_approx_kl", "kl_loss", how, divergence)
        apart = UTILS.compute_approx_kl(tensor(given["now"]), reference, kl_estimator=kind) * mask
        outputs = {"penalty": cut(apart.tolist(), like)}
        made.case(batch, "compute_approx_kl", "kl_in_reward", {"kind": kind}, **outputs)
    returns, old_value = tensor(given["returns"]), tensor(given["old_value"])
    critic = LOSS.ValueLoss(0.2)
    loss = lambda said: critic(said, old_value, returns, action_mask=mask)
    how = {"clip": 0.2, "aggregate": "token_mean"}
    keep("ValueLoss", "value_loss", how, loss, column="value")


if __name__ == "__main__":
    recorded = PeerVectors("openrlhf", version("openrlhf"))
    even = recorded.batch("even", rows(4, EVEN))
    advantages(recorded, even)
    lengths(recorded, even)
    losses(recorded, "near", recorded.batch("near", rows(5, EVEN)))
    losses(recorded, "far", recorded.batch("far", rows(6, EVEN, far=True)))
    recorded.write()
