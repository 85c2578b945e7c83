"""The server's routes: what is asked for by HTTP, and its answer.

Owns: paths, parameters, forms of answers. Does not own: who may ask (guard.py), what is answered
(run_questions.py), the page (static/).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from dataflow.errors import DataflowError
from engine.keep.reader.open_folder import NotServed
from engine.keep.reader.sample_index import ORDERS, SampleQuery
from engine.watch.json_answers import encode_answer
from engine.watch.run_questions import ServedRuns
from engine.watch.series import MOST
from engine.watch.stream import Feeds

STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
_LARGEST_NUMBER = 2**62
Answer = Callable[[ServedRuns, Request], Any]


def application(served: ServedRuns, feeds: Feeds) -> Starlette:
    """Make the application of all routes, behind a Guard."""
    routes = [
        Route("/", _page),
        Route("/static/{path:path}", _static),
        Route("/metrics", _metrics(served)),
        Route("/api/runs/{name}/stream", _stream(served, feeds)),
        Route("/api/runs/{name}/drawing", _drawing(served)),
        *(Route(path, _json(served, answer)) for path, answer in _ANSWERS.items()),
    ]
    handlers: Any = {DataflowError: _answer_error, OSError: _answer_error, 404: _answer_missing}
    return Starlette(routes=routes, exception_handlers=handlers)


_ANSWERS: dict[str, Answer] = {
    "/api/runs": lambda s, r: s.runs(),
    "/api/compare": lambda s, r: s.compare(_names(r, "runs")),
    "/api/runs/{name}": lambda s, r: s.run(_run(r), _number(r, "phase")),
    "/api/runs/{name}/series": lambda s, r: s.series(
        _run(r), _names(r, "names"), _number(r, "from"), _number(r, "to"), _count(r, "points", MOST)
    ),
    "/api/runs/{name}/flow": lambda s, r: s.flow(_run(r), _number(r, "from"), _number(r, "to")),
    "/api/runs/{name}/lanes": lambda s, r: s.lanes(
        _run(r), _count(r, "from", 0), _number(r, "to"), _count(r, "points", 500)
    ),
    "/api/runs/{name}/samples": lambda s, r: s.samples(_run(r), _sample_query(r)),
    "/api/runs/{name}/sample": lambda s, r: s.sample(
        _run(r), *_key(r), _required_number(r, "sample")
    ),
    "/api/runs/{name}/conversation": lambda s, r: s.conversation(
        _run(r), (*_key(r), _required_number(r, "sample")), _count(r, "from", 0)
    ),
    "/api/runs/{name}/tokens": lambda s, r: s.tokens(
        *(_run(r), (*_key(r), _required_number(r, "sample"))),
        *(_count(r, "from", 0), _count(r, "to", _LARGEST_NUMBER)),
    ),
    "/api/runs/{name}/group": lambda s, r: s.group(_run(r), *_key(r)),
    "/api/runs/{name}/same": lambda s, r: s.same(_run(r), *_key(r)),
    "/api/runs/{name}/edge": lambda s, r: s.edge(_run(r), r.query_params.get("id", "")),
    "/api/runs/{name}/node/{node}": lambda s, r: s.node(_run(r), r.path_params["node"]),
    "/api/runs/{name}/log": lambda s, r: s.log(
        _run(r), r.query_params.get("worker"), _count(r, "lines", 200)
    ),
}


def _json(served: ServedRuns, answer: Answer) -> Callable[[Request], Response]:
    """A route of its own, which runs in a thread."""

    def route(request: Request) -> Response:
        body = encode_answer(answer(served, request))
        return Response(body, media_type="application/json")

    return route


def _drawing(served: ServedRuns) -> Callable[[Request], Response]:
    def route(request: Request) -> Response:
        svg = served.drawing(
            _run(request),
            _number(request, "phase"),
            by_worker=request.query_params.get("by") == "worker",
            fold=_fold(request),
        )
        return Response(svg, media_type="image/svg+xml")

    return route


def _fold(request: Request) -> bool | None:
    """Whether chains of nodes are folded; None: as the drawing chooses."""
    choice = request.query_params.get("fold")
    if choice is None:
        return None
    return choice == "1"


def _metrics(served: ServedRuns) -> Callable[[Request], Response]:
    def route(request: Request) -> Response:
        return Response(served.prometheus(), media_type="text/plain; version=0.0.4")

    return route


def _stream(served: ServedRuns, feeds: Feeds) -> Callable[[Request], Any]:
    async def route(request: Request) -> Response:
        name = _run(request)
        watcher = served.watcher(name)
        events = feeds.events(name, watcher.look, request.is_disconnected)
        return StreamingResponse(events, media_type="text/event-stream")

    return route


def _page(request: Request) -> Response:
    return _file("index.html")


def _static(request: Request) -> Response:
    return _file(request.path_params["path"])


def _file(path: str) -> Response:
    """One of the page's own files, found among those that there are."""
    page_files: dict[str, Path] = {}
    for file in STATIC.rglob("*"):
        if file.is_file():
            page_files[str(file.relative_to(STATIC))] = file
    if path not in page_files:
        raise NotServed(f"no file {path[:80]!r} of the page")
    kind = _TYPES.get(page_files[path].suffix, "application/octet-stream")
    return Response(page_files[path].read_bytes(), media_type=kind)


def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, NotServed):
        status = error.status
    else:
        status = 422
    body = encode_answer({"error": str(error)})
    return Response(body, status_code=status, media_type="application/json")


def _answer_missing(request: Request, error: Exception) -> Response:
    return _answer_error(request, NotServed("no such page"))


def _run(request: Request) -> str:
    return request.path_params["name"]


def _names(request: Request, key: str) -> list[str]:
    """A list with commas."""
    parts = request.query_params.get(key, "").split(",")
    return [name for name in dict.fromkeys(parts) if name][:256]


def _number(request: Request, key: str) -> int | None:
    """A whole number >= 0; None if it is not given. Raises NotServed for anything else."""
    text = request.query_params.get(key)
    if text is None or text == "":
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise NotServed(f"{key}: expected a whole number, found {text[:40]!r}", 400)
    return min(int(text), _LARGEST_NUMBER)


def _count(request: Request, key: str, usual: int) -> int:
    number = _number(request, key)
    if number is None:
        return usual
    return number


def _required_number(request: Request, key: str) -> int:
    number = _number(request, key)
    if number is None:
        raise NotServed(f"expected {key}=, found none", 400)
    return number


def _key(request: Request) -> tuple[int, str, int]:
    node = request.query_params.get("node", "")
    return _required_number(request, "step"), node, _required_number(request, "position")


def _sample_query(request: Request) -> SampleQuery:
    parameters = request.query_params
    order = parameters.get("order", "newest")
    if order not in ORDERS:
        orders = ", ".join(ORDERS)
        raise NotServed(f"order: expected one of {orders}, found {order[:40]!r}", 400)
    step = _number(request, "step")
    last = _count(request, "to", _LARGEST_NUMBER)
    if step is not None:
        first, last = step, step
    else:
        first = _count(request, "from", 0)
    return SampleQuery(
        first=first,
        last=last,
        node=parameters.get("node", ""),
        finish=parameters.get("finish", ""),
        q=parameters.get("q", "")[:200],
        order=order,
        offset=_count(request, "offset", 0),
        limit=min(_count(request, "limit", 50), 500),
    )
