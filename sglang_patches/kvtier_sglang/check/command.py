"""`kvtier check`: what recorded sessions would lose on a server of these settings.

    kvtier check --model-path DIR --transcripts sessions.jsonl --retention 0.25 --min-worth 0.98

Every session runs turn by turn, as recorded, on two engines: one that keeps everything, and one of
the given settings. Their answers are compared: how much of what the context is worth to the
recorded answers is kept, and how many of the tokens and tool calls that full KV makes are made
alike. Exit code 1 says that a figure is below its --min-… bound. kvtier's flags are those of
`kvtier serve`; every other flag goes to SGLang unchanged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from kvtier.config import Settings, load_settings
from kvtier.config.loading import add_flags
from kvtier.config.settings import SETTINGS
from kvtier.errors import UsageError
from kvtier.heads.model.config import located, model_name
from kvtier.synthetic.tokenizer import Tokenizer
from kvtier.traffic.transcripts import ARGUMENT, Transcript, Turn, read_transcripts, turns_of
from kvtier_sglang.check.engines import Kept, Said, as_served, with_full_kv
from kvtier_sglang.check.figures import CalledTool, Document, Figures, TurnResult, figures_of
from kvtier_sglang.check.page import render
from kvtier_sglang.serve import with_defaults

# SGLang's name of the format in which transcripts call tools where a template knows of none.
DEFAULT_PARSER = "hermes"
# The check gives these to its engines itself.
BACKENDS = ("--attention-backend", "--radix-cache-backend")
# Figures with a bound, as in the flags' names.
BOUNDS = {
    "worth": "share of the context's worth",
    "agreement": "share of full KV's tokens",
    "calls": "share of full KV's tool calls",
}
_OWN = (
    "model_path", "revision", "transcripts", "sessions", "parallel", "max_new_tokens",
    "tool_call_parser", *(f"min_{name}" for name in BOUNDS), "json", "html",
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Check and print. Return 0, or 1 where a figure is below its bound. Raises KvtierError for bad
    input."""
    options, flags = _parser().parse_known_args(argv)
    given = vars(options)
    own = {name: given.pop(name) for name in _OWN}
    settings = load_settings(**given)
    model = located(own["model_path"], own["revision"])
    for name in BACKENDS:
        if any(flag.split("=", 1)[0] == name for flag in flags):
            raise UsageError(name, "nothing, as a check runs on kvtier's", "one")
    flags = [flag for flag in with_defaults(flags) if not flag.startswith(BACKENDS)]
    flags.append(f"--model-path={model}")
    if own["tool_call_parser"]:
        flags.append(f"--tool-call-parser={own['tool_call_parser']}")
    if not any(flag.startswith("--log-level") for flag in flags):
        flags.append("--log-level=warning")
    tokenizer = Tokenizer(model)
    transcripts = read_transcripts(own["transcripts"])[: own["sessions"]]
    sessions = [turns_of(one, tokenizer) for one in transcripts]
    if not any(len(turns) > 1 for turns in sessions):
        raise UsageError(ARGUMENT, "a session of at least two answers", str(own["transcripts"]))
    calls = _ToolCalls(transcripts, tokenizer, own["tool_call_parser"] or DEFAULT_PARSER)
    most, parallel = own["max_new_tokens"], own["parallel"]
    said = with_full_kv(flags, settings, sessions, most_tokens=most, parallel=parallel)
    kept = as_served(flags, settings, sessions, said, parallel=parallel)
    results = list(_results(sessions, said, kept, tokenizer, calls))
    document = Document(
        model=model_name(model),
        transcripts=own["transcripts"].name,
        settings=_chosen(settings),
        figures=figures_of(results),
        turns=results,
    )
    if own["json"] is not None:
        own["json"].write_text(document.model_dump_json(indent=1) + "\n")
    if own["html"] is not None:
        own["html"].write_text(render(document))
    print("\n".join(lines_of(document)))
    return _judged(document.figures, {name: own[f"min_{name}"] for name in BOUNDS})


def lines_of(document: Document) -> list[str]:
    """Return the figures for a terminal."""
    found = document.figures
    sessions = len({one.session for one in document.turns})
    longest = max(one.prompt_tokens for one in document.turns)
    return [
        f"{sessions} sessions, {found.turns} turns behind their first, "
        f"contexts of up to {longest:,} tokens",
        f"worth kept    {shown(found.worth)}  of what the context is worth to the recorded answers",
        f"agreement     {shown(found.agreement)}  of the tokens that full KV says",
        f"same answers  {shown(found.answers)}  of full KV's, to their end",
        f"tool calls    {shown(found.calls)}  of {found.tool_calls} that full KV makes; "
        f"of their names {shown(found.names)}",
    ]


def shown(share: float | None) -> str:
    """Return a share for people, a dash where there is none."""
    return "-" if share is None else f"{share:.3f}"


