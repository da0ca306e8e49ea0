"""An agent whose tools are those of an MCP server (vault_mcp.py), which it starts.

    python examples/agent_mcp.py --url http://127.0.0.1:30000

The server's command is in docs/agents.md. Exits with 1 when a tool call fails.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import vault
from mcp import Client, StdioServerParameters
from openai import AsyncOpenAI

SERVER = Path(__file__).with_name("vault_mcp.py")


async def converse(url: str, story: vault.Story) -> str:
    """Offer the model the server's tools, and let the server run the calls, to the end or to a call
    that fails; returns how it failed."""
    model = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    question, found = story.questions[0], ""
    messages = [
        {"role": "system", "content": story.manual},
        {"role": "user", "content": question},
    ]
    vault.show("user", question)
    # The same options, so that the server has the vaults of the same story.
    command = StdioServerParameters(command=sys.executable, args=[str(SERVER), *sys.argv[1:]])
    async with Client(command) as server:
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                },
            }
            for tool in (await server.list_tools()).tools
        ]
        while found != vault.EMPTY:
            reply = await model.chat.completions.create(
                model=vault.MODEL,
                messages=messages,
                tools=tools,
                temperature=0,
                max_tokens=vault.MAX_ANSWER_TOKENS,
            )
            message = reply.choices[0].message
            messages.append(message.to_dict())
            if not message.tool_calls:
                vault.show("assistant", message.content or "")
                break
            for call in message.tool_calls:
                arguments = json.loads(call.function.arguments)
                vault.show_call(arguments)
                result = await server.call_tool(call.function.name, arguments)
                found = result.content[0].text
                if result.is_error:
                    return found
                vault.show("tool", found)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return ""


def agent(url: str, story: vault.Story) -> None:
    """The conversation; raises WrongCodeError for a call that failed."""
    failure = asyncio.run(converse(url, story))
    if failure:
        raise vault.WrongCodeError(failure)


if __name__ == "__main__":
    sys.exit(vault.run(agent, __doc__ or ""))
