"""The requests of the soak's clients to a server over HTTP, and what they make of its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvtier.errors import KvtierError
from kvtier.synthetic.recall import ANSWER_TOKENS, DEFAULT_LANGUAGE

# A request that takes longer has failed; alone it would take a second.
PATIENCE_S = 180.0
# The time-out of a control call, such as an update of the weights, which waits for requests under
# way.
CONTROL_S = 300.0


@dataclass(frozen=True)
class Asked:
    """One request. scope: `extra_key`, `cache_salt` and `lora_path`, as far as there are any;
    prompt_logprobs: from the prompt's first token on."""

    rid: str
    prompt: tuple[int, ...]
    scope: dict[str, str] = field(default_factory=dict)
    stream: bool = False
    prompt_logprobs: bool = False

    def body(self) -> dict[str, Any]:
        """Return the body for /generate: a greedy answer with its log-probabilities."""
        return {
            "rid": self.rid,
            "input_ids": list(self.prompt),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": ANSWER_TOKENS,
                "stop_token_ids": [DEFAULT_LANGUAGE.eot],
            },
            "return_logprob": True,
            "logprob_start_len": 0 if self.prompt_logprobs else -1,
            "stream": self.stream,
            **self.scope,
        }


@dataclass(frozen=True)
class Said:
    """A whole answer. logprobs: of its tokens; prompt_logprobs: of the prompt's tokens from the
    second on, where they were asked for; cached: tokens of the prompt that were not computed, of
    which `restored` came from the tier; retracted: how often it had to begin again; version: of
    the weights."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float, ...]
    cached: int
    restored: int
    retracted: int
    version: str


class RequestFailedError(KvtierError):
    """A request that did not end with a whole answer, or a call that was not obeyed."""


def read_answer(asked: Asked, answer: Any) -> Said:
    """Raises RequestFailedError where it is not a whole answer of one version of the weights."""
    try:
        meta, tokens = answer["meta_info"], tuple(answer["output_ids"])
        kind = meta["finish_reason"]["type"]
        versions = {span["version"] for span in meta["weight_versions"]}
        logprobs = tuple(entry[0] for entry in meta["output_token_logprobs"])
        prompt = meta.get("input_token_logprobs") or ()
        details = meta.get("cached_tokens_details") or {}
        said = Said(
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=tuple(entry[0] for entry in prompt[1:])
            if asked.prompt_logprobs
            else (),
            cached=meta["cached_tokens"],
            restored=details.get("host", 0) + details.get("storage", 0),
            retracted=meta["num_retractions"],
            version=meta["weight_version"],
        )
    except (KeyError, TypeError, IndexError) as error:
        raise RequestFailedError(f"not an answer ({error!r}): {str(answer)[:300]}") from None
    stopped = kind == "stop" and tokens[-1:] == (DEFAULT_LANGUAGE.eot,)
    if not stopped and not (kind == "length" and len(tokens) == ANSWER_TOKENS):
        raise RequestFailedError(
            f"it ended with {meta['finish_reason']} after {len(tokens)} tokens"
        )
    if len(logprobs) != len(tokens) or versions != {said.version}:
        raise RequestFailedError(f"{len(logprobs)} log-probabilities, weights {sorted(versions)}")
    if asked.prompt_logprobs and len(said.prompt_logprobs) != len(asked.prompt) - 1:
        raise RequestFailedError(f"{len(said.prompt_logprobs)} log-probabilities of its prompt")
    return said


class Server:
    """A server's HTTP API. session: shared by all servers of the soak."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self._session = url, session

    async def generate(self, asked: Asked) -> Said:
        """Raises RequestFailedError."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                if asked.stream:
                    answer: Any = None
                    async with self.streaming(asked) as chunks:
                        async for chunk in chunks:
                            answer = chunk
                else:
                    answer = await self.post("/generate", asked.body())
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            raise RequestFailedError(f"{type(error).__name__}: {error}") from None
        return read_answer(asked, answer)

    @asynccontextmanager
    async def streaming(self, asked: Asked) -> AsyncIterator[AsyncIterator[Any]]:
        """The answer so far, again and again. Leaving the block hangs up."""
        async with self._session.post(f"{self.url}/generate", json=asked.body()) as response:
            if response.status != 200:
                raise RequestFailedError(f"{response.status}: {(await response.text())[:300]}")
            yield _events(response)

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer, or its text. Raises RequestFailedError where there is none, and for any
        status but 200."""
        try:
            async with self._session.post(self.url + path, json=body or {}) as response:
                text, status = await response.text(), response.status
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailedError(f"{path}: {type(error).__name__}: {error}") from None
        if status != 200:
            raise RequestFailedError(f"{path}: {status}: {text[:300]}")
        try:
            return json.loads(text)
        except ValueError:
            return text

    async def abort(self, rid: str) -> None:
        """End a request that another task waits for."""
        await self.post("/abort_request", {"rid": rid})

    async def load_weights(self, path: str, version: str) -> None:
        """Other weights, and nothing cached of those before. Raises RequestFailedError."""
        body = {"model_path": path, "flush_cache": True, "weight_version": version}
        async with asyncio.timeout(CONTROL_S):
            answer = await self.post("/update_weights_from_disk", body)
        if not answer["success"]:
            raise RequestFailedError(f"the weights were not updated: {answer['message']}")

    async def flush(self) -> None:
        """Drop everything that is cached. Raises RequestFailedError while it serves requests."""
        async with asyncio.timeout(CONTROL_S):
            await self.post("/flush_cache?timeout=30")

    async def state(self) -> dict[str, Any]:
        """Return what kvtier says of itself on an engine. Raises RequestFailedError."""
        try:
            async with asyncio.timeout(CONTROL_S):
                async with self._session.get(f"{self.url}/server_info") as response:
                    info = await response.json()
            found: dict[str, Any] = info["internal_states"][0]["kvtier"]
        except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
            raise RequestFailedError(f"/server_info: {type(error).__name__}: {error}") from None
        return found


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """The objects of a stream of server-sent events."""
    async for line in response.content:
        text = line.strip()
        if text.startswith(b"data:") and not text.endswith(b"[DONE]"):
            yield json.loads(text[5:])
