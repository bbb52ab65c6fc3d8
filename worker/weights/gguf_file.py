"""Reads a Llama from one GGUF file, in any quantisation the `gguf` library can undo.

GGUF names dimensions the other way round, and its Llama writer reorders the rows of Q and K
so that the pairs RoPE rotates are neighbours; here they go back to Hugging Face's order,
where a pair is `i` and `i + head_dim / 2`.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize

from worker.weights.config import LlamaConfig, UnsupportedModelError, Weights

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"


def read_gguf(path: Path, dtype: torch.dtype) -> Weights:
    """Every tensor of `path`, as `dtype`. Raises UnsupportedModelError."""
    reader = _opened(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    factors = found.pop(_ROPE_FACTORS, None)
    config = _config(
        _scalars(reader),
        vocab_size=_rows(found, "token_embd.weight"),
        tied_head="output.weight" not in found,
        factors=() if factors is None else tuple(_dense(factors).tolist()),
    )
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        dense = _in_hf_order(name, _dense(tensor), config)
        tensors[_hf_name(name)] = torch.from_numpy(dense).to(dtype)
    return Weights(config=config, tensors=tensors)


def count_gguf(path: Path) -> int:
    """Numbers in all tensors of `path`, once they are not quantised. Raises as above."""
    return sum(int(tensor.n_elements) for tensor in _opened(path).tensors)


def _opened(path: Path) -> "_Reader":
    try:
        return _Reader(path)
    except (ValueError, KeyError, IndexError, struct.error) as error:
        raise UnsupportedModelError(f"{path.name} is not a readable GGUF file: {error}") from error


class _Reader(GGUFReader):
    """Passes over arrays. Nobody here needs the vocabulary, and building it takes 2 s."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data = self.data.data
        kind, count = struct.unpack_from("<IQ", data, orig_offs)
        end = orig_offs + struct.calcsize("<IQ")
        if kind in self.gguf_scalar_to_np:
            end += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        elif kind == GGUFValueType.STRING:
            length = struct.Struct("<Q")
            for _ in range(count):
                end += length.size + length.unpack_from(data, end)[0]
        else:
            raise ValueError(f"an array of GGUF type {kind} is not expected")
        return end - orig_offs, [], [], [GGUFValueType.ARRAY]


def _scalars(reader: GGUFReader) -> dict[str, Any]:
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if field.types != [GGUFValueType.ARRAY]
    }


def _config(
    fields: Mapping[str, Any], *, vocab_size: int, tied_head: bool, factors: tuple[float, ...]
) -> LlamaConfig:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModelError(f"GGUF architecture {architecture!r}: only llama is supported")
    if fields.get("split.count", 0) > 1:
        raise UnsupportedModelError("a GGUF split over several files")
    if fields.get("llama.expert_count", 0):
        raise UnsupportedModelError("a GGUF Llama with experts")
    try:
        return _sizes(fields, vocab_size=vocab_size, tied_head=tied_head, factors=factors)
    except KeyError as error:
        raise UnsupportedModelError(f"GGUF metadata lacks {error}") from error
    except (msgspec.ValidationError, ZeroDivisionError, TypeError) as error:
        raise UnsupportedModelError(f"GGUF metadata is not a Llama's: {error}") from error


def _sizes(
    fields: Mapping[str, Any], *, vocab_size: int, tied_head: bool, factors: tuple[float, ...]
) -> LlamaConfig:
    hidden_size = fields["llama.embedding_length"]
    num_heads = fields["llama.attention.head_count"]
    head_dim = fields.get("llama.attention.key_length", hidden_size // num_heads)
    if fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError("RoPE over part of a head")
    if fields.get("llama.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError("keys and values of different length")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling == "linear":
        factors = (fields["llama.rope.scaling.factor"],) * (head_dim // 2)
    elif scaling != "none":
        raise UnsupportedModelError(f"rope scaling {scaling!r} in a GGUF file")
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_layers": fields["llama.block_count"],
        "num_heads": num_heads,
        "num_kv_heads": fields.get("llama.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "context_tokens": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields.get("llama.rope.freq_base", 10_000.0),
        "rope_factors": factors,
        "tied_head": tied_head,
    }
    return msgspec.convert(sizes, LlamaConfig)


def _rows(found: Mapping[str, Any], name: str) -> int:
    if name not in found:
        raise UnsupportedModelError(f"tensor {name} is missing")
    return int(found[name].shape[-1])


def _dense(tensor: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        values: np.ndarray[Any, np.dtype[np.float32]] = dequantize(
            # A memory map's every slice runs Python of its own: 0.5 s over a small model.
            tensor.data.view(np.ndarray),
            tensor.tensor_type,
        )
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise UnsupportedModelError(f"tensor {tensor.name} is quantised as {kind}") from error
    # What is stored as float32 comes back as a window on the file, which is about to close.
    return values if values.flags.writeable else values.copy()


def _in_hf_order(
    name: str, values: np.ndarray[Any, np.dtype[np.float32]], config: LlamaConfig
) -> np.ndarray[Any, np.dtype[np.float32]]:
    heads = {"attn_q.weight": config.num_heads, "attn_k.weight": config.num_kv_heads}
    count = heads.get(name.split(".", 2)[-1])
    if count is None:
        return values
    pairs = values.reshape(count, config.head_dim // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _hf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    block, _, rest = name.partition(".")
    index, _, part = rest.partition(".")
    if block != "blk" or not index.isdecimal() or part not in _LAYER_NAMES:
        raise UnsupportedModelError(f"tensor {name} has no place in a Llama")
    return f"model.layers.{index}.{_LAYER_NAMES[part]}"
