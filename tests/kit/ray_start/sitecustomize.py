"""Python imports this as it starts, in processes of a Ray cluster of tests: what runs on Ray forks
its Workers, as other tests do (forked.py), and a node's two agents say that they are there and do
nothing. No run asks them for anything: they serve the dashboard and environments of packages.

It is quick: it imports nothing of the engine, nor of Ray.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

_WORKER = "default_worker.py"
_AGENTS: Mapping[str, Mapping[str, int]] = {
    "dashboard/agent.py": {
        "metrics_agent_port": -1,
        "metrics_export_port": -1,
        "dashboard_agent_listen_port": -1,
    },
    "runtime_env/agent/main.py": {"runtime_env_agent_port": 1},
}
"""The ports that a raylet waits for, from each agent: -1 is Ray's own word for none, and at 1 is
nobody.
"""


class _Installing:
    """Of `sys.meta_path`: it finds nothing, and installs forks before the engine starts any."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "engine.run.launch.process_handle":
            sys.meta_path.remove(self)
            from tests.kit import forked

            forked.install()
        return None


def _be_agent(ports: Mapping[str, int]) -> NoReturn:
    """In the place of an agent: tell the raylet its ports, and end after it."""
    arguments = dict(
        word[2:].split("=", 1) for word in sys.orig_argv if word[:2] == "--" and "=" in word
    )
    raylet = os.pidfd_open(os.getppid())
    for name, port in ports.items():
        there = f"{arguments['session-dir']}/{name}_{arguments['node-id']}"
        with open(f"{there}.new", "w") as file:
            file.write(str(port))
        os.rename(f"{there}.new", there)  # the raylet reads it once it is there
    select.select([raylet], [], [])
    os._exit(0)


if any(word.endswith(_WORKER) for word in sys.orig_argv):
    sys.meta_path.insert(0, _Installing())
for _agent, _ports in _AGENTS.items():
    if any(word.endswith(_agent) for word in sys.orig_argv):
        _be_agent(_ports)
