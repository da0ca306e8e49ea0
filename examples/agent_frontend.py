"""A tool-using agent in SGLang's frontend language, over a long manual that is cached once.

    kvtier serve --model-path models/kvtier-demo --port 30000
    python examples/agent_frontend.py --url http://127.0.0.1:30000

Exits with 1 when a tool call fails.
"""

from __future__ import annotations

import sys
from typing import Any

import sglang as sgl
from sglang.lang.chat_template import ChatTemplate, register_chat_template
from vault import (
    MAX_ANSWER_TOKENS,
    Story,
    WrongCodeError,
    parse_arguments,
    show,
    user_turn,
    write_story,
)

TEMPLATE = "kvtier-demo"

register_chat_template(
    ChatTemplate(
        name=TEMPLATE,
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("<bos> ", " "),
            "user": ("<user> ", " "),
            "assistant": ("<assistant> ", " <eot> "),
        },
    )
)


@sgl.function
def agent(s: Any, story: Story) -> None:
    """Ask, use the answer as a tool call, carry what the tool found into the next turn."""
    s += sgl.system(story.manual)
    note = ""
    for number, question in enumerate(story.questions):
        said = user_turn(note, question)
        s += sgl.user(said)
        s += sgl.assistant(sgl.gen(f"call_{number}", max_tokens=MAX_ANSWER_TOKENS, temperature=0))
        call = s[f"call_{number}"].strip()
        show("user", said)
        show("assistant", call)
        note = story.vaults.open(call)
        show("tool", note or "open, and empty")


def main() -> int:
    """Run one conversation."""
    arguments = parse_arguments(__doc__ or "")
    endpoint = sgl.RuntimeEndpoint(arguments.url, chat_template_name=TEMPLATE)
    story = write_story(arguments.seed, arguments.manual_tokens)
    try:
        agent.run(story=story, backend=endpoint)
    except WrongCodeError as error:
        show("tool", f"refused: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
