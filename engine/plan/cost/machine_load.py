"""How busy others kept a machine while it was profiled, and what that makes of its seconds.

Owns: the figures, which of them count as quiet and as too much, and their words. Does not own:
measuring them (engine/predict/profile/other_load.py), what is repeated or refused
(engine/predict/profile).

All shares are of the cores that a measurement wanted: 0.5 means that its threads waited for a core
as long as they ran.
"""

from __future__ import annotations

from dataclasses import dataclass

QUIET = 0.05
"""Share that others may have. A call that waits for a twentieth of its time takes a twentieth
longer: a third of what a predicted second may be off (benchmarks/predicted.py).
"""
MOST = 0.25
"""Share from which a wall clock says nothing of the kernel: with one thread a call takes a third
longer, with several they all wait for the one that waits.
"""
MOST_OF_CPU = 0.75
"""The same of CPU seconds. They do not count waits, but they do count what a thread finds gone from
the caches after each. Training passes of 50 ms took up to 8 % more of them where others, who copied
memory all the time, had 0.75 to 0.94 of the core (two cores of an AMD EPYC).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLoad:
    """cores: that others used in the mean, of `all_cores` of the machine. share: the greatest that
    they had of the cores that a measurement wanted, of those that count.
    """

    cores: float = 0.0
    all_cores: int = 1
    share: float = 0.0

    @property
    def quiet(self) -> bool:
        """Whether nothing that counts was disturbed."""
        return self.share <= QUIET

    @property
    def words(self) -> str:
        """`others used 1.2 of 2 cores, and had up to 40 % of those that a measurement wanted`"""
        wanted = f"up to {100 * self.share:.0f} % of those that a measurement wanted"
        return f"others used {self.cores:.1f} of {self.all_cores} cores, and had {wanted}"

    @property
    def note(self) -> str:
        """What the user of a profile is told of a machine that was not quiet."""
        return f"the profile is of a busy machine: {self.words}"
