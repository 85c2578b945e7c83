"""Two network namespaces of this machine as two hosts, and a cable between them that can be cut.

    python -m tests.chaos.namespaces     # a partition of 10 s heals within the lease; a longer one ends cleanly

Owns: the namespaces (by processes that hold them, so that nothing is left when these end) and the
runs across them. Does not own: the graph (tests/processes/run_graphs.py). It needs root, and ip,
nsenter and unshare.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "processes"), str(ROOT / "tests" / "unit")]

from host_processes import HostProcess, cluster_file, host, with_lease  # noqa: E402

if TYPE_CHECKING:
    from engine.options import RunOptions

ADDRESSES = {"a": "10.213.7.1", "b": "10.213.7.2"}
_DEVICE = "cable"
PIN = {"rollout": "gen@b", "train_policy": "train"}


class Namespaces:
    """Hosts a and b, each the network namespace of a process that waits for its standard input to
    end.
    """

    def __init__(self) -> None:
        self._holders: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Namespaces:
        try:
            for name in ADDRESSES:
                held = ["unshare", "--net", "sh", "-c", "echo there; exec cat"]
                self._holders[name] = subprocess.Popen(
                    held, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
                out = self._holders[name].stdout
                assert out is not None
                if out.readline() != b"there\n":
                    raise OSError("unshare makes no network namespace")
            here, there = (str(holder.pid) for holder in self._holders.values())
            _ip(
                "link",
                "add",
                _DEVICE,
                "netns",
                here,
                "type",
                "veth",
                "peer",
                "name",
                _DEVICE,
                "netns",
                there,
            )
            for name, address in ADDRESSES.items():
                self.ip(name, "addr", "add", f"{address}/24", "dev", _DEVICE)
                self.ip(name, "link", "set", "lo", "up")
                self.ip(name, "link", "set", _DEVICE, "up")
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
        """Words before a command that run it on this host."""
        return ["nsenter", "--net", f"--target={self._holders[name].pid}", "--"]

    def ip(self, name: str, *words: str) -> None:
        """Change this host's network."""
        _run([*self.within(name), "ip", *words])

    def cut(self) -> None:
        """Nothing gets from one to the other any more, and nobody is told so."""
        self.ip("b", "link", "set", _DEVICE, "down")

    def heal(self) -> None:
        """The cable is back."""
        self.ip("b", "link", "set", _DEVICE, "up")


