"""A tool loop with the OpenAI SDK.

    python examples/agent_openai.py --url http://127.0.0.1:30000

The server's command is in docs/agents.md. Exits with 1 when a tool call fails.
"""

from __future__ import annotations

import json
import sys

import vault
from openai import OpenAI


def agent(url: str, story: vault.Story) -> None:
    """Ask the model, run the tools that it calls, and tell it what they found, to the end."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    question, found = story.questions[0], ""
    messages = [
        {"role": "system", "content": story.manual},
        {"role": "user", "content": question},
    ]
    vault.show("user", question)
    while found != vault.EMPTY:
        reply = client.chat.completions.create(
            model=vault.MODEL,
            messages=messages,
            tools=[{"type": "function", "function": vault.FUNCTION}],
            temperature=0,
            max_tokens=vault.MAX_ANSWER_TOKENS,
        )
        message = reply.choices[0].message
        messages.append(message.to_dict())
        if not message.tool_calls:  # as a model does that has something to say
            return vault.show("assistant", message.content or "")
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            vault.show_call(arguments)
            found = story.vaults.open(**arguments)
            vault.show("tool", found)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


if __name__ == "__main__":
    sys.exit(vault.run(agent, __doc__ or ""))
