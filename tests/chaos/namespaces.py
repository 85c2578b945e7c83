"""Two network namespaces of this machine as the nodes of a Ray cluster, with a cable between them
that can be cut.

    python -m tests.chaos.namespaces [short] [late] [long]

The short partition, of 10 s, heals within the lease; the late one heals as the lease has ended, and
the run goes on; the long one ends it cleanly. Owns: the namespaces (held by processes, so that
nothing is left when these end), a raylet and a fork server in each, and the runs across them. Does
not own: the process of a run (tests/kit/killable_run.py). It needs root, and ip, nsenter and
unshare.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
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
from engine.plan.options import RunOptions
from tests.kit import killable_run
from tests.kit.nothing_left import require_gone
from tests.kit.processes import (
    MARK,
    ROOT,
    ended,
    is_worker,
    kill,
    marked,
    new_mark,
    wait_for,
    wait_for_error,
)
from tests.kit.ray_clusters import QUIET
from tests.kit.run_graphs import small
from tests.kit.runs import require_same_numbers
from tests.kit.tiny_runs import save_tiny_inputs

ADDRESSES = {"a": "10.213.7.1", "b": "10.213.7.2"}
CLUSTER = f"{ADDRESSES['a']}:6379"
_DEVICE = "cable"
PIN = {"rollout": "gen@b", "train_policy": "train"}
_THERE = 60.0
"""Seconds for a node to be there."""
_LATE = 60.0
"""Seconds after its lease at which a side that still runs is taken to hang."""


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
                self.ip(name, f"route add default dev {_DEVICE}")
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

    def has(self, name: str, pid: int) -> bool:
        """Whether a process is on this host."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            held = os.readlink(f"/proc/{self._holders[name].pid}/ns/net")
            return os.readlink(f"/proc/{pid}/ns/net") == held
        return False

    def ip(self, name: str, words: str) -> None:
        """Change this host's network."""
        _run([*self.within(name), "ip", *words.split()])

    def count_bytes(self, name: str) -> int:
        """Bytes that have come to this host over the cable."""
        words = ["cat", f"/sys/class/net/{_DEVICE}/statistics/rx_bytes"]
        # Of a namespace, sysfs shows what it is mounted in.
        inside = [*self.within(name), "unshare", "--mount", "sh", "-c"]
        text = _run([*inside, f"mount -t sysfs none /sys && {' '.join(words)}"])
        return int(text)

    def cut(self) -> None:
        """Nothing gets across any more, and neither side is told."""
        self.ip("b", f"link set {_DEVICE} down")

    def heal(self) -> None:
        """The cable is back."""
        self.ip("b", f"link set {_DEVICE} up")
        self.ip("b", f"route replace default dev {_DEVICE}")


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
    """Why namespaces with Ray cannot be had here; empty if they can."""
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} (packages iproute2 and util-linux)"
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed"
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    try:
        with Namespaces():
            return ""
    except OSError as error:
        return f"no network namespaces here: {error}"


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Forks:
    """A fork server on one host, for what runs on Ray there (ray_clusters.py)."""

    def __init__(self, spaces: Namespaces, name: str) -> None:
        self._process = subprocess.Popen(
            [*spaces.within(name), sys.executable, "-c", _SERVES],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.environment: dict[str, str] = json.loads(self._process.stdout.readline())
        """Variables for whoever starts a raylet on this host."""

    def close(self) -> None:
        self._process.communicate()


_SERVES = """\
import json, sys
from tests.kit import forked
from tests.kit.ray_clusters import ray_environment
forked.install()
print(json.dumps(ray_environment()), flush=True)
sys.stdin.read()
"""


class Raylet:
    """`ray start` on one host, with all that it has started; the head on a."""

    def __init__(
        self,
        spaces: Namespaces,
        name: str,
        folder: str,
        forks: Forks,
        *,
        space: str = "",
        **variables: str,
    ) -> None:
        """folder: short, since names of sockets are. space: its namespace, where that is another's.
        variables: of its environment.
        """
        space = space or name
        words = f"--node-name={name} --node-ip-address={ADDRESSES[space]} --temp-dir={folder}"
        words += f" --num-cpus=1 --object-store-memory={80 * 2**20} --block --disable-usage-stats"
        if name == "a":
            words += " --head --port=6379 --include-dashboard=false"
        else:
            words += f" --address={CLUSTER}"
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", *words.split()]
        self._mark = new_mark()
        usual = {"OMP_NUM_THREADS": "1", MARK: self._mark}
        self._process = subprocess.Popen(
            [*spaces.within(space), *start],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | forks.environment | usual | variables,
        )
        self._wait()

    def _wait(self) -> None:
        """Until it says that it is there; what it says later is read away."""
        late = threading.Timer(_THERE, self._process.kill)
        late.start()
        assert self._process.stdout is not None
        said = ""
        while "Ray runtime started" not in said:
            line = self._process.stdout.readline()
            assert line, f"ray start ended: {said}"
            said += line
        late.cancel()
        threading.Thread(target=self._process.stdout.read, daemon=True).start()

    def workers(self) -> list[int]:
        """The processes of a run's Workers on this host."""
        return [pid for pid in marked(self._mark) if is_worker(pid)]

    def close(self) -> None:
        """End all of it."""
        kill(marked(self._mark))
        self._process.wait()
        require_gone(self._mark)


@dataclass
class TwoHosts:
    """The network, the folder of model and data, and the nodes."""

    spaces: Namespaces
    folder: Path
    nodes: dict[str, Raylet]
    forks: dict[str, Forks]

    def options(self, name: str, steps: int, **where: Any) -> RunOptions:
        usual = {"threads": 1, "progress": False, "checkpoint_every": 4, "workers": "one"}
        options = {"steps": steps, "name": name, "runs": self.folder / "runs"} | usual | where
        return RunOptions(**options)

    def alone(self, steps: int) -> Path:
        """The folder of the run on one host."""
        return run(small(self.folder), self.options("alone", steps)).folder

    def across(self, steps: int, *flags: str, **how: Any) -> subprocess.Popen[str]:
        """The run on host a that uses host b: GRPO, generation on b, training here."""
        options = self.options("across", steps, **({"pin": PIN, "cluster": "ray"} | how))
        words = killable_run.words("small", self.folder, options, *flags)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [*self.spaces.within("a"), sys.executable, *words]
        environment = os.environ | QUIET | {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": CLUSTER}
        return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def begin_again(self) -> None:
        """A new node b: Ray ends one that it has counted as lost."""
        self.nodes.pop("b").close()
        self.nodes["b"] = Raylet(self.spaces, "b", str(self.folder / "c"), self.forks["b"])

    def require_same(self, expected: Path) -> None:
        """Metrics and weights of the run across, to the bit; then no run folder is left."""
        require_same_numbers(self.folder / "runs" / "across", expected)
        assert not [pid for node in self.nodes.values() for pid in node.workers()]
        shutil.rmtree(self.folder / "runs")


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Both hosts with a node each, and model and data in a folder."""
    with contextlib.ExitStack() as after:
        folder = Path(after.enter_context(tempfile.TemporaryDirectory(prefix="two-")))
        save_tiny_inputs(folder)
        spaces = after.enter_context(Namespaces())
        nodes: dict[str, Raylet] = {}
        forks: dict[str, Forks] = {}
        for name in ADDRESSES:
            forks[name] = Forks(spaces, name)
            after.callback(forks[name].close)
        after.callback(lambda: [node.close() for node in reversed(nodes.values())])
        for name in ADDRESSES:
            nodes[name] = Raylet(spaces, name, str(folder / name), forks[name])
        yield TwoHosts(spaces, folder, nodes, forks)


def require_success(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=180.0)
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


def too_late(hosts: TwoHosts, steps: int, lease: float) -> None:
    """Cut until b is given up, and not for so long that Ray takes it for dead: what the run has
    there is used again, as it is all the room that there is, and its Steps are those of one host.
    """
    expected = hosts.alone(steps)
    across = hosts.across(steps, lease=lease, wait=_THERE)
    wait_for(across, f"step {steps // 2}")
    hosts.spaces.cut()
    wait_for_error(across, "host b: not heard of for")
    hosts.spaces.heal()
    require_success(across)
    hosts.require_same(expected)


def too_long(hosts: TwoHosts, steps: int, lease: float) -> float:
    """Cut for longer than the lease: both sides end soon after the lease, since b is nowhere
    else, no Worker of either is left, and once it has healed a resume comes to the same end.
    Returns how long the run took to end. The nodes must not have run anything before: on a busy
    machine Ray takes long to see that the cores of an earlier run are free.
    """
    expected = hosts.alone(steps)
    across = hosts.across(steps, lease=lease, wait=4.0)
    wait_for(across, f"step {steps // 2}")
    workers = hosts.nodes["b"].workers()
    assert workers
    hosts.spaces.cut()
    began = time.monotonic()
    _, errors = across.communicate(timeout=lease + _LATE)
    took = time.monotonic() - began
    assert across.returncode != 0
    assert "host b: not heard of for" in errors
    assert "no room within 4 s" in errors.strip().splitlines()[-1], errors
    assert all(ended(pid, began + lease + _LATE - time.monotonic()) for pid in workers)
    hosts.spaces.heal()
    hosts.begin_again()
    require_success(hosts.across(steps, "resume"))
    hosts.require_same(expected)
    return took


def main(partitions: Sequence[str]) -> None:
    """Carry out those that are named, or all."""
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    with two_hosts() as hosts:
        if "long" in partitions or not partitions:
            took = f"both sides had ended after {too_long(hosts, 12, 12.0):.0f} s"
            print(f"a partition without end, lease 12 s: {took}, and a resume went on")
        if "late" in partitions or not partitions:
            too_late(hosts, 12, 6.0)
            print("one that heals after the lease of 6 s: its host was used again")
        if "short" in partitions or not partitions:
            heals(hosts, 24, 10.0)
            print("one of 10 s, lease 30 s: the Steps of one host, to the bit")


if __name__ == "__main__":
    main(sys.argv[1:])
