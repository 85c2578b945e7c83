"""The tools of MCP servers, over stdio or streamable HTTP.

Owns: the adapter `mcp`: a session for each episode, its tools, its answers as texts. Does not own:
the protocol (the package `mcp`, of version 1 or 2), how calls are told apart (tool_calls.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ..background_loop import run_in_background
from ..exported_state import export_attributes
from ..tool_calls import ToolCalls, ToolFailed, ToolsLost, ToolTurn, describe_error

_CLOSED = -32000
"""JSON-RPC's code by which `mcp` says that a connection is closed."""


class McpSession:
    """A connection to one server. It is opened and closed by one task, as `mcp` demands."""

    def __init__(self, server: str | Sequence[str], arguments: Mapping[str, Any]) -> None:
        self._server = server
        self._arguments = dict(arguments)
        self._closing: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._session: Any = None

    async def open(self) -> list[dict[str, Any]]:
        """Connect; returns the server's tools as it describes them."""
        self._closing = asyncio.Event()
        opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._hold(opened, self._closing))
        await asyncio.wait([opened, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            raise ConnectionError(f"no session with the MCP server: {find_cause(self._task)}")
        self._session = opened.result()
        return await self._list_tools()

    async def _hold(self, opened: asyncio.Future[Any], closing: asyncio.Event) -> None:
        """Keep the connection open until it is to be closed."""
        mcp = importlib.import_module("mcp")
        async with contextlib.AsyncExitStack() as stack:
            if hasattr(mcp, "Client"):  # since mcp 2: it also speaks protocols without a handshake
                client = await stack.enter_async_context(mcp.Client(self._connect()))
                session = client.session
            else:
                streams = await stack.enter_async_context(self._connect())
                session = await stack.enter_async_context(mcp.ClientSession(streams[0], streams[1]))
                await session.initialize()
            opened.set_result(session)
            await closing.wait()

    def _connect(self) -> Any:
        """The transport, as a context of its two streams."""
        mcp = importlib.import_module("mcp")
        if isinstance(self._server, str):
            return connect_http(self._server, self._arguments.get("headers"))
        command, *words = self._server
        parameters = mcp.StdioServerParameters(
            command=command,
            args=words,
            env=self._arguments.get("env"),
            cwd=self._arguments.get("cwd"),
        )
        return mcp.stdio_client(parameters)

    async def _list_tools(self) -> list[dict[str, Any]]:
        tools: list[dict[str, Any]] = []
        page = as_json(await self._session.list_tools())
        tools += page["tools"]
        while page.get("nextCursor"):
            page = await self._list_page(page["nextCursor"])
            tools += page["tools"]
        return tools

    async def _list_page(self, cursor: str) -> dict[str, Any]:
        parameters = importlib.import_module("mcp").types.PaginatedRequestParams(cursor=cursor)
        return as_json(await self._session.list_tools(params=parameters))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool; returns its answer as text. Raises ToolFailed for an error of the tool,
        ToolsLost where the server is gone.
        """
        assert self._task is not None
        if self._task.done():
            raise ToolsLost("the MCP server ended the session")
        call = asyncio.ensure_future(self._session.call_tool(name, dict(arguments)))
        await asyncio.wait([call, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            raise ToolsLost(f"the MCP server ended during a call of {name!r}")
        returned = as_json(read_reply(call))
        text = write_contents(returned)
        if returned.get("isError"):
            raise ToolFailed(text)
        return text

    async def close(self) -> None:
        """End the session; a server that was started for it ends, too."""
        if self._task is None or self._closing is None:
            return
        self._closing.set()
        await asyncio.wait([self._task])
        self._task.exception()


def connect_http(url: str, headers: Mapping[str, str] | None) -> Any:
    """The transport to a server's URL. headers: of each request."""
    streamable_http = importlib.import_module("mcp.client.streamable_http")
    connect = getattr(streamable_http, "streamable_http_client", None)
    if connect is None:  # its name before mcp 1.24
        return streamable_http.streamablehttp_client(url, headers=headers)
    if not headers:
        return connect(url)
    create_client = importlib.import_module("mcp.shared._httpx_utils").create_mcp_http_client
    return connect(url, http_client=create_client(headers=headers))


def find_cause(task: asyncio.Task[None]) -> str:
    """Why a task ended, as text: of a group of exceptions the first one in it."""
    error = task.exception()
    while getattr(error, "exceptions", ()):
        error = error.exceptions[0]  # type: ignore[union-attr]
    return describe_error(error) if error is not None else "it ended at once"


def read_reply(call: asyncio.Future[Any]) -> Any:
    """What a call returned. Raises ToolFailed for an error that the server answered with."""
    error = call.exception()
    if error is None:
        return call.result()
    details = getattr(error, "error", None)  # of mcp's own exception
    code = getattr(details, "code", None)
    if code is None:
        raise error
    if code == _CLOSED:
        raise ToolsLost(f"the MCP server closed the connection: {error}") from error
    raise ToolFailed(str(error)) from error


def as_json(reply: Any) -> dict[str, Any]:
    """A reply of `mcp` with the names of the protocol, which are the same in its versions."""
    return reply.model_dump(mode="json", by_alias=True)


def write_contents(returned: Mapping[str, Any]) -> str:
    """The texts of a tool's answer, one below the other; other contents by their type."""
    texts: list[str] = []
    for content in returned.get("content") or ():
        if content["type"] == "text":
            texts.append(content["text"])
        elif content["type"] == "resource" and "text" in content["resource"]:
            texts.append(content["resource"]["text"])
        else:
            texts.append(f"({content['type']}, {content.get('mimeType', 'of no type')})")
    return "\n".join(texts)


class McpTools:
    """An episode with a server's tools; over when the model calls none. tools: after `reset`."""

    def __init__(self, server: str | Sequence[str], arguments: Mapping[str, Any]) -> None:
        self._server = server
        self._arguments = arguments
        self._session: McpSession | None = None
        self._calls = ToolCalls({}, {})
        self.tools: list[dict[str, Any]] = []

    async def reset(self, seed: int, row: Mapping[str, Any]) -> None:
        """Open a session of the episode's own: connections do not outlive a fork."""
        await self.close()
        self._session = McpSession(self._server, self._arguments)
        listed = await run_in_background(self._session.open())
        self.tools = [as_function(tool) for tool in listed]
        names = [tool["name"] for tool in listed]
        self._calls = ToolCalls({name: self._bind(name) for name in names}, {}, converts=False)

    def _bind(self, name: str) -> Callable[..., Any]:
        session = self._session
        assert session is not None

        async def call(**arguments: Any) -> str:
            return await run_in_background(session.call(name, arguments))

        return call

    def step(self, message: Mapping[str, Any]) -> ToolTurn | Awaitable[ToolTurn]:
        """Answer the message's calls; done where it has none."""
        return self._calls.answer(message)

    def finish(self, reason: str) -> None:
        """A server has no rewards."""

    def state(self) -> dict[str, Any]:
        """How many calls there were, and how many failed."""
        return export_attributes(self._calls.counts())

    async def close(self) -> None:
        """End the session, if one is open."""
        session, self._session = self._session, None
        if session is not None:
            await run_in_background(session.close())


def as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of MCP as a function of OpenAI's form."""
    function = {"name": tool["name"], "description": tool.get("description") or ""}
    function["parameters"] = tool.get("inputSchema") or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


class McpFactory:
    """Makes episodes with the tools of one server, which are known once a session is open."""

    columns: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(self, server: str | Sequence[str], arguments: Mapping[str, Any]) -> None:
        importlib.import_module("mcp")  # before the fork, once for all episodes
        self._server = server
        self._arguments = arguments

    def make(self) -> McpTools:
        """The session is opened by `reset`."""
        return McpTools(self._server, self._arguments)


def load(target: str | Sequence[str], arguments: Mapping[str, Any]) -> McpFactory:
    """target: a server's URL, or a command's words. arguments: `env` and `cwd` of a command,
    `headers` of a URL.
    """
    return McpFactory(target, arguments)
