"""How many files this process may have open, which grows with the episodes under way.

Owns: raising the soft limit. Does not own: what a process of an environment may open (child/), what
happens where the hard limit is reached (the episode has a fault).
"""

from __future__ import annotations

import resource

_SPARE = 512
"""Files of all else in the process: weights, sockets, outboxes."""
_FOR_EACH = 2
"""Files of a process that runs an episode: its socket, and what it prints."""


def allow_episodes(count: int) -> None:
    """Raise the soft limit of open files to what so many processes of episodes need, or to the hard
    limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _SPARE + _FOR_EACH * count
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
