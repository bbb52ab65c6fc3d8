"""Reads a Llama from a directory in Hugging Face layout: `config.json` and safetensors.

One file or many: the shard index is not needed, since every shard lists its own tensors.
Pickled weights (`*.bin`) are never read: loading one runs whatever code it holds.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from worker.weights.config import LlamaConfig, UnsupportedModelError, Weights, rope_factors


def read_safetensors(directory: Path, dtype: torch.dtype) -> Weights:
    """Every tensor of `directory`, as `dtype`. Raises UnsupportedModelError."""
    config = _config(directory / "config.json")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UnsupportedModelError(f"no .gguf and no .safetensors file in {directory.name}")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        for name, tensor in _tensors(file, dtype).items():
            if name in tensors:
                raise UnsupportedModelError(f"tensor {name} is in more than one file")
            tensors[name] = tensor
    if config.tied_head:
        tensors.pop("lm_head.weight", None)
    return Weights(config=config, tensors=tensors)


def count_safetensors(directory: Path) -> int:
    """Numbers in all tensors of `directory`, from the files' heads. Raises as above."""
    count = 0
    for file in directory.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as stored:
                shapes = [stored.get_slice(name).get_shape() for name in stored.keys()]  # noqa: SIM118 - not a mapping
        except SafetensorError as error:
            raise UnsupportedModelError(f"{file.name} is not a readable file: {error}") from error
        count += sum(map(math.prod, shapes))
    return count


def _tensors(file: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as stored:
            return {
                # Cloned, since a tensor that keeps its type stays a window on the file.
                name: stored.get_tensor(name).to(dtype, copy=True)
                for name in stored.keys()  # noqa: SIM118 - not a mapping
                # Some exporters store this table, which follows from the config.
                if not name.endswith(".rotary_emb.inv_freq")
            }
    except SafetensorError as error:
        raise UnsupportedModelError(f"{file.name} is not a readable file: {error}") from error


def _config(path: Path) -> LlamaConfig:
    try:
        fields = json.loads(path.read_bytes())
        _refuse(fields)
        return _sizes(fields)
    except FileNotFoundError as error:
        raise UnsupportedModelError(f"no config.json in {path.parent.name}") from error
    except (LookupError, ValueError, TypeError, ArithmeticError, msgspec.ValidationError) as error:
        raise UnsupportedModelError(f"config.json is not a Llama's: {error!r}") from error


def _refuse(fields: Mapping[str, Any]) -> None:
    kind = fields.get("model_type")
    if kind != "llama":
        raise UnsupportedModelError(f"model_type {kind!r}: only llama is supported")
    for flag in ("attention_bias", "mlp_bias", "quantization_config"):
        if fields.get(flag):
            raise UnsupportedModelError(f"{flag} in config.json")
    if fields.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act {fields['hidden_act']!r} in config.json")


def _sizes(fields: Mapping[str, Any]) -> LlamaConfig:
    num_heads = fields["num_attention_heads"]
    head_dim = fields.get("head_dim") or fields["hidden_size"] // num_heads
    # transformers 5 keeps all of RoPE under `rope_parameters`, older ones in two fields.
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or fields.get("rope_theta") or 10_000.0)
    sizes = {
        "vocab_size": fields["vocab_size"],
        "hidden_size": fields["hidden_size"],
        "intermediate_size": fields["intermediate_size"],
        "num_layers": fields["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": fields.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "context_tokens": fields["max_position_embeddings"],
        "rms_norm_eps": fields["rms_norm_eps"],
        "rope_theta": theta,
        "rope_factors": rope_factors(rope, theta=theta, head_dim=head_dim),
        "tied_head": bool(fields.get("tie_word_embeddings", False)),
    }
    return msgspec.convert(sizes, LlamaConfig)
