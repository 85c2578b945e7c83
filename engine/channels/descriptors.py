"""Open files: how many a process may have, and the error where there are too many.

Owns: raising the soft limit where it is too low, and the words. Does not own: what opens files. A
Worker has a socket to each Worker whose rows it reads and from each that reads its own, so hundreds
of them need more than the 1,024 that a shell usually allows, and hard limits are far higher.
"""

from __future__ import annotations

import errno
import os
import resource

from dataflow.errors import RunError

_SPARE = 256
"""Of libraries, logs, and what is on its way."""
_OF_A_PEER = 4
"""Of one peer: a socket each way, and a file for tensors, which may come before it is taken."""
_OF_A_CHILD = 3
"""Of one process that the Supervisor starts: its control socket, its handle, its exit code."""


def make_room_for_peers(workers: int) -> None:
    """Let a Worker have what so many Workers take, as far as the hard limit goes."""
    _raise_to(_SPARE + _OF_A_PEER * workers)


def make_room_for_children(workers: int) -> None:
    """Let this process start so many Workers. Raises RunError where the hard limit is too low."""
    needed = len(os.listdir("/proc/self/fd")) + _SPARE + _OF_A_CHILD * workers
    if _raise_to(needed) < needed:
        problem = f"{workers} workers of this host need {needed} open files"
        fix = f"Fix: {more_files(needed)}, or fewer workers."
        raise RunError(f"supervisor: {problem}, found a hard limit below that. {fix}")


def explain_shortage(error: OSError) -> str | None:
    """Say the problem and its fix, if there are too many open files; None for any other error."""
    if error.errno == errno.EMFILE:
        return f"{error.strerror}. Fix: {more_files()}"
    if error.errno == errno.ENFILE:
        return f"{error.strerror}. Fix: a higher fs.file-max (sysctl)"
    return None


def more_files(needed: int = 0) -> str:
    """The fix: so many, or else more than there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = needed
    if not number:
        number = hard if soft < hard else 2 * hard
    fix = f"ulimit -n {number} (now {soft}, hard limit {hard}) before the run"
    if number > hard:
        fix = f"{fix}, in a shell that may raise its hard limit"
    return fix


def _raise_to(needed: int) -> int:
    """Raise the soft limit to this, or to the hard limit. Returns how many files it allows now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    allowed = needed
    if hard != resource.RLIM_INFINITY:
        allowed = min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
