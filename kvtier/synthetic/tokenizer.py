"""A model's own tokenizer, as texts need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.errors import UsageError


class Tokenizer:
    """Text to ids and back, by the tokenizer of a model directory.

    Raises UsageError naming `--model-path` when the directory has no tokenizer that loads.
    """

    def __init__(self, model_path: str) -> None:
        # Seconds to import, and not needed for the recall language.
        from transformers import AutoTokenizer

        self.model_path = model_path
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        except Exception as error:  # the error of a broken file depends on the file
            raise UsageError("--model-path", "a model with a tokenizer", model_path) from error

    @property
    def inner(self) -> Any:
        """The tokenizer of transformers behind this one."""
        return self._tokenizer

    @property
    def first_ids(self) -> tuple[int, ...]:
        """The ids that every plain text begins with: BOS, where there is one."""
        bos = self._tokenizer.bos_token_id
        return () if bos is None else (int(bos),)

    @property
    def added_ids(self) -> tuple[int, ...]:
        """The ids that the tokenizer by itself puts before a text, as servers tokenize prompts:
        BOS, or nothing."""
        whole = list(self._tokenizer("a")["input_ids"])
        plain = self.encode("a")
        for begin in range(len(whole)):
            if whole[begin : begin + len(plain)] == plain:
                return tuple(whole[:begin])
        return ()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text, where the tokenizer says."""
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (int(eos),)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, special tokens only where they are written out."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by their text."""
        added = self._tokenizer.added_tokens_decoder.items()
        return {token.content: int(index) for index, token in added if token.special}

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    @property
    def takes_tool_calls(self) -> bool:
        """Return whether the chat template writes the tools that an assistant's message calls."""
        return "tool_calls" in str(getattr(self._tokenizer, "chat_template", ""))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        answers: bool = True,
    ) -> str:
        """Return a conversation as text, up to where the assistant's next message begins.

        tools: definitions in OpenAI's format; answers: whether the assistant's message comes next.
        Raises UsageError when the template refuses it.
        """
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=answers,
                    # For templates that know them: answers begin at once, and no text has a date.
                    enable_thinking=False,
                    date_string="26 Jul 2024",
                )
            )
        except Exception as error:  # jinja2's, or whatever a template raises by itself
            expected = "a model whose chat template takes these messages"
            raise UsageError("--model-path", expected, f"{self.model_path}: {error}") from error
