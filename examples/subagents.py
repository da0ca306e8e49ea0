"""Subagents and a branch over one manual, whose KV is computed once.

    python examples/subagents.py --url http://127.0.0.1:30000

Each line says how many tokens of a prompt were in the cache, and how many were computed. Exits
with 1 when a tool call fails.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import vault
from openai import AsyncOpenAI
from openai.types import CompletionUsage

Messages = list[dict[str, Any]]


async def step(client: AsyncOpenAI, story: vault.Story, messages: Messages) -> tuple[Messages, str]:
    """Ask the model once and run its call; returns the longer conversation, and what it took."""
    reply = await client.chat.completions.create(
        model=vault.MODEL,
        messages=messages,
        tools=[{"type": "function", "function": vault.FUNCTION}],
        temperature=0,
        max_tokens=vault.MAX_ANSWER_TOKENS,
    )
    message = reply.choices[0].message
    said, opened = [message.to_dict()], "no vault"
    for call in message.tool_calls or []:
        arguments = json.loads(call.function.arguments)
        found, opened = story.vaults.open(**arguments), arguments["vault"]
        said.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return [*messages, *said], f"{cost(reply.usage)}, opened {opened}"


def cost(usage: CompletionUsage) -> str:
    """Return how many tokens of a prompt were cached, and how many computed. A server without
    --enable-cache-report says nothing of what was cached."""
    details = usage.prompt_tokens_details
    cached = details.cached_tokens if details else 0
    return f"{cached:5} cached {usage.prompt_tokens - cached:5} computed"


async def converse(url: str, story: vault.Story) -> None:
    """The coordinator's first two steps, and what others do with their beginning, side by side."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    manual = {"role": "system", "content": story.manual}
    questions = [{"role": "user", "content": question} for question in story.questions]
    # The coordinator goes first: whoever comes after finds the manual in the cache.
    middle, first = await step(client, story, [manual, questions[0]])
    _, second = await step(client, story, middle)
    others = {
        "subagent 1": [manual, questions[1]],
        "subagent 2": [manual, questions[2]],
        # Back to the middle of the coordinator's conversation, where a note answers this question.
        "branch": [*middle, questions[3]],
    }
    steps = await asyncio.gather(*(step(client, story, asked) for asked in others.values()))
    took = [first, second, *(one for _, one in steps)]
    for name, one in zip(["coordinator", "coordinator", *others], took, strict=True):
        print(f"{name:>11}: {one}")


def agent(url: str, story: vault.Story) -> None:
    """The conversations of all of them."""
    asyncio.run(converse(url, story))


if __name__ == "__main__":
    sys.exit(vault.run(agent, __doc__ or ""))
