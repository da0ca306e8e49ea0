"""A program that runs a real SGLang engine in its own process:
`python engine_runner.py plan.json out.json`.

plan: {"engine": {...}, "environment"?: {...}, "fault"?: str, "rounds": [[{"input_ids",
"max_new_tokens", "logprobs"?, "logprob_start_len"?, "custom_params"?, "stream"?,
"abort_after"?: tokens, "refused"?: whether an error is its answer}, ...], ...]}
environment: SGLang's variables. fault: of the last rank, see ranks/faulty_ranks.py.
Every round is sent at once (continuous batching). A request may name the round and index it
continues ({"continues": [round, index], "input_ids": tail}): its prompt is then that request's
prompt, its answer, and the tail. Instead of requests a round may be one of these:
    {"weights": model directory}: they are loaded over the ones before and flush the cache
    {"flush": true}
    {"settle": true}: nothing is on its way to the tier any more
    {"memories": [from, to]}: a directory is moved, and the folder of prefix memories read again
out: per round and request the answer, and the final state; of data parallel replicas the first
one's, and all of them.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

# A script does not find it beside itself.
sys.path.append(str(Path(__file__).parents[1]))
from waiting import wait_for_async

ENGINE_DEFAULTS = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "log_level": "error",
    "grammar_backend": "none",
    "max_running_requests": 16,
    "random_seed": 0,
}


async def run_rounds(
    engine: Any, rounds: list[list[dict[str, Any]]], *, replicas: bool
) -> list[list[dict[str, Any]]]:
    finished: list[list[dict[str, Any]]] = []
    for requests in rounds:
        if isinstance(requests, dict):
            if "weights" in requests:
                await _load(engine, requests["weights"])
            elif "memories" in requests:
                finished.append([await _reload(engine, *requests["memories"])])
                continue
            elif "settle" in requests:
                await settled_states(engine)
            else:
                await flush(engine)
            finished.append([])
            continue
        prompts = [_prompt(request, finished) for request in requests]
        asked = zip(prompts, requests, strict=True)
        answers = await asyncio.gather(
            *(_ask(engine, *one) for one in asked), return_exceptions=True
        )
        results = []
        for prompt, request, answer in zip(prompts, requests, answers, strict=True):
            if isinstance(answer, BaseException):
                if not request.get("refused"):
                    raise answer
                results.append({"error": str(answer), "retractions": 0})
            else:
                results.append(_result(prompt, answer))
        finished.append(results)
        if replicas:
            # One request may ask for what another has to store.
            await settled_states(engine)
    return finished


async def _ask(engine: Any, prompt: list[int], request: dict[str, Any]) -> dict[str, Any]:
    """The answer; streamed its last part, and how many tokens each part had."""
    stream = request.get("stream", "abort_after" in request)
    answer = await engine.async_generate(
        input_ids=prompt,
        sampling_params={
            "temperature": request.get("temperature", 0),
            "max_new_tokens": request["max_new_tokens"],
            "ignore_eos": True,
            "custom_params": request.get("custom_params"),
        },
        return_logprob=request.get("logprobs", False),
        lora_path=request.get("adapter"),
        logprob_start_len=request.get("logprob_start_len", -1),
        stream=stream,
    )
    if not stream:
        return answer
    lengths, meta = list[int](), dict[str, Any]()
    async for part in answer:
        # It grows while it is streamed.
        lengths.append(len(part["output_ids"]))
        # The last part says less of a request that is aborted while it waits.
        meta |= part["meta_info"]
        if lengths[-1] >= request.get("abort_after", math.inf):
            engine.tokenizer_manager.abort_request(rid=meta["id"])
    return part | {"parts": lengths, "meta_info": meta}


async def _load(engine: Any, model_path: str) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(model_path=model_path, flush_cache=True)
    success, message, *_ = await engine.tokenizer_manager.update_weights_from_disk(request, None)
    assert success, message


async def _reload(engine: Any, source: str, target: str) -> bool:
    """Return whether the server took what is in its folder of memories now."""
    from sglang.srt.managers.io_struct import SetInternalStateReq

    Path(source).rename(target)
    request = SetInternalStateReq(server_args={"kvtier_reload_memories": 1})
    return all(await engine.tokenizer_manager.set_internal_state(request))


async def flush(engine: Any) -> None:
    """SGLang refuses while a request is being put away, which its answer does not wait for."""

    async def flushed() -> bool:
        return bool((await engine.tokenizer_manager.flush_cache()).success)

    await wait_for_async(flushed, "the cache was not flushed")


def _prompt(request: dict[str, Any], finished: list[list[dict[str, Any]]]) -> list[int]:
    if "continues" not in request:
        return list(request["input_ids"])
    round_index, index = request["continues"]
    earlier = finished[round_index][index]
    return [*earlier["prompt"], *earlier["output_ids"], *request["input_ids"]]


def _result(prompt: list[int], answer: dict[str, Any]) -> dict[str, Any]:
    meta = answer["meta_info"]
    return {
        "prompt": prompt,
        "output_ids": answer["output_ids"],
        "parts": answer.get("parts"),
        "cached_tokens": meta["cached_tokens"],
        "cached_tokens_details": meta["cached_tokens_details"],
        "retractions": meta["num_retractions"],
        "logprobs": [entry[0] for entry in meta.get("output_token_logprobs") or []],
        # An engine with drafts says how many tokens each pass gave that verified some.
        "accept_length": meta.get("spec_accept_length"),
        "prompt_logprobs": [entry[0] for entry in meta.get("input_token_logprobs") or []],
    }


async def settled_states(engine: Any) -> list[dict[str, Any]]:
    """The states, once nothing is on its way to a tier any more that is there."""

    async def settled() -> list[dict[str, Any]]:
        found = await engine.tokenizer_manager.get_internal_state()
        states = [one["kvtier"] for one in found]
        tiers = [state["tier"] for state in states if "tier" in state]
        return [] if any(tier["pending"] and tier["healthy"] for tier in tiers) else states

    return await wait_for_async(settled)


def use(environment: dict[str, str]) -> None:
    """Have SGLang go by these variables of its own."""
    os.environ.update(environment)
    from sglang.srt.managers import scheduler

    # It may have been imported before (tests/forking).
    scheduler.TEST_RETRACT = scheduler.envs.SGLANG_TEST_RETRACT.get()


def play(fault: str | None) -> None:
    """Have something go wrong on the last rank."""
    if fault is not None:
        sys.path.append(str(Path(__file__).with_name("ranks")))
        import faulty_ranks

        faulty_ranks.play(fault)


def main(plan_path: str, out_path: str) -> None:
    import sglang

    plan = json.loads(Path(plan_path).read_text())
    play(plan.get("fault"))
    if plan.get("environment"):
        use(plan["environment"])
    engine = sglang.Engine(**{**ENGINE_DEFAULTS, **plan["engine"]})
    try:
        rounds = engine.loop.run_until_complete(
            run_rounds(engine, plan["rounds"], replicas="dp_size" in plan["engine"])
        )
        states = engine.loop.run_until_complete(settled_states(engine))
    finally:
        engine.shutdown()
    report = {"rounds": rounds, "state": states[0], "states": states}
    Path(out_path).write_text(json.dumps(report, default=int))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
