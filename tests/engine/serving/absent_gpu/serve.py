"""Two turns of some sessions in SGLang's engine on the device that is asked for; prints JSON."""

import json
import sys


def main() -> None:
    import sglang

    _, model, device, sessions = sys.argv
    engine = sglang.Engine(
        model_path=model,
        device=device,
        dtype="float32",
        attention_backend="kvtier",
        radix_cache_backend="kvtier",
        chunked_prefill_size=128,
        max_total_tokens=2000,
        max_running_requests=4,
        random_seed=0,
        grammar_backend="none",
        skip_server_warmup=True,
        skip_tokenizer_init=True,
        # Smaller batches are padded to it. On a CPU there are no graphs.
        cuda_graph_bs_decode=[4],
        disable_cuda_graph=device == "cpu",
        log_level="warning",
    )
    sampling = {"temperature": 0, "max_new_tokens": 4}
    prompts = [
        [1, *(100 + (i * k) % 150 for i in range(160 + 20 * k))]
        for k in range(1, int(sessions) + 1)
    ]
    first = engine.generate(input_ids=prompts, sampling_params=sampling)
    again = [
        [*prompt, *answer["output_ids"], 2, 120, 130]
        for prompt, answer in zip(prompts, first, strict=True)
    ]
    second = engine.generate(input_ids=again, sampling_params=sampling)
    (internal,) = engine.get_server_info()["internal_states"]
    state = internal["kvtier"]
    answers = [list(one["output_ids"]) for one in (*first, *second)]
    cached = [one["meta_info"]["cached_tokens"] for one in second]
    found = {
        "answers": answers,
        "cached": cached,
        "integrity": state["integrity"],
        "compacted_tokens": state["compacted_tokens"],
        "refreshed_turns": state["tier"].get("refreshed_turns", 0),
    }
    print(json.dumps(found))
    engine.shutdown()


if __name__ == "__main__":
    main()
