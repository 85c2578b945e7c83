"""Whitening of TRL's PPO trainer, which no later release than 1.12.0 has.

Runs in TRL's environment, with that release first on the path, from the root of the repository:
PYTHONPATH=.peers/trl_ppo .peers/trl/bin/python -m tests.peers.record_trl_ppo
"""

from __future__ import annotations

import trl
from trl.experimental.ppo.ppo_trainer import masked_whiten

from tests.peers.inputs import EVEN, PeerVectors, cut, rows
from tests.peers.tensors import tensor

if __name__ == "__main__":
    recorded = PeerVectors("trl_ppo", trl.__version__)
    given = recorded.batch("even", rows(10, EVEN))
    mask, value = tensor(given["mask"]), tensor(given["returns"])
    for shift in (True, False):
        found = (masked_whiten(value, mask.bool(), shift_mean=shift) * mask).tolist()
        how, outputs = {"shift": shift}, {"advantage": cut(found, given["mask"])}
        recorded.case("even", "masked_whiten", "whiten", how, **outputs)
    recorded.write()
