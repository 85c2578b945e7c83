"""Mistakes in what is said of hosts."""

from __future__ import annotations

from tests.mistakes import GRAPH, RUN, Mistake, changed

HOSTS = """[hosts.a]
cores = 8
memory_gib = 64

[hosts.b]
cores = 32
memory_gib = 512
gpus = 8
gpu_memory_gib = 80
labels = { gpu = "H100" }
"""
EXPLAIN = f"dataflow explain {GRAPH} --cluster hosts.toml"

MISTAKES = (
    Mistake(
        what="A run on the hosts of a file",
        command=f"{RUN} --cluster hosts.toml",
        why="A cluster file describes hosts for `explain`. A run is on the nodes of a Ray cluster.",
        files={"hosts.toml": HOSTS},
    ),
    Mistake(
        what="The address of a Ray cluster as a flag",
        command=f"{RUN} --cluster ray:10.0.0.1:6379",
        why="The address is that of RAY_ADDRESS, which Ray's own commands read, too.",
    ),
    Mistake(
        what="A host without a cluster",
        command=f"dataflow explain {GRAPH} --pin rollout=gen@b",
        why="`gen@b` is the Worker gen on host b, and without `--cluster` there are no hosts.",
    ),
    Mistake(
        what="A host that is not there",
        command=f"{EXPLAIN} --pin rollout=gen@c",
        why=(
            "In a Ray cluster a host has its node's name, which is the machine's host name unless"
            " the node was given another; `dataflow explain` and `ray list nodes` show them."
        ),
        files={"hosts.toml": HOSTS},
    ),
    Mistake(
        what="A label that no host has",
        command=f"{EXPLAIN} --pin rollout=gen@gpu:H200",
        why=(
            "`gpu` is the kind of the GPUs as Ray knows it; other labels are those of `ray start"
            " --labels zone=west`."
        ),
        files={"hosts.toml": HOSTS},
    ),
    Mistake(
        what="A Worker on two hosts",
        command=f"{EXPLAIN} --pin rollout=gen@a score=gen@b",
        why="A Worker is one process. Give the other node a Worker of another name.",
        files={"hosts.toml": HOSTS},
    ),
    Mistake(
        what="A cluster file that is not there",
        command=changed("hosts.toml", "host.toml", EXPLAIN),
        why="Paths are taken from the folder in which the command is typed.",
        files={"hosts.toml": HOSTS},
    ),
    Mistake(
        what="A cluster file with an address",
        command=EXPLAIN,
        why=(
            "Earlier versions had addresses, keys and a lease in it. Hosts are now the nodes of a"
            " Ray cluster ([clusters](clusters.md)); the lease is a flag, `--lease`."
        ),
        files={"hosts.toml": HOSTS + 'address = "10.0.0.2"\n'},
    ),
    Mistake(
        what="A host without cores",
        command=EXPLAIN,
        why="A plan needs the cores and the memory of each host.",
        files={"hosts.toml": HOSTS.replace("cores = 8\n", "")},
    ),
    Mistake(
        what="A lease of no time",
        command=f"{RUN} --cluster ray --lease 0",
        why="A lease under a few seconds takes a busy network for a lost host.",
    ),
)
