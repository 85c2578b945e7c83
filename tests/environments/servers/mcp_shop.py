"""An MCP server with some tools: over stdio, or with the argument `http` on a free port."""

from __future__ import annotations

import os
import socket
import sys

import uvicorn
from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")


@server.tool()
def add(first: int, second: int) -> int:
    """Adds two numbers."""
    return first + second


@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise ValueError(why)


@server.tool()
def read_variable(name: str) -> str:
    """Reads a variable of the server's."""
    return os.environ.get(name, "absent")


@server.tool()
def crash() -> str:
    """Ends the server."""
    os._exit(3)


def main() -> None:
    """Serve until killed."""
    if sys.argv[1:] != ["http"]:
        server.run()
        return
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    config = uvicorn.Config(server.streamable_http_app(), log_level="warning")
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
