"""The kinds of model that kvtier serves, tiny and random, and those that it refuses: what tests run
and docs/models.md lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from kvtier.errors import UnsupportedModelError
from kvtier.heads.model.support import check_supported

VOCAB, WINDOW = 97, 40
# These settings make two of three layers attend to their newest tokens only.
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
}
# The same of one of four: most layers choose what they keep.
MIXED = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
    "sliding_window": WINDOW, "num_hidden_layers": 4,
}  # fmt: skip
# These settings make experts of a model's layers.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# An engine of any kind is started with these. SGLang takes another kernel's layout of gpt-oss's
# weights where it may choose, and wants a processor of pictures where there are some.
ENGINE = {"moe_runner_backend": "triton", "enable_multimodal": False}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip


SEEING = "ForConditionalGeneration"
GEMMA_EYES = {
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
QWEN_EYES = {
    "vision_config": {
        "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "patch_size": 14,
        "out_hidden_size": 64, "fullatt_block_indexes": [0],
    },
    "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}  # fmt: skip
QWEN3_EYE = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "patch_size": 14,
    "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
# Keys turned by a picture's places, too: a time, a row and a column.
PLACES = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}


class Kind(NamedTuple):
    """A kind of model.

    architecture: as transformers' classes are called; extra: of its configuration
    sees:         of a model that sees, too, and whose text this is: what its configuration has
                  beside the text's; empty: it is of text alone
    as_stock:     whether SGLang's own model says something else on a CPU than transformers', with
                  SGLang's own attention, too
    """

    architecture: str
    extra: dict[str, Any] = {}  # noqa: RUF012
    sees: dict[str, Any] = {}  # noqa: RUF012
    as_stock: bool = False


NO_WINDOW = {"sliding_window": None}
KINDS: dict[str, Kind] = {
    "Llama": Kind("Llama"),
    "Llama with tied embeddings": Kind("Llama", {"tie_word_embeddings": True}),
    "Llama 3.1, scaled positions": Kind("Llama", {"rope_parameters": LLAMA3}),
    "Llama with YaRN": Kind("Llama", {"rope_parameters": YARN}),
    "Qwen2, biases on Q, K, V": Kind("Qwen2"),
    "Qwen3, normalised Q and K": Kind("Qwen3"),
    "Qwen3-MoE, experts": Kind("Qwen3Moe", EXPERTS),
    "Mistral without a window": Kind("Mistral", NO_WINDOW),
    "Ministral 3": Kind("Ministral3", NO_WINDOW),
    "Mixtral, experts": Kind("Mixtral", {"num_local_experts": 4, **NO_WINDOW}),
    "OLMoE, experts": Kind("Olmoe", {"num_key_value_heads": 4, **EXPERTS}),
    "Granite": Kind("Granite"),
    "Gemma 1": Kind("Gemma"),
    "Starcoder2": Kind("Starcoder2", NO_WINDOW),
    "GLM-4, keys rotated in neighbouring pairs": Kind("Glm4"),
    "GLM-4.5, experts": Kind("Glm4Moe", {"n_routed_experts": 4, **EXPERTS}),
    "Cohere, keys rotated in neighbouring pairs": Kind("Cohere"),
    "Phi-3": Kind("Phi3"),
    "SmolLM3, some layers without rotation": Kind("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "Seed-OSS, through SGLang's transformers backend": Kind("SeedOss"),
    "GPT-NeoX, through SGLang's transformers backend": Kind("GPTNeoX", {"num_key_value_heads": 4}),
    "ERNIE 4.5, through SGLang's transformers backend": Kind("Ernie4_5"),
    "Gemma 3, windows": Kind("Gemma3", MIXED),
    "Gemma 3 with its vision tower, text": Kind("Gemma3", MIXED, GEMMA_EYES),
    "Qwen2.5-VL, text": Kind("Qwen2_5_VL", {"rope_parameters": PLACES}, QWEN_EYES),
    "Qwen3-VL, text": Kind(
        "Qwen3VL",
        {"rope_parameters": {**PLACES, "mrope_interleaved": True}},
        {**QWEN_EYES, "vision_config": QWEN3_EYE},
    ),
    "OLMo 3, windows": Kind("Olmo3", MIXED, as_stock=True),
    "Cohere 2, windows": Kind("Cohere2", MIXED),
    "gpt-oss, windows, attention sinks, experts": Kind(
        "GptOss",
        {
            **MIXED, "num_local_experts": 4, "num_experts_per_tok": 2,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
}  # fmt: skip
# Those that go on from the tier behind another server.
OVER_A_TIER = (
    "Qwen3-MoE, experts", "Gemma 3, windows", "gpt-oss, windows, attention sinks, experts",
    "GLM-4.5, experts", "Mixtral, experts", "OLMoE, experts", "Cohere 2, windows",
    "Gemma 3 with its vision tower, text", "Qwen2.5-VL, text", "Qwen3-VL, text",
)  # fmt: skip

# Kind -> the configuration class of transformers, or what stands in the file.
REFUSED: dict[str, str | dict[str, Any]] = {
    "Gemma 2": "Gemma2Config",
    "Grok 1": {"architectures": ["Grok1ModelForCausalLM"]},
    "Grok 2": {"architectures": ["Grok1ForCausalLM"], "attn_logit_softcapping": 30.0},
    "Gemma 3n": "Gemma3nTextConfig",
    "Gemma 4": {"head_dim": 256, "global_head_dim": 512},
    "DeepSeek V2": "DeepseekV2Config",
    "DeepSeek V3": "DeepseekV3Config",
    "Kimi K2, nested": {"text_config": {"kv_lora_rank": 512}},
    "Qwen3-Next": "Qwen3NextConfig",
    "Qwen3.5": "Qwen3_5TextConfig",
    "Falcon-H1": "FalconH1Config",
    "LFM2": "Lfm2Config",
    "Mamba": "MambaConfig",
    "Jamba": "JambaConfig",
    "MiniMax": "MiniMaxConfig",
    "RecurrentGemma": "RecurrentGemmaConfig",
    "Ring-linear": {"model_type": "bailing_moe_linear", "layer_group_size": 8},
    "MiniCPM-SALA": {"mixer_types": ["minicpm4", "lightning"]},
    "Llama 4": "Llama4TextConfig",
    "MiniMax-M3": {"sparse_attention_config": {"block": 128}},
    "Mistral with a window": "MistralConfig",
    "MiMo-V2-Flash": {"hybrid_layer_pattern": [0, 1], "v_head_dim": 128, "head_dim": 192},
    "Bloom": {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "alibi": True},
    "MPT": {"architectures": ["MPTForCausalLM"], "attn_config": {"alibi": True}},
    "T5": "T5Config",
    "Llama 3.2 Vision": "MllamaConfig",
    "BERT": "BertConfig",
    "EmbeddingGemma": {"use_bidirectional_attention": True},
    "DeciLM": {"block_configs": [{}]},
}


def configuration(config: str | dict[str, Any]) -> dict[str, Any]:
    """Return what stands in the config.json of a model of these defaults."""
    import transformers

    if isinstance(config, dict):
        return {"architectures": ["X"], "num_attention_heads": 4, "hidden_size": 64, **config}
    made = getattr(transformers, config)()
    name = config.removesuffix("Config") + "ForCausalLM"
    return {**made.to_diff_dict(), "architectures": [name], "model_type": made.model_type}


def obstacle(config: dict[str, Any]) -> str:
    """Return why a configuration is refused, as a user is told; "" where it is not."""
    try:
        check_supported(config, windows=True)
    except UnsupportedModelError as error:
        return str(error).rsplit("(", 1)[1].rstrip(")'")
    return ""


def snapshot(hub: Path, name: str) -> Path:
    """The folder of a model in a cache of the hub's."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    model = hub / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(revision)
    folder = model / "snapshots" / revision
    folder.mkdir(parents=True)
    return folder


