"""Loopback addresses as hosts: a cluster file with keys, and `dataflow host` as a process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from engine.launch.keyfile import make_keys
from engine.plan.cluster import read_cluster
from tests.kit.processes import COMMAND_LINE, ROOT, children, ended, kill

HERE, THERE = "127.0.0.1", "127.0.0.2"


def cluster_file(
    folder: Path, *, lease: float = 10.0, addresses: Mapping[str, str] | None = None
) -> Path:
    """Hosts a (this process's) and b, with new keys; b's cores and memory are not given."""
    hosts = addresses or {"a": HERE, "b": THERE}
    path = folder / "cluster.toml"
    parts = [f"lease = {lease}"]
    for name, address in hosts.items():
        port = 7373 if addresses else free_port(address)
        parts.append(f'[hosts.{name}]\naddress = "{address}"\nport = {port}')
    path.write_text("\n".join(parts) + "\n")
    cluster = read_cluster(path)
    assert cluster.keys is not None
    make_keys(cluster.keys, hosts)
    return path


def with_lease(path: Path, lease: float, *, private: bool = False) -> Path:
    """The same cluster, for the side that starts runs, with another lease."""
    changed = path.with_name(f"lease_{lease:g}.toml")
    lines = [f"lease = {lease}", f"private = {str(private).lower()}", f'keys = "{path.stem}.keys"']
    changed.write_text("\n".join([*lines, *path.read_text().splitlines()[1:]]) + "\n")
    return changed


def free_port(address: str) -> int:
    """A port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


class HostProcess:
    """`dataflow host` for one host of a cluster; what it prints is read by `until`."""

    def __init__(self, cluster: Path, name: str, *, before: Sequence[str] = ()) -> None:
        """before: words before the command, such as those that enter a namespace."""
        self.process = subprocess.Popen(
            [*before, sys.executable, "-c", COMMAND_LINE, "host", str(cluster), name],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.said = ""

    def until(self, words: str, seconds: float = 60.0) -> str:
        """Its output up to a line with these words, from where the last call ended."""
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        while words not in self.said:
            left = end - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, left))
            assert ready, f"no {words!r} within {seconds:g} s: {self.said}"
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, f"it ended: {self.said}"
            self.said += data.decode()
        before, _, self.said = self.said.partition(words)
        return before + words

    @property
    def serving(self) -> int:
        """The process that serves a run, or waits for one."""
        (process,) = children(self.process.pid)
        return process

    def workers(self) -> list[int]:
        """The processes of the Workers."""
        return children(self.serving)

    def close(self) -> None:
        """End it, and everything below it."""
        below = children(self.process.pid)
        kill(below, signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        assert all(ended(pid, 10.0) for pid in below), "what served a run is there still"
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def host(cluster: Path, name: str = "b", *, before: Sequence[str] = ()) -> Iterator[HostProcess]:
    """A host that waits for a run."""
    process = HostProcess(cluster, name, before=before)
    try:
        process.until("waiting for a run")
        yield process
    finally:
        process.close()