def _judged(figures: Figures, bounds: dict[str, float | None]) -> int:
    """The exit code. What could not be measured is below any bound."""
    code = 0
    for name, bound in bounds.items():
        found = getattr(figures, name)
        if bound is not None and (found is None or found < bound):
            print(f"{name}: {shown(found)} is below {bound:g}", file=sys.stderr)
            code = 1
    return code


def _results(
    sessions: Sequence[Sequence[Turn]], said: Sequence[Sequence[Said]],
    kept: Sequence[Sequence[Kept]], tokenizer: Tokenizer, calls: _ToolCalls,
) -> Iterator[TurnResult]:  # fmt: skip
    for session, (turns, all_said, all_kept) in enumerate(
        zip(sessions, said, kept, strict=True), 1
    ):
        # Turns behind the model's last position were not asked.
        every = zip(turns, all_said, all_kept, strict=False)
        for number, (turn, full, mine) in enumerate(every, 1):
            same = [a == b for a, b in zip(full.said_ids, mine.best_ids, strict=True)]
            alike = len(list(takewhile(bool, same)))
            agreed = len(tokenizer.decode(full.said_ids[:alike]))
            text = tokenizer.decode(full.said_ids)
            yield TurnResult(
                session=session,
                turn=number,
                prompt_tokens=len(turn.prompt_ids),
                held_tokens=full.held_tokens,
                answer_tokens=len(turn.answer_ids),
                full=full.full,
                kept=mine.loss,
                bare=full.bare,
                said_tokens=len(same),
                same_tokens=sum(same),
                same_answer=all(same),
                calls=[
                    CalledTool(name=name, same_name=agreed >= named, same=agreed >= end)
                    for name, named, end in calls.of(text)
                ],
            )


class _ToolCalls:
    """Tool calls in texts, found by SGLang's parser of that name."""

    def __init__(
        self, transcripts: Sequence[Transcript], tokenizer: Tokenizer, parser: str
    ) -> None:
        """Raises UsageError for a parser that SGLang does not have."""
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        known = {
            tool["function"]["name"]: Tool.model_validate(tool)
            for one in transcripts
            for tool in one.tools or ()
        }
        for call in (
            call for one in transcripts for m in one.messages for call in m.tool_calls or ()
        ):
            function = {"name": call.function.name, "parameters": {"type": "object"}}
            tool = {"type": "function", "function": function}
            known.setdefault(call.function.name, Tool.model_validate(tool))
        if parser not in FunctionCallParser.ToolCallParserEnum:
            names = ", ".join(FunctionCallParser.ToolCallParserEnum)
            raise UsageError("--tool-call-parser", f"one of {names}", parser)
        self._tools, self._tokenizer, self._parser = list(known.values()), tokenizer.inner, parser

    def of(self, text: str) -> Iterator[tuple[str, int, int]]:
        """The name of each call, where it ends in the text, and where the call does: at the next
        one's name, or at the text's end."""
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        parser = FunctionCallParser(self._tools, self._parser, self._tokenizer)
        if not parser.has_tool_call(text):
            return
        _, found = parser.parse_non_stream(text)
        ends, at = [], 0
        for call in found:
            # Some formats have no names.
            place = text.find(call.name, at)
            at = at if place < 0 else place + len(call.name)
            ends.append((call.name, at))
        ends.append(("", len(text)))
        for (name, named), (_, end) in pairwise(ends):
            yield name, named, end


def _chosen(settings: Settings) -> dict[str, Any]:
    """The settings that are not at their defaults, without secrets."""
    shown = settings.shown()
    return {one.path: str(shown[one.path]) for one in SETTINGS if one.is_given(settings)}


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtier check", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    own = parser.add_argument_group("the check")
    own.add_argument("--model-path", "--model", required=True, metavar="MODEL")
    own.add_argument("--revision", metavar="NAME", help="of the model, on the hub")
    own.add_argument(
        ARGUMENT, type=Path, required=True, metavar="FILE",
        help="sessions in OpenAI's message format: a JSON list, or one a line; .gz too",
    )  # fmt: skip
    own.add_argument("--sessions", type=_count, metavar="N", help="only the first so many (all)")
    own.add_argument(
        "--parallel", type=_count, default=4, metavar="N", help="sessions at a time (%(default)s)"
    )
    own.add_argument(
        "--max-new-tokens", type=_count, default=128, metavar="N",
        help="of the answers of full KV that are compared (%(default)s)",
    )  # fmt: skip
    own.add_argument(
        "--tool-call-parser", metavar="NAME",
        help=f"SGLang's, of the model's tool calls ({DEFAULT_PARSER})",
    )  # fmt: skip
    for name, about in BOUNDS.items():
        own.add_argument(
            f"--min-{name}", type=_share, metavar="SHARE", help=f"exit with 1 below this {about}"
        )
    own.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    own.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures there")
    add_flags(parser)
    return parser
