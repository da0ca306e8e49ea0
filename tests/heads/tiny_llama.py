"""A tiny random Llama, and its attention done by brute force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvtier.heads.profile import HeadProfile, ModelShape
from kvtier.heads.reference.attention import attending
from kvtier.retention.locality import LocalityRule

WINDOW = 20
# These settings make two of three layers attend to their newest tokens only.
WINDOWS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW, "pad_token_id": 0,
}  # fmt: skip
LAYERS, KV_HEADS, HEADS, VOCAB = 3, 2, 4, 97
SHAPE = ModelShape(num_layers=LAYERS, num_kv_heads=KV_HEADS, num_attention_heads=HEADS, head_dim=16)
RULE = LocalityRule(sink_tokens=5, recent_tokens=7, branch_recent_tokens=3)


def tiny_model(
    architecture: str = "Llama", dtype: torch.dtype = torch.float64, **others: Any
) -> Any:
    """Random weights, large enough that attention is far from uniform."""
    import transformers

    if architecture == "Mistral":
        others["sliding_window"] = None
    # A model that also sees has a class of its text's configuration.
    names = (f"{architecture}TextConfig", f"{architecture}Config")
    others.setdefault("vocab_size", VOCAB)
    config = next(getattr(transformers, name) for name in names if hasattr(transformers, name))(
        hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=16,
        max_position_embeddings=512, initializer_range=0.25, **others,
    )  # fmt: skip
    # The faster ways to compute experts know no float64.
    config._experts_implementation = "eager"
    torch.manual_seed(7)
    return getattr(transformers, f"{architecture}ForCausalLM")(config).to(dtype).eval()


def profile_of(*ca_heads: Sequence[int]) -> HeadProfile:
    return HeadProfile(
        model="tiny", shape=SHAPE, method="by hand", ca_heads=tuple(map(tuple, ca_heads))
    )


def make_ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()


def brute_force_logits(
    model: Any, profile: HeadProfile, turns: Sequence[tuple[int, int, int]], ids: Sequence[int],
    rule: LocalityRule,
) -> Tensor:  # fmt: skip
    """Logits `[tokens, vocab]` of a whole session in one masked forward over one long sequence.

    turns: (start, stop, prompt_stop) of every node; tokens behind the last node are a new turn.
    """
    ends = [stop for _, stop, _ in turns]
    turn_of = [sum(position >= end for end in ends) for position in range(len(ids))]
    gone = [set[int]() for _ in turns]
    for index, (start, stop, prompt_stop) in enumerate(turns):
        span = rule.dropped(start, stop, prompt_stop)
        gone[index] = set(range(start + span.begin, start + span.end))

    def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = torch.empty_like(q)
        group = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            keys, values = k[0, head // group].double(), v[0, head // group].double()
            local = head // group not in profile.ca_heads[layer]
            for row in range(len(ids)):
                past = [g for g in gone[: turn_of[row]] if g and local]
                hidden = set().union(*past)
                see = [t for t in range(row + 1) if t not in hidden]
                rows_k, rows_v = [keys[see]], [values[see]]
                votes = [torch.zeros(len(see))]
                for dropped in past if rule.compensation else []:
                    index = sorted(dropped)
                    rows_k.append(keys[index].mean(0, keepdim=True))
                    rows_v.append(values[index].mean(0, keepdim=True))
                    votes.append(torch.tensor([float(len(index))]).log())
                logits = torch.cat(rows_k) @ q[0, head, row].double() * scale
                weights = torch.softmax(logits + torch.cat(votes), dim=0)
                out[0, head, row] = weights @ torch.cat(rows_v)
        return out

    with torch.inference_mode(), attending(model, attend_layer):
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0]
