"""A tool loop with the Anthropic SDK, through SGLang's /v1/messages.

    python examples/agent_anthropic.py --url http://127.0.0.1:30000

The server's command is in docs/agents.md. Exits with 1 when a tool call fails.
"""

from __future__ import annotations

import sys

import vault
from anthropic import Anthropic

TOOL = {
    "name": vault.FUNCTION["name"],
    "description": vault.FUNCTION["description"],
    "input_schema": vault.FUNCTION["parameters"],
}


def agent(url: str, story: vault.Story) -> None:
    """Ask the model, run the tools that it calls, and tell it what they found, to the end."""
    client = Anthropic(base_url=url, api_key="none")
    question, found = story.questions[0], ""
    messages = [{"role": "user", "content": question}]
    vault.show("user", question)
    while found != vault.EMPTY:
        reply = client.messages.create(
            model=vault.MODEL,
            system=story.manual,
            messages=messages,
            tools=[TOOL],
            max_tokens=vault.MAX_ANSWER_TOKENS,
            extra_body={"temperature": 0},  # SGLang takes it; the SDK has no field for it
        )
        messages.append({"role": "assistant", "content": reply.content})
        results = []
        for block in reply.content:
            if block.type == "text":
                vault.show("assistant", block.text)
            if block.type == "tool_use":
                vault.show_call(block.input)
                found = story.vaults.open(**block.input)
                vault.show("tool", found)
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": found})
        if not results:
            return
        messages.append({"role": "user", "content": results})


if __name__ == "__main__":
    sys.exit(vault.run(agent, __doc__ or ""))
