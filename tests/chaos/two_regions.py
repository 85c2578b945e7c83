"""Two network namespaces as two regions, and the bytes of versions that cross the cable.

    python -m tests.chaos.two_regions [--unnamed]

Training is on the node a, three replicas of the generation on nodes b, c and d of the other
namespace. With the regions of their labels a version crosses once; --unnamed leaves the labels out.
Owns: this run, and what it counts. Does not own: namespaces and nodes (namespaces.py).
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.namespaces import ADDRESSES, Forks, Namespaces, Raylet, TwoHosts, why_not
from tests.kit.models import save_tiny
from tests.kit.tiny_runs import save_tiny_inputs

_STEPS = 3
_FAR = ("b", "c", "d")
_PIN = {"rollout": "g0@b,g1@c,g2@d", "train_policy": "train@a"}


def count_crossings(*, named: bool) -> float:
    """Run a few Steps; returns the bytes that crossed, in versions, for each that was published:
    one of each Step, and the one that the run begins with. named: whether regions are.
    """
    with contextlib.ExitStack() as after:
        folder = Path(after.enter_context(tempfile.TemporaryDirectory(prefix="two-")))
        save_tiny_inputs(folder)
        shutil.rmtree(folder / "model")
        # So large that what else crosses (rows, messages, Ray's own) is little beside it.
        save_tiny(folder / "model", layers=6, hidden_size=256, intermediate_size=1024)
        version_bytes = (folder / "model" / "model.safetensors").stat().st_size
        spaces = after.enter_context(Namespaces())
        forks = {name: Forks(spaces, name) for name in ADDRESSES}
        for fork in forks.values():
            after.callback(fork.close)
        nodes: dict[str, Raylet] = {}
        after.callback(lambda: [node.close() for node in reversed(nodes.values())])
        for name in ("a", *_FAR):
            space = "a" if name == "a" else "b"
            region = {"RAY_NODE_REGION": space} if named else {}
            at = str(folder / name)
            nodes[name] = Raylet(spaces, name, at, forks[space], space=space, **region)
        hosts = TwoHosts(spaces, folder, nodes, forks)
        before = spaces.count_bytes("b")
        run = hosts.across(_STEPS, pin=_PIN, private=True)
        _, errors = run.communicate(timeout=240.0)
        assert run.returncode == 0, errors
        crossed = spaces.count_bytes("b") - before
        return crossed / version_bytes / (_STEPS + 1)


def main(words: Sequence[str]) -> None:
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    named = "--unnamed" not in words
    crossings = count_crossings(named=named)
    print(f"bytes over the link, for each version: {crossings:.2f} of its size")
    assert not named or 0.7 < crossings < 1.5, "each version crosses once"


if __name__ == "__main__":
    main(sys.argv[1:])
