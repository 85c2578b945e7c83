"""Two network namespaces of this machine as hosts, with a cable between them that can be cut.

    python -m tests.chaos.namespaces

A partition of 10 s heals within the lease; a longer one ends the run cleanly. Owns: the namespaces
(held by processes, so that nothing is left when these end) and the runs across them. Does
not own: the process of a run (tests/kit/killable_run.py). It needs root, and ip, nsenter and
unshare.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.api import run
from engine.options import RunOptions
from tests.kit import killable_run
from tests.kit.host_processes import HostProcess, cluster_file, host, with_lease
from tests.kit.processes import ROOT, wait_for
from tests.kit.run_graphs import small
from tests.kit.runs import require_same_numbers
from tests.kit.tiny_runs import save_tiny_inputs

ADDRESSES = {"a": "10.213.7.1", "b": "10.213.7.2"}
_DEVICE = "cable"
PIN = {"rollout": "gen@b", "train_policy": "train"}


class Namespaces:
    """Hosts a and b: network namespaces of processes that wait for their standard input to end."""

    def __init__(self) -> None:
        self._holders: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Namespaces:
        try:
            for name in ADDRESSES:
                self._holders[name] = _holder()
            here, there = (holder.pid for holder in self._holders.values())
            ends = f"{_DEVICE} netns {here} type veth peer name {_DEVICE} netns {there}"
            _run(["ip", "link", "add", *ends.split()])
            for name, address in ADDRESSES.items():
                self.ip(name, f"addr add {address}/24 dev {_DEVICE}")
                self.ip(name, "link set lo up")
                self.ip(name, f"link set {_DEVICE} up")
        except OSError:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that hold them; the kernel removes the rest."""
        for holder in self._holders.values():
            for stream in (holder.stdin, holder.stdout):
                assert stream is not None
                stream.close()
            holder.wait()

    def within(self, name: str) -> list[str]:
        """The words before a command that run it on this host."""
        return ["nsenter", "--net", f"--target={self._holders[name].pid}", "--"]

    def ip(self, name: str, words: str) -> None:
        """Change this host's network."""
        _run([*self.within(name), "ip", *words.split()])

    def cut(self) -> None:
        """Nothing gets across any more, and neither side is told."""
        self.ip("b", f"link set {_DEVICE} down")

    def heal(self) -> None:
        """The cable is back."""
        self.ip("b", f"link set {_DEVICE} up")


def _holder() -> subprocess.Popen[bytes]:
    """A process in a network namespace of its own."""
    held = ["unshare", "--net", "sh", "-c", "echo there; exec cat"]
    holder = subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    if holder.stdout.readline() != b"there\n":
        holder.communicate()
        raise OSError("unshare makes no network namespace")
    return holder


def why_not() -> str:
    """Why namespaces cannot be created here; empty if they can."""
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} (packages iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    try:
        with Namespaces():
            return ""
    except OSError as error:
        return f"no network namespaces here: {error}"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class TwoHosts:
    """The network, the folder of model and data, the cluster file, `dataflow host` on b."""

    spaces: Namespaces
    folder: Path
    cluster: Path
    there: HostProcess

    def options(self, name: str, steps: int, **where: Any) -> RunOptions:
        usual = {"threads": 1, "progress": False, "checkpoint_every": 4, "workers": "one"}
        return RunOptions(steps=steps, name=name, runs=self.folder / "runs", **usual, **where)

    def alone(self, steps: int) -> Path:
        """The folder of the run on one host."""
        return run(small(self.folder), self.options("alone", steps)).folder

    def across(self, steps: int, *flags: str, lease: float = 30.0) -> subprocess.Popen[str]:
        """The run on host a that uses host b: GRPO, generation on b, training here."""
        cluster = with_lease(self.cluster, lease)
        options = self.options("across", steps, pin=PIN, cluster=cluster)
        words = killable_run.words("small", self.folder, options, *flags)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [*self.spaces.within("a"), sys.executable, *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def require_same(self, expected: Path) -> None:
        """Metrics and weights of the run across, to the bit; then no run folder is left."""
        require_same_numbers(self.folder / "runs" / "across", expected)
        self.there.until("waiting for a run")
        shutil.rmtree(self.folder / "runs")


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Both hosts, `dataflow host` on b, and model and data in the folder."""
    save_tiny_inputs(folder)
    with Namespaces() as spaces:
        cluster = cluster_file(folder, addresses=ADDRESSES)
        with host(cluster, "b", before=spaces.within("b")) as there:
            yield TwoHosts(spaces, folder, cluster, there)


def require_success(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=120.0)
    assert process.returncode == 0, errors


def heals(hosts: TwoHosts, steps: int, seconds: float) -> None:
    """Cut for less than the lease: the Steps of one host to the bit, none lost or done twice."""
    expected = hosts.alone(steps)
    across = hosts.across(steps)
    wait_for(across, "step 2")
    hosts.spaces.cut()
    threading.Event().wait(seconds)  # the length of the partition
    hosts.spaces.heal()
    require_success(across)
    hosts.require_same(expected)


def too_long(hosts: TwoHosts, steps: int, lease: float) -> float:
    """Cut for longer than the lease: both sides end within the lease and 10 s, nothing of either is
    left, and once it has healed a resume comes to the same end. Returns how long the run took to
    end.
    """
    expected = hosts.alone(steps)
    across = hosts.across(steps, lease=lease)
    wait_for(across, f"step {steps // 2}")
    workers = hosts.there.workers()
    assert workers
    hosts.spaces.cut()
    began = time.monotonic()
    _, errors = across.communicate(timeout=lease + 10.0)
    took = time.monotonic() - began
    assert across.returncode != 0
    assert "host b: not heard of for" in errors.strip().splitlines()[-1], errors
    hosts.there.until("waiting for a run", lease + 10.0 - took)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    hosts.spaces.heal()
    require_success(hosts.across(steps, "resume"))
    hosts.require_same(expected)
    return took


def main() -> None:
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    with tempfile.TemporaryDirectory() as folder, two_hosts(Path(folder)) as hosts:
        heals(hosts, 24, 10.0)
        print("a partition of 10 s, lease 30 s: the Steps of one host, to the bit")
        took = f"both sides had ended after {too_long(hosts, 12, 12.0):.0f} s"
        print(f"one without end, lease 12 s: {took}, and a resume went on")


if __name__ == "__main__":
    main()
