"""A page in Chromium that fails its test for what no page may do.

Owns: the browser's start, what is noted of a page. Does not own: the server (page_client.py).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

from tests.browser.synthetic import BEGAN
from tests.kit.page_client import PageClient

WIDE, NARROW = 1400, 400
_NOW = BEGAN + 3600.0
_NO_HOST = ("data", "blob", "about")
_AWAY = re.compile(
    r"ERR_(CONNECTION_|SOCKET_NOT_CONNECTED|EMPTY_RESPONSE|INCOMPLETE_CHUNKED|CONTENT_LENGTH)"
    r"|status of 403"
)
"""What a browser says while the server is away, died within an answer, or has another token."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium without windows; a test fails, and is not skipped, where there is none."""
    path = shutil.which("chromium-headless-shell")
    if path is None:
        pytest.fail("these tests need Chromium: scripts/chromium installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--font-render-hinting=none"]
        )
        yield browser
        browser.close()


@dataclass(slots=True, kw_only=True)
class Watched:
    """A page of a server. faults: what it did that no page may do."""

    page: Page
    server: PageClient
    faults: list[str] = field(default_factory=list)
    away: bool = False
    """Whether the server may be away: requests that fail are no faults then."""

    def enter(self) -> None:
        """Open the URL with the token, as it was printed."""
        self.page.goto(self.server.entry)

    def go(self, *parts: str) -> Page:
        """Show an address such as `run`, `steady`, `edge`, `a->b`."""
        way = "/".join(quote(part, safe=",") for part in parts)
        self.page.goto(f"{self.server.base}#/{way}")
        return self.page

    def settle(self) -> None:
        """Wait until nothing is asked for and the fonts are there, then for two frames."""
        self.page.wait_for_load_state("networkidle")
        self.page.evaluate(
            "document.fonts.ready.then(() => new Promise("
            "(done) => requestAnimationFrame(() => requestAnimationFrame(() => done()))))"
        )

    def told(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not (self.away and _AWAY.search(message.text)):
            self.faults.append(f"console {message.type}: {message.text}")

    def asked(self, request: Request) -> None:
        url = urlsplit(request.url)
        if url.scheme not in _NO_HOST and url.netloc != urlsplit(self.server.base).netloc:
            self.faults.append(f"a request to another host: {request.url}")


@contextmanager
def watched(
    browser: Browser, server: PageClient, *, width: int = WIDE, scheme: str = "light"
) -> Iterator[Watched]:
    """A page that was entered with the token, its clock at one moment and without animations.

    It fails the test for an error on its console, an exception, or a request to another host.
    """
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
        timezone_id="UTC",
        locale="en-US",
    )
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.clock.set_fixed_time(_NOW)
    found = Watched(page=page, server=server)
    page.on("console", lambda message: found.told(message))
    page.on("pageerror", lambda error: found.faults.append(f"an exception: {error.stack}"))
    page.on("request", lambda request: found.asked(request))  # routes would slow each down
    found.enter()
    yield found
    context.close()
    assert not found.faults, "\n".join(found.faults)
