"""A tool-using agent in SGLang's frontend language, over a long manual that is cached once.

    python examples/agent_frontend.py --url http://127.0.0.1:30000

The language has no tools: the agent takes the call out of the text, and tells what it found as a
user. The server's command is in docs/agents.md. Exits with 1 when a tool call fails.
"""

from __future__ import annotations

import sys
from typing import Any

import sglang as sgl
import vault
from sglang.lang.chat_template import ChatTemplate, register_chat_template

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
def converse(s: Any, story: vault.Story) -> None:
    """Ask, use the answer as a tool call, and go on with what the tool found."""
    s += sgl.system(story.manual)
    said = story.questions[0]
    while said != vault.EMPTY:
        vault.show("user", said)
        s += sgl.user(said)
        s += sgl.assistant(sgl.gen("call", max_tokens=vault.MAX_ANSWER_TOKENS, temperature=0))
        words = s["call"].split()
        arguments = {"vault": " ".join(words[:2]), "codes": " ".join(words[2:])}
        vault.show_call(arguments)
        said = story.vaults.open(**arguments)
    vault.show("tool", said)


def agent(url: str, story: vault.Story) -> None:
    """The conversation, over a server's own endpoints."""
    converse.run(story=story, backend=sgl.RuntimeEndpoint(url, chat_template_name=TEMPLATE))


if __name__ == "__main__":
    sys.exit(vault.run(agent, __doc__ or ""))
