"""When a node gets one more replica, and when one less: StreamRL's rule (arXiv:2504.15930).

    T_gen     the seconds that a Step's chunks take n replicas
    T_train   the seconds of the Step itself, from its first node below the cut to its last update

    one more      T_gen - T_train is at least what it would save: T_gen - T_gen * n / (n + 1)
    one less      for some Steps in a row, n - 1 replicas would have been faster than training by at
                  least what the n-th saves them

Owns: the rule. Does not own: the measurements and who begins (replicas.py).

After one more, the rule for one less cannot hold with the same times, nor the other way round: so
it comes to rest. With max_lag 0, where generation and training do not overlap, any replica makes a
Step shorter, each by less than the one before; the rule is the same there, and stops where
generation takes about as long as training.
"""

from __future__ import annotations

PATIENCE = 3
"""Steps in a row after which a replica is found to be too many."""


class BalanceRule:
    """Of one node."""

    def __init__(self) -> None:
        self._idle = 0
        """Steps in a row in which one replica less would have done."""

    def after_step(self, replicas: int, generating: float, training: float) -> int:
        """How many replicas more there should be: 1, 0 or -1. generating: T_gen with so many."""
        if generating <= 0:
            return 0
        fewer = max(replicas - 1, 1)
        slower = generating * replicas / fewer
        spare = replicas > 1 and training - slower >= slower - generating
        self._idle = self._idle + 1 if spare else 0
        if generating - training >= generating - generating * replicas / (replicas + 1):
            return 1
        if self._idle < PATIENCE:
            return 0
        self._idle = 0
        return -1
