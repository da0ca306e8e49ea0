"""The same tool-using agent through the OpenAI-compatible endpoint.

    kvtier serve --model-path models/kvtier-demo --port 30000
    python examples/agent_openai.py --url http://127.0.0.1:30000

Exits with 1 when a tool call fails.
"""

from __future__ import annotations

import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from vault import (
    MAX_ANSWER_TOKENS,
    Story,
    WrongCodeError,
    parse_arguments,
    show,
    user_turn,
    write_story,
)


def converse(client: OpenAI, model: str, story: Story) -> None:
    """Ask, use the answer as a tool call, carry what the tool found into the next turn."""
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": story.manual}]
    note = ""
    for question in story.questions:
        said = user_turn(note, question)
        show("user", said)
        messages.append({"role": "user", "content": said})
        reply = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=MAX_ANSWER_TOKENS
        )
        call = (reply.choices[0].message.content or "").strip()
        show("assistant", call)
        messages.append({"role": "assistant", "content": call})
        note = story.vaults.open(call)
        show("tool", note or "open, and empty")


def main() -> int:
    """Run one conversation."""
    arguments = parse_arguments(__doc__ or "")
    story = write_story(arguments.seed, arguments.manual_tokens)
    with OpenAI(base_url=f"{arguments.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        try:
            converse(client, model, story)
        except WrongCodeError as error:
            show("tool", f"refused: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
