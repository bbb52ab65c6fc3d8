"""The shape of a Llama model, whatever file it came from.

Hugging Face's `config.json` and GGUF's metadata both end here. A feature that this struct
cannot express is one we cannot run, and is refused by its name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch

_Size = Annotated[int, msgspec.Meta(gt=0)]


class UnsupportedModelError(Exception):
    """The weights are of a kind we cannot run, or broken; the message says which part."""


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Llama. `num_heads` is a multiple of `num_kv_heads` (grouped queries)."""

    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_layers: _Size
    num_heads: _Size
    num_kv_heads: _Size
    head_dim: _Size
    context_tokens: _Size
    rms_norm_eps: float
    rope_theta: float
    # Each rotary frequency is divided by its factor; head_dim / 2 of them, or none at all.
    rope_factors: tuple[float, ...] = ()
    tied_head: bool = False

    def __post_init__(self) -> None:
        """Raises UnsupportedModelError where the sizes do not fit each other."""
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} query heads do not share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"a head of {self.head_dim} has no halves to rotate")
        if self.rope_factors and len(self.rope_factors) != self.head_dim // 2:
            raise UnsupportedModelError(f"{len(self.rope_factors)} rope factors for one head")


@dataclass(frozen=True)
class Weights:
    """Tensors by Hugging Face name. Whoever builds the model may take them out of the dict."""

    config: LlamaConfig
    tensors: dict[str, torch.Tensor]


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a Llama of this config has: Hugging Face name to shape (out, in)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def rope_factors(scaling: Mapping[str, Any], *, theta: float, head_dim: int) -> tuple[float, ...]:
    """Factors of a scaling in Hugging Face terms: none, `linear` or `llama3`.

    `llama3`: frequencies that turn more than `high_freq_factor` times within the original
    context stay, those that turn less than `low_freq_factor` times are divided by `factor`,
    and between the two the divisor is blended (Llama 3.1 model card, reference code).

    Raises:
        UnsupportedModelError: any other kind.
    """
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return ()
    if kind == "linear":
        return (float(scaling["factor"]),) * (head_dim // 2)
    if kind != "llama3":
        raise UnsupportedModelError(f"rope scaling {kind!r}: only linear and llama3 are")
    return tuple(_llama3(scaling, theta ** (-2 * i / head_dim)) for i in range(head_dim // 2))


def _llama3(scaling: Mapping[str, Any], frequency: float) -> float:
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * frequency / (2 * math.pi)
    if turns > high:
        return 1.0
    if turns < low:
        return factor
    kept = (turns - low) / (high - low)
    return 1.0 / (kept + (1.0 - kept) / factor)