def why_not() -> str:
    """Why namespaces cannot be made here; empty where they can."""
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


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class Across:
    """A run on host a that uses host b. `until` reads what it prints: `step N` for each Step."""

    def __init__(
        self, spaces: Namespaces, cluster: Path, folder: Path, steps: int, *, resumed: bool = False
    ) -> None:
        words = [
            sys.executable,
            "-m",
            "tests.chaos.namespaces",
            "--run",
            str(folder),
            "--cluster",
            str(cluster),
        ]
        words += ["--steps", str(steps), *(["--resume"] if resumed else [])]
        self.process = subprocess.Popen(
            [*spaces.within("a"), *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def until_step(self, step: int) -> None:
        """Wait for the end of a Step."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == f"step {step}":
                return
        raise AssertionError(f"the run ended before step {step}: {self.process.communicate()}")

    def ends(self, seconds: float) -> tuple[int, str]:
        """Its exit code, and its errors."""
        _, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, errors


Hosts = tuple[Namespaces, Path, HostProcess]
"""The network, the cluster file, `dataflow host` on b."""


@contextlib.contextmanager
def two_hosts(folder: Path, lease: float) -> Iterator[Hosts]:
    """Both hosts, `dataflow host` on b, and the cluster file for a."""
    with Namespaces() as spaces:
        cluster = cluster_file(folder, addresses=ADDRESSES)
        with host(cluster, "b", before=spaces.within("b")) as there:
            yield spaces, with_lease(cluster, lease), there


def start(folder: Path, cluster: Path, steps: int, *, resumed: bool) -> None:
    """In the process of a run: GRPO, generation on b, training here."""
    from run_graphs import small

    from engine.api import resume, run

    told = [lambda row: print(f"step {row['step']}", flush=True)]
    if resumed:
        resume(folder / "runs" / "across", on_step=told)
        return
    where = {"pin": PIN, "cluster": cluster, "workers": "one"}
    run(small(folder), options(folder, "across", steps, **where), on_step=told)


def alone(folder: Path, steps: int) -> Path:
    """The same run on one host."""
    from run_graphs import small

    from engine.api import run

    return run(small(folder), options(folder, "alone", steps)).folder


def options(folder: Path, name: str, steps: int, **where: Any) -> RunOptions:
    """Of both runs."""
    from engine.options import RunOptions

    runs = folder / "runs"
    return RunOptions(
        steps=steps, name=name, runs=runs, threads=1, progress=False, checkpoint_every=4, **where
    )


def heals(hosts: Hosts, folder: Path, steps: int, seconds: float) -> None:
    """Cut for less than the lease: the Steps of one host, to the bit, so nothing is lost and
    nothing trained twice.
    """
    spaces, cluster, there = hosts
    expected = alone(folder, steps)
    across = Across(spaces, cluster, folder, steps)
    across.until_step(2)
    spaces.cut()
    threading.Event().wait(seconds)  # the length of the partition
    spaces.heal()
    code, errors = across.ends(120.0)
    assert code == 0, errors
    same(folder / "runs" / "across", expected, steps)
    there.until("waiting for a run")
    shutil.rmtree(folder / "runs")


def too_long(hosts: Hosts, folder: Path, steps: int, lease: float) -> float:
    """Cut for longer than the lease: both sides end within the lease and 10 s, nothing of either is
    left, and once it has healed a resume comes to the same end. Returns how long the run took to
    end.
    """
    spaces, _, there = hosts
    expected = alone(folder, steps)
    across = Across(spaces, with_lease(folder / "cluster.toml", lease), folder, steps)
    across.until_step(steps // 2)
    workers = there.workers()
    assert workers
    spaces.cut()
    began = time.monotonic()
    code, errors = across.ends(lease + 10.0)
    took = time.monotonic() - began
    assert code != 0
    assert "host b: not heard of for" in errors.strip().splitlines()[-1], errors
    there.until("waiting for a run", lease + 10.0 - took)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    spaces.heal()
    code, errors = Across(spaces, folder / "cluster.toml", folder, steps, resumed=True).ends(120.0)
    assert code == 0, errors
    same(folder / "runs" / "across", expected, steps)
    there.until("waiting for a run")
    shutil.rmtree(folder / "runs")
    return took


def same(run: Path, expected: Path, steps: int) -> None:
    """Metrics and weights, to the bit."""
    from tests.kit.runs import metrics, timeless, weights

    assert timeless(metrics(run)) == timeless(metrics(expected))
    last = f"checkpoints/step_{steps}"
    assert weights(run / last) == weights(expected / last)
    assert weights(run / last)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", type=Path, help="be the process of a run (used by this program itself)"
    )
    parser.add_argument("--cluster", type=Path)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    said = parser.parse_args()
    if said.run:
        start(said.run, said.cluster, said.steps, resumed=said.resume)
    elif reason := why_not():
        print(f"skipped: {reason}")
    else:
        with tempfile.TemporaryDirectory() as folder:
            make_inputs(Path(folder))
            with two_hosts(Path(folder), 30.0) as hosts:
                heals(hosts, Path(folder), 24, 10.0)
                print("a partition of 10 s, lease 30 s: the Steps of one host, to the bit")
                took = too_long(hosts, Path(folder), 12, 12.0)
                print(
                    f"one without end, lease 12 s: both sides had ended after {took:.0f} s, and a"
                    " resume went on"
                )


def make_inputs(folder: Path) -> None:
    """Model and prompts of `run_graphs.small`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tests.kit.models import save_tiny

    save_tiny(folder / "model", layers=1)
    asked = [a + b for a in "abcdefgh" for b in "xyz"]
    pq.write_table(
        pa.table({"prompt": asked, "answer": [a[0] for a in asked]}), folder / "train.parquet"
    )


if __name__ == "__main__":
    main()
