"""A client of `dataflow watch`: the command as a process, and requests as a browser makes them."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.processes import COMMAND_LINE, limited, start_python

_URL = re.compile(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the server said."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, kw_only=True)
class PageClient:
    """A browser that has opened the URL, unless `cookie` is empty."""

    port: int
    token: str
    process: subprocess.Popen[str]
    cookie: str = ""

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def entry(self) -> str:
        """The URL with its token, as it was printed."""
        return f"{self.base}?token={self.token}"

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """One request, with the cookie; a header's name has _ for -."""
        with self._asked(path, method, headers) as answer:
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(status=answer.status, headers=found, body=answer.read())

    def json(self, path: str) -> Any:
        """A good answer's JSON."""
        answer = self.ask(path)
        assert answer.status == 200, answer
        return answer.json()

    @contextmanager
    def stream(self, run: str) -> Iterator[Iterator[tuple[str, Any]]]:
        """(kind, data) of a run's events as they come."""
        with self._asked(f"/api/runs/{run}/stream", "GET", {}) as answer:
            yield _events(answer)

    @contextmanager
    def _asked(
        self, path: str, method: str, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        cookie = {"Cookie": self.cookie} if self.cookie else {}
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=cookie | named)
            yield connection.getresponse()
        finally:
            connection.close()


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    kind = ""
    while line := answer.readline().decode():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ").strip()
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


@contextmanager
def served(root: Path, *words: object, limit: float = 150.0) -> Iterator[PageClient]:
    """`dataflow watch` for a root, and its page opened; limit: seconds until it is killed."""
    command = ["-c", COMMAND_LINE, "watch", "--root", root, *words]
    with limited(start_python(*command), limit) as process:
        assert process.stdout is not None
        yield opened(process.stdout.readline(), process)


def opened(line: str, process: subprocess.Popen[str]) -> PageClient:
    """The page whose URL is in a line."""
    found = _URL.search(line)
    assert found, (line, process.stderr.read() if process.stderr else "")
    client = PageClient(port=int(found[1]), token=found[2], process=process)
    answer = client.ask(f"/?token={client.token}")
    cookie = answer.headers["set-cookie"].partition(";")[0]
    return PageClient(port=client.port, token=client.token, process=process, cookie=cookie)
