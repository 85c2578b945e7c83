"""Who may ask: only this user's browser, with the token, from the page itself.

Owns: the token and its cookie, the refusal of other hosts and origins, the headers of every answer.
Does not own: any answer.

A page of another site can make the browser send requests to loopback, and a name of its own lead
there (DNS rebinding): both are told by their headers. What they cannot have is the cookie, which is
kept from them (SameSite=Strict), nor the token, which a program may send as a bearer's.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

import msgspec

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline';"
        " script-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
"""Of every answer. Styles may be inline, since drawings have theirs in them; scripts may not."""
_SAME = ("", "same-origin", "none")
"""Values of Sec-Fetch-Site: from the page itself, or typed by the user."""


def new_token() -> str:
    """128 random bits, as text for a URL."""
    return secrets.token_urlsafe(16)


class Guard:
    """Lets requests through to `app` that may ask, and adds HEADERS to every answer.

    port: of the server, known once it is bound. first: where the token's redirect leads.
    """

    def __init__(self, app: App, *, token: str, port: int, first: str = "/") -> None:
        self._app = app
        self._token = token
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._origins = {f"http://{host}" for host in self._hosts}
        self._cookie = f"dataflow-{port}"  # cookies are of a host, whatever its port
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers: dict[str, str] = {}
        for name, content in scope["headers"]:
            headers[name.decode("latin-1")] = content.decode("latin-1")
        refusal = self._find_refusal(scope, headers)
        if refusal is not None:
            await _answer(send, *refusal)
        elif self._is_token(scope):
            cookie = f"{self._cookie}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            more = {"location": self._first, "set-cookie": cookie}
            await _answer(send, 303, "", more)
        elif not (self._has_cookie(headers) or self._has_bearer(headers)):
            await _answer(send, 403, "open the URL with the token that dataflow watch has printed")
        else:
            await self._app(scope, receive, _with_headers(send))

    def _find_refusal(self, scope: Scope, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """(status, why) of a request that nobody of this page makes."""
        if scope["method"] != "GET":
            return 405, "only GET"
        if headers.get("host", "").lower() not in self._hosts:
            return 403, "another host"
        origin = headers.get("origin")  # a page's own requests may come without it
        if origin is not None and origin.lower() not in self._origins:
            return 403, "another origin"
        if headers.get("sec-fetch-site", "").lower() not in _SAME:
            return 403, "another site"
        return None

    def _is_token(self, scope: Scope) -> bool:
        if scope["path"] != "/":
            return False
        query = parse_qs(scope["query_string"].decode("latin-1"))
        first_token = query.get("token", [""])[0]
        return self._is_our_token(first_token)

    def _has_cookie(self, headers: Mapping[str, str]) -> bool:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return cookie is not None and self._is_our_token(cookie.value)

    def _has_bearer(self, headers: Mapping[str, str]) -> bool:
        """Whether the token is in a header, as Prometheus sends it. A page of another site cannot
        send one, as nothing allows it to.
        """
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._is_our_token(token.strip())

    def _is_our_token(self, token: str) -> bool:
        # In the same time however much of it is right, so that it cannot be guessed in parts.
        return hmac.compare_digest(token.encode(), self._token.encode())


def _encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    encoded: list[tuple[bytes, bytes]] = []
    for name, content in headers.items():
        encoded.append((name.encode("latin-1"), content.encode("latin-1")))
    return encoded


def _with_headers(send: Send) -> Send:
    async def send_more(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = list(message["headers"])
            sent_names = {name.lower() for name, _ in headers}
            for name, content in _encode_headers(HEADERS):
                if name not in sent_names:
                    headers.append((name, content))
            message = {**message, "headers": headers}
        await send(message)

    return send_more


async def _answer(
    send: Send, status: int, error: str, more: Mapping[str, str] | None = None
) -> None:
    if error:
        body = msgspec.json.encode({"error": error})
    else:
        body = b""
    headers = {**HEADERS, "content-type": "application/json", **(more or {})}
    headers["content-length"] = str(len(body))
    start = {"type": "http.response.start", "status": status, "headers": _encode_headers(headers)}
    await send(start)
    await send({"type": "http.response.body", "body": body})
