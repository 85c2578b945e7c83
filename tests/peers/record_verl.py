"""verl's numbers: advantages, divergences and losses of `verl.trainer.ppo.core_algos`.

Runs in verl's environment, from the root of the repository: python -m tests.peers.record_verl
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from verl import __version__
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.utils.torch_functional import masked_whiten
from verl.workers.config import ActorConfig

from tests.peers.inputs import RAGGED, PeerVectors, cut, rows
from tests.peers.tensors import keep_loss, tensor


def on_last(given: Any) -> torch.Tensor:
    """The reward at each row's last token, as verl's reward managers put it."""
    by_row = zip(given["mask"], given["reward"], strict=True)
    return tensor([[0.0] * (len(m) - 1) + [r] for m, r in by_row])


def advantages(made: PeerVectors, given: Any) -> None:
    mask, like = tensor(given["mask"]), given["mask"]
    index = np.array(given["group"])

    def keep(name: str, how: Any, function: Any, **arguments: Any) -> None:
        found, _ = function(token_level_rewards=on_last(given), response_mask=mask, **arguments)
        outputs = {"advantage": cut((found * mask).tolist(), like)}
        made.case("ragged", function.__name__, name, how, **outputs)

    grpo = core_algos.compute_grpo_outcome_advantage
    keep("group_advantage", {"baseline": "mean", "scale": "std"}, grpo, index=index)
    plain = {"baseline": "mean", "scale": "none"}
    keep("group_advantage", plain, grpo, index=index, norm_adv_by_std_in_grpo=False)
    how = {"baseline": "leave_one_out", "scale": "none"}
    keep("group_advantage", how, core_algos.compute_rloo_outcome_advantage, index=index)
    how = {"baseline": "length_weighted", "scale": "none"}
    keep("group_advantage", how, core_algos.compute_opo_outcome_advantage, index=index)
    keep(
        "group_advantage_whitened",
        plain,
        core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage,
        index=index,
    )
    function = core_algos.compute_reinforce_plus_plus_outcome_advantage
    keep("returns_whitened", {"gamma": 0.9}, function, config=AlgoConfig(gamma=0.9))
    baseline = torch.tensor(given["baseline"], dtype=torch.float64)
    function = core_algos.compute_remax_outcome_advantage
    keep("baseline_advantage", {}, function, reward_baselines=baseline)
    function = core_algos.compute_gae_advantage_return
    how = {"gamma": 0.9, "lam": 0.8}
    keep("gae_whitened", how, function, values=tensor(given["value"]), **how)
    for shift in (True, False):
        found = masked_whiten(tensor(given["returns"]), mask, shift_mean=shift) * mask
        how, outputs = {"shift": shift}, {"advantage": cut(found.tolist(), like)}
        made.case("ragged", "masked_whiten", "whiten", how, **outputs)


def losses(made: PeerVectors, batch: str, given: Any) -> None:
    mask, like = tensor(given["mask"]), given["mask"]

    keep = partial(keep_loss, made, batch, given)
    old, gain = tensor(given["old"]), tensor(given["advantage"])
    averages = {
        "token_mean": "token-mean",
        "sequence_mean": "seq-mean-token-mean",
        "sequence_sum": "seq-mean-token-sum",
    }
    low, high, dual = 0.2, 0.28, 3.0
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=low,
        clip_ratio_high=high, clip_ratio_c=dual, tau_pos=1.0, tau_neg=1.05,
    )  # fmt: skip

    def policy(function: Any, mode: str) -> Any:
        arguments = {"old_log_prob": old, "advantages": gain, "response_mask": mask}
        return lambda said: function(
            log_prob=said, loss_agg_mode=averages[mode], config=config, **arguments
        )[0]

    clip = {"clip": [low, high]}
    for mode in averages:
        how = clip | {"aggregate": mode, "dual_clip": dual}
        function = core_algos.compute_policy_loss_vanilla
        keep(function.__name__, "clipped_policy_loss", how, policy(function, mode))
        function = core_algos.compute_policy_loss_gspo
        how = clip | {"aggregate": mode, "level": "sequence_token"}
        keep(function.__name__, "clipped_policy_loss", how, policy(function, mode))
    function = core_algos.compute_policy_loss_cispo
    how = clip | {"aggregate": "token_mean"}
    keep(function.__name__, "clipped_weight_loss", how, policy(function, "token_mean"))
    function = core_algos.compute_policy_loss_sapo
    how = {"aggregate": "sequence_mean", "tau_pos": 1.0, "tau_neg": 1.05}
    keep(function.__name__, "soft_clipped_policy_loss", how, policy(function, "sequence_mean"))
    reference = tensor(given["reference"])
    for kind in ("k1", "k2", "k3"):
        how = {"kind": kind, "aggregate": "token_mean"}

        def divergence(said: torch.Tensor, kind: str = kind) -> torch.Tensor:
            apart = core_algos.kl_penalty(said, reference, kind)
            return core_algos.agg_loss(apart, mask, "token-mean")

        keep("kl_penalty", "kl_loss", how, divergence)
        apart = core_algos.kl_penalty(tensor(given["now"]), reference, kind) * mask
        outputs = {"penalty": cut(apart.tolist(), like)}
        made.case(batch, "kl_penalty", "kl_in_reward", {"kind": kind}, **outputs)


def critics(made: PeerVectors, given: Any) -> None:
    returns, old, mask = (tensor(given[name]) for name in ("returns", "old_value", "mask"))
    loss_of = lambda said: core_algos.compute_value_loss(said, returns, old, mask, 0.2)[0]
    how = {"clip": 0.2, "aggregate": "token_mean"}
    keep_loss(made, "near", given, "compute_value_loss", "value_loss", how, loss_of, "value")


if __name__ == "__main__":
    recorded = PeerVectors("verl", __version__)
    advantages(recorded, recorded.batch("ragged", rows(1, RAGGED)))
    losses(recorded, "near", recorded.batch("near", rows(2, RAGGED)))
    losses(recorded, "far", recorded.batch("far", rows(3, RAGGED, far=True)))
    critics(recorded, recorded.document["batches"]["near"])
    recorded.write()