def write_model(folder: Path, kind: Kind, **sizes: Any) -> Any:
    """A random model whose attention is far from uniform and whose biases are not zero."""
    import transformers

    usual = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "initializer_range": 0.25, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    # A kind of which there are models that see, too, has a class of its text's configuration.
    names = (f"{kind.architecture}TextConfig", f"{kind.architecture}Config")
    make = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    config, made = make(**{**usual, **kind.extra, **sizes}), "ForCausalLM"
    if kind.sees:
        whole = getattr(transformers, f"{kind.architecture}Config")
        config, made = whole(text_config=config.to_dict(), **kind.sees), SEEING
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = getattr(transformers, kind.architecture + made)(config)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                # SGLang has them in this dtype.
                torch.nn.init.normal_(parameter, mean=1.0)
                parameter.data = parameter.bfloat16().float()
            if name.endswith("embed_tokens.weight") and kind.architecture.startswith("Gemma"):
                # It is scaled by this; so large a model would say what it hears.
                parameter.data /= usual["hidden_size"] ** 0.5
            if name.endswith("bias") or "norm" in name:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    model.save_pretrained(folder)
    if kind.sees is GEMMA_EYES:
        # Published checkpoints and SGLang have these names.
        file, tower = folder / "model.safetensors", "vision_tower."
        weights = {
            name.replace(tower, f"{tower}vision_model."): one
            for name, one in load_file(file).items()
        }
        save_file(weights, file, {"format": "pt"})
    return model.eval()


def served_table() -> str:
    """The kinds that are served, as docs/models.md has them."""
    rows = ["| kind | whole, equal to | compressed, equal to | over a tier |", "|---|---|---|---|"]
    for name, kind in KINDS.items():
        whole = "stock SGLang" if kind.as_stock else "transformers"
        kept = "" if kind.as_stock else "the reference"
        rows.append(f"| {name} | {whole} | {kept} | {'yes' if name in OVER_A_TIER else ''} |")
    return "\n".join(rows)


def refused_table() -> str:
    """The kinds that are refused, by what they are told."""
    kinds: dict[str, list[str]] = {}
    for name, config in REFUSED.items():
        kinds.setdefault(obstacle(configuration(config)), []).append(name.removesuffix(", nested"))
    rows = [f"| {', '.join(names)} | {why} |" for why, names in kinds.items()]
    return "\n".join(["| kind | why |", "|---|---|", *rows])


if __name__ == "__main__":
    print(f"{served_table()}\n\n{refused_table()}")
