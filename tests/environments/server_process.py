"""A server for an environment, as a process on the loopback."""

from __future__ import annotations

import subprocess
from pathlib import Path

_FOLDER = Path(__file__).parent / "servers"


class ServerProcess:
    """It has printed its port, so it listens. url: without a path."""

    def __init__(self, python: str, name: str, *arguments: str) -> None:
        command = [python, str(_FOLDER / f"{name}.py"), *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        assert port, f"{name} did not start"
        self.url = f"http://127.0.0.1:{port}"

    def end(self) -> None:
        """Kill it; ending it twice does nothing."""
        self._process.kill()
        self._process.wait(timeout=30)
        if self._process.stdout is not None:
            self._process.stdout.close()
