"""The traces of real requests behind a fixed prefix, with their answers.

A file of traces has one JSON object a line:

    {"prompt": "...", "answer": "...", "group": "..."}     texts that follow the prefix as they are
    {"messages": [...], "group": "..."}                    a conversation whose system message the
                                                           prefix is (`chat`)

`group` is optional: the wording or the day of a request. Traces of a group are never on both sides
of a split, so that what is measured is not what was learned by heart.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import TracesFileError, UsageError
from kvtier.reading import read_json_lines
from kvtier.synthetic.tokenizer import Tokenizer


@dataclass(frozen=True)
class Trace:
    """One request behind the prefix.

    prompt_ids: what follows the prefix, up to where the answer begins; at least one token
    answer_ids: the answer, or nothing
    group:      traces with the same are alike in wording or time; "" for one of its own
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    group: str = ""

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.answer_ids


@dataclass(frozen=True)
class Traced:
    """A prefix, and requests that begin with it."""

    prefix_ids: tuple[int, ...]
    traces: tuple[Trace, ...]


def read_traces(file: Path, prefix: str, tokenizer: Tokenizer, *, chat: bool = False) -> Traced:
    """A file's traces, behind a prefix's text.

    chat: the prefix is a system message, in whose chat template the requests are.

    Raises TracesFileError, naming the line.
    """
    texts = [
        _texts(where, trace, prefix, tokenizer)
        for where, trace in read_json_lines(file, "--traces", TracesFileError)
    ]
    if not texts:
        raise TracesFileError(str(file), "at least one trace", "none")
    text = system_prefix(prefix, tokenizer) if chat else prefix
    # A chat template writes out what begins a conversation.
    begin = () if chat else tokenizer.added_ids
    return tokenized(texts, text, tokenizer, str(file), begin)


def tokenized(
    texts: Sequence[tuple[str, str, str, str]],
    prefix: str,
    tokenizer: Tokenizer,
    where: str = "traces",
    begin: Sequence[int] = (),
) -> Traced:
    """Traces of texts: (where it is, prompt, answer, group) each, behind the prefix's text. begin:
    tokens before all of them.

    The prefix ends where the tokens of all requests still are those of its own text: a token that
    joins its end with a request's beginning is not part of it. Raises TracesFileError for a request
    that does not begin with the prefix's tokens at all, or has none of its own.
    """
    first = list(begin)
    alone = first + tokenizer.encode(prefix)
    whole = [first + tokenizer.encode(prefix + prompt) for _, prompt, _, _ in texts]
    shared = min([len(alone), *(_common(alone, ids) for ids in whole)])
    if shared <= len(first):
        raise TracesFileError(where, "requests that begin with the prefix's tokens", "none")
    traces = []
    for (place, _, answer, group), ids in zip(texts, whole, strict=True):
        if len(ids) == shared:
            raise TracesFileError(place, "a prompt of at least one token", "")
        answer_ids = tuple(tokenizer.encode(answer)) if answer else ()
        traces.append(Trace(tuple(ids[shared:]), answer_ids, group))
    return Traced(tuple(alone[:shared]), tuple(traces))


def split(
    traces: Sequence[Trace], share: float, seed: int
) -> tuple[tuple[Trace, ...], tuple[Trace, ...]]:
    """Two parts, the second with about `share` of the traces, no group in both.

    Traces without a group are one each, equal prompts the same one. Raises UsageError where there
    are not two groups.
    """
    groups: dict[Any, list[Trace]] = {}
    for trace in traces:
        groups.setdefault(trace.group or trace.prompt_ids, []).append(trace)
    if len(groups) < 2:
        raise UsageError("--traces", "at least two requests that differ", len(groups))
    names = sorted(groups, key=str)
    random.Random(seed).shuffle(names)
    wanted, second = max(1, round(share * len(traces))), list[Trace]()
    while names[1:] and len(second) < wanted:
        second += groups[names.pop()]
    first = [trace for name in names for trace in groups[name]]
    return tuple(first), tuple(second)


def system_prefix(prefix: str, tokenizer: Tokenizer) -> str:
    """The text that conversations with this system message begin with."""
    rendered = [
        tokenizer.render_chat(
            [{"role": "system", "content": prefix}, {"role": "user", "content": user}]
        )
        for user in ("0", "a")
    ]
    return rendered[0][: _common(rendered[0], rendered[1])]


def _texts(
    where: str, trace: dict[str, Any], system: str, tokenizer: Tokenizer
) -> tuple[str, str, str, str]:
    """Return the place of a trace, its prompt, its answer and its group."""
    unknown = sorted(set(trace) - {"prompt", "answer", "group", "messages"})
    if unknown or ("prompt" in trace) == ("messages" in trace):
        expected = "`prompt` (and `answer`) or `messages`, and perhaps `group`"
        raise TracesFileError(where, expected, sorted(trace))
    for name in ("prompt", "answer", "group"):
        if not isinstance(trace.get(name, ""), str):
            raise TracesFileError(f"{where}, {name}", "a text", trace[name])
    group = trace.get("group", "")
    if "prompt" in trace:
        return where, trace["prompt"], trace.get("answer", ""), group
    prompt, answer = _conversation(where, trace["messages"], system, tokenizer)
    return where, prompt, answer, group


def _conversation(where: str, messages: Any, system: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the text of a conversation between the system message and its last answer, and that
    answer."""
    try:
        turns = [(one["role"], one["content"]) for one in messages]
    except (TypeError, KeyError) as error:
        expected = "a list of objects with role and content"
        raise TracesFileError(f"{where}, messages", expected, messages) from error
    roles = [role for role, _ in turns]
    if not turns or any(not isinstance(text, str) for turn in turns for text in turn):
        raise TracesFileError(f"{where}, messages", "turns with texts", messages)
    if "system" in roles:
        raise TracesFileError(f"{where}, messages", "no system message: that is the prefix", roles)
    answer = turns.pop()[1] if roles[-1] == "assistant" else ""
    opening = [{"role": role, "content": text} for role, text in turns]
    rendered = tokenizer.render_chat([{"role": "system", "content": system}, *opening])
    begins = system_prefix(system, tokenizer)
    if not rendered.startswith(begins):
        raise TracesFileError(f"{where}, messages", "a first message of the user", roles)
    return rendered[len(begins) :], answer


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of items that both begin with."""
    for at, (mine, other) in enumerate(zip(a, b, strict=False)):
        if mine != other:
            return at
    return min(len(a), len(b))
