"""A small Llama-architecture network in plain torch, with Hugging Face weight names.

Training needs two things that the stock class makes awkward: an additive attention bias per
query head (votes and head splits) and positions that jump.  The weights are saved as they are
and load into `transformers.LlamaForCausalLM` and SGLang unchanged; a test holds the logits equal.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class NetConfig:
    """Shape of the network; the defaults are the demo model's."""

    vocab_size: int = 384
    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    intermediate_size: int = 384
    rope_theta: float = 1e10
    rms_norm_eps: float = 1e-6
    max_positions: int = 139264

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def to_hf(self, token_ids: dict[str, int]) -> dict[str, object]:
        """`config.json` of the same network; `token_ids` holds pad/bos/eos."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "torch_dtype": "float32",
            "use_cache": True,
            **token_ids,
        }

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> NetConfig:
        """Inverse of `to_hf`."""
        rope = raw.get("rope_parameters") or raw
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            intermediate_size=raw["intermediate_size"],
            rope_theta=float(rope["rope_theta"]),
            rms_norm_eps=raw["rms_norm_eps"],
            max_positions=raw["max_position_embeddings"],
        )


def rope_tables(config: NetConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each `[*positions.shape, head_dim]` (half-split layout)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    angles = positions.float().unsqueeze(-1) * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to `x` `[..., tokens, head_dim]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@dataclass(frozen=True)
class Split:
    """A head policy inside one training batch.

    anchored:      bool `[layers, kv_heads]`, the CA heads; they attend under the plain bias
    bias:          `[batch, 1, tokens, tokens + 1]` for all other heads; the last column is the
                   compensation entry
    mean_weights:  `[batch, tokens]`, rows sum to 1: how much each token counts in that entry
    """

    anchored: Tensor
    bias: Tensor
    mean_weights: Tensor


class Attention(nn.Module):
    """Grouped-query attention; projections only, the caller chooses how to attend."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        query_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`x` `[batch, tokens, hidden]` → rotated q `[batch, heads, tokens, dim]`, rotated k and v
        `[batch, kv_heads, tokens, dim]`."""
        batch, tokens, _ = x.shape
        dim = self.config.head_dim

        def split(y: Tensor) -> Tensor:
            return y.view(batch, tokens, -1, dim).transpose(1, 2)

        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def output(self, attended: Tensor) -> Tensor:
        """`[batch, heads, tokens, dim]` → `[batch, tokens, hidden]`."""
        batch, _, tokens, _ = attended.shape
        return self.o_proj(attended.transpose(1, 2).reshape(batch, tokens, -1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """Causal attention, or attention under `bias` `[batch|1, 1, tokens, entries]`, which then
        carries the causal mask itself."""
        group = self.config.group_size
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None
        )

    def attend_split(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, split: Split, layer: int
    ) -> Tensor:
        """CA heads under `bias`, the others under `split.bias` with a compensation entry."""
        group = self.config.group_size
        anchored = split.anchored[layer]
        weights = split.mean_weights[:, None, None, :]
        k_local = torch.cat([k[:, ~anchored], weights @ k[:, ~anchored]], dim=2)
        v_local = torch.cat([v[:, ~anchored], weights @ v[:, ~anchored]], dim=2)
        rows = anchored.repeat_interleave(group)
        out = torch.empty_like(q)
        out[:, ~rows] = self.attend(q[:, ~rows], k_local, v_local, split.bias)
        if anchored.any():
            out[:, rows] = self.attend(q[:, rows], k[:, anchored], v[:, anchored], bias)
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q, k, v of the normalised input."""
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream after this layer, given what its heads read."""
        x = x + self.self_attn.output(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embedding, layers and final norm: everything under the `model.` prefix."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Net(nn.Module):
    """The demo model; the output matrix is the embedding matrix."""

    def __init__(self, config: NetConfig | None = None) -> None:
        super().__init__()
        self.config = config or NetConfig()
        self.model = Body(self.config)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    @property
    def layers(self) -> list[Layer]:
        """The transformer layers, first to last."""
        return [cast(Layer, layer) for layer in self.model.layers]

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        bias: Tensor | None = None,
        split: Split | None = None,
    ) -> Tensor:
        """Final hidden states `[batch, tokens, hidden]` of `ids` `[batch, tokens]` at `positions`
        `[batch|1, tokens]`; causal unless `bias` says otherwise."""
        cos, sin = (table.unsqueeze(1) for table in rope_tables(self.config, positions))
        x = self.model.embed_tokens(ids)
        for index, layer in enumerate(self.layers):
            q, k, v = layer.project(x, cos, sin)
            if split is None:
                attended = layer.self_attn.attend(q, k, v, bias)
            else:
                attended = layer.self_attn.attend_split(q, k, v, bias, split, index)
            x = layer.finish(x, attended)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., hidden]` → `[..., vocab]`."""
        return hidden @ self.model.embed_tokens.weight.T

    def forward(self, ids: Tensor) -> Tensor:
        """Logits `[batch, tokens, vocab]` at positions 0, 1, 2, …"""
        return self.logits(self.hidden(ids, torch.arange(ids.shape[1]).unsqueeze(0)))


def save_net(net: Net, folder: Path, token_ids: dict[str, int]) -> None:
    """Write `config.json` and `model.safetensors`; the tied output matrix is not stored twice."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().contiguous() for name, value in net.state_dict().items()}
    # The file is written beside and renamed, so that a reader never sees half a checkpoint.
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")
    config = json.dumps(net.config.to_hf(token_ids), indent=2) + "\n"
    (folder / "config.json").write_text(config)


def load_net(folder: Path) -> Net:
    """Read what `save_net` wrote."""
    from safetensors.torch import load_file

    config = NetConfig.from_hf(json.loads((folder / "config.json").read_text()))
    net = Net(config)
    net.load_state_dict(load_file(folder / "model.safetensors"))
    return net


def describe(config: NetConfig) -> dict[str, object]:
    """The configuration as plain data, for training logs."""
    return asdict(config)
