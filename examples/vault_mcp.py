"""The vaults as an MCP server over stdin and stdout; agent_mcp.py starts it."""

from __future__ import annotations

import vault as world
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

arguments = world.parse_arguments(__doc__ or "")
vaults = world.write_story(arguments.seed, arguments.manual_tokens).vaults
server = MCPServer("vaults")


@server.tool(description=world.DESCRIPTION)
def open_vault(vault: str, codes: str) -> str:
    try:
        return vaults.open(vault, codes)
    except world.WrongCodeError as error:
        raise ToolError(str(error)) from error


if __name__ == "__main__":
    server.run("stdio")
