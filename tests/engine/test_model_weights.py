"""What can be loaded, and what is refused by name."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_llama import TinyLlama, weights, write_gguf, write_hf
from worker.weights import UnsupportedModelError, load_weights
from worker.weights.config import rope_factors

TINY = TinyLlama(hidden=64, heads=4, kv_heads=2, head_dim=16, vocab=300)
# Half a step of the quantisation, over weights of about one standard deviation of 0.125.
TOLERANCES = {"F32": 0.0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 5e-3, "Q4_1": 0.06}


@pytest.mark.parametrize("kind", TOLERANCES)
def test_gguf_tensors_come_back_in_hugging_face_names_and_order(tmp_path: Path, kind: Any) -> None:
    loaded = load_weights(write_gguf(tmp_path / "m.gguf", TINY, kind=kind), torch.float32)
    expected = weights(TINY)
    assert loaded.tensors.keys() == expected.keys()
    scale = 8 if kind != "F32" else 1  # the embedding's deviation is 1, of the rest 0.125
    for name, array in expected.items():
        limit = TOLERANCES[kind] * (scale if "embed" in name else 1)
        torch.testing.assert_close(
            loaded.tensors[name], torch.from_numpy(array), atol=limit, rtol=limit, msg=name
        )


@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors_in_one_file_or_many(tmp_path: Path, shards: int) -> None:
    loaded = load_weights(write_hf(tmp_path, TINY, shards=shards), torch.float32)
    for name, array in weights(TINY).items():
        assert torch.equal(loaded.tensors[name], torch.from_numpy(array)), name


def test_both_formats_agree_on_the_config(tmp_path: Path) -> None:
    model = TinyLlama(tied=True, rope_theta=500_000.0, kv_heads=1, context=777)
    from_hf = load_weights(write_hf(tmp_path / "hf", model), torch.bfloat16)
    from_gguf = load_weights(write_gguf(tmp_path / "g" / "m.gguf", model).parent, torch.bfloat16)
    left, right = from_hf.config, from_gguf.config
    assert left.tied_head
    assert right.rms_norm_eps == pytest.approx(left.rms_norm_eps)  # GGUF keeps it as float32
    fields = [f for f in left.__struct_fields__ if f != "rms_norm_eps"]
    assert [getattr(left, f) for f in fields] == [getattr(right, f) for f in fields]


def test_weights_are_converted_and_do_not_need_their_file_any_more(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY)
    loaded = load_weights(path, torch.bfloat16)
    kept = {name: tensor.clone() for name, tensor in loaded.tensors.items()}
    path.write_bytes(b"\0" * path.stat().st_size)
    assert all(torch.equal(loaded.tensors[name], kept[name]) for name in kept)
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}


def _change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope scaling 'yarn'"),
        ({"num_key_value_heads": 3}, "4 query heads do not share 3 KV heads"),
        ({"head_dim": 15}, "a head of 15"),
        ({"hidden_size": 128}, r"is \(300, 64\), not \(300, 128\)"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\.\S+ is missing"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\.\S+ has no place"),
        ({"vocab_size": ...}, "vocab_size"),
        ({"num_attention_heads": 0}, r"config\.json is not a Llama's"),
        ({"intermediate_size": -1}, r"config\.json is not a Llama's"),
        ({"hidden_size": "wide"}, r"config\.json is not a Llama's"),
    ],
)
def test_hugging_face_files_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    _change_config(write_hf(tmp_path, TINY), **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        load_weights(tmp_path, torch.float32)


def _change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): t for name, t in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_infinities_are_refused(tmp_path: Path) -> None:
    norm = torch.ones(64)
    norm[3] = torch.inf
    _change_tensors(write_hf(tmp_path, TINY), model__norm__weight=norm)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight .* not finite"):
        load_weights(tmp_path, torch.float32)


def test_tensors_that_follow_from_the_config_are_passed_over(tmp_path: Path) -> None:
    write_hf(tmp_path, TinyLlama(tied=True, vocab=300))
    _change_tensors(
        tmp_path,
        lm_head__weight=torch.randn(300, 64),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.randn(8),
    )
    assert len(load_weights(tmp_path, torch.float32).tensors) == 2 + 2 * 9


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write_hf(tmp_path, TINY)
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "zz.safetensors")
    with pytest.raises(UnsupportedModelError, match="more than one file"):
        load_weights(tmp_path, torch.float32)


def test_broken_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no config\.json"):
        load_weights(tmp_path, torch.float32)
    write_hf(tmp_path / "hf", TINY)
    weights_file = tmp_path / "hf" / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:1000])
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors is not a readable file"):
        load_weights(tmp_path / "hf", torch.float32)
    weights_file.unlink()
    with pytest.raises(UnsupportedModelError, match=r"no \.gguf and no \.safetensors"):
        load_weights(tmp_path / "hf", torch.float32)


@pytest.mark.parametrize("size", [0, 3, 50, 3000])
def test_a_gguf_file_cut_short_is_refused(tmp_path: Path, size: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf is not a readable GGUF file"):
        load_weights(path, torch.float32)


def test_two_gguf_files_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", TINY)
    write_gguf(tmp_path / "b.gguf", TINY)
    with pytest.raises(UnsupportedModelError, match=r"a\.gguf, b\.gguf"):
        load_weights(tmp_path, torch.float32)


def _write_gguf(path: Path, architecture: str = "llama", **fields: Any) -> Path:
    """A GGUF header with a llama's usual fields, or others, and tensors of the right names."""
    writer = gguf.GGUFWriter(path, architecture)
    usual = {
        "embedding_length": 8,
        "block_count": 1,
        "feed_forward_length": 8,
        "context_length": 64,
        "attention.head_count": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    for name, value in (usual | fields).items():
        if isinstance(value, str):
            writer.add_string(f"llama.{name}", value)
        elif isinstance(value, float):
            writer.add_float32(f"llama.{name}", value)
        elif value is not None:
            writer.add_uint32(name if "split" in name else f"llama.{name}", value)
    shapes = {"token_embd": (9, 8), "output_norm": (8,), "rope_freqs": (2,)}
    shapes |= {f"blk.0.{norm}_norm": (8,) for norm in ("attn", "ffn")}
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": (8, 8) for name in square}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.full(shape, 2.0, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_rope_factors_come_from_a_tensor_or_from_a_linear_scaling(tmp_path: Path) -> None:
    plain = load_weights(_write_gguf(tmp_path / "a.gguf"), torch.float32).config
    assert plain.rope_factors == (2.0, 2.0)
    assert (plain.num_kv_heads, plain.head_dim, plain.rope_theta) == (2, 4, 10_000.0)
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    scaled = load_weights(_write_gguf(tmp_path / "b.gguf", **scaling), torch.float32).config
    assert scaled.rope_factors == (4.0, 4.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"split.count": 2}, "split"),
        ({"expert_count": 8}, "experts"),
        ({"context_length": None}, r"lacks 'llama\.context_length'"),
        ({"attention.head_count": 0}, "metadata is not a Llama's"),
        ({"feed_forward_length": 0}, "metadata is not a Llama's"),
        ({"rope.dimension_count": 2}, "part of a head"),
        ({"attention.value_length": 2}, "different length"),
        ({"rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"attention.key_length": 6, "attention.value_length": 6}, "rope factors"),
    ],
)
def test_gguf_files_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load_weights(_write_gguf(tmp_path / "m.gguf", **fields), torch.float32)


def test_a_gguf_file_without_tensors_or_with_nested_arrays_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"token_embd\.weight is missing"):
        load_weights(tmp_path / "m.gguf", torch.float32)
    header = (tmp_path / "m.gguf").read_bytes()
    name, array = b"odd", (9, 9, 1)  # an array of arrays, one of them
    odd = struct.pack("<Q3sIIQ", len(name), name, *array)
    (tmp_path / "m.gguf").write_bytes(header[:16] + struct.pack("<Q", 1) + odd + bytes(64))
    with pytest.raises(UnsupportedModelError, match="array of GGUF type 9"):
        load_weights(tmp_path / "m.gguf", torch.float32)


def test_llama3_scaling_in_each_of_its_three_ranges() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 100,
    }
    factors = rope_factors(scaling, theta=10_000.0, head_dim=8)
    # They turn 15.9, 1.59, 0.159 and 0.0159 times within 100 positions.
    assert (factors[0], factors[2], factors[3]) == (1.0, 8.0, 8.0)
    assert factors[1] == pytest.approx(1 / (0.1972 + 0.8028 / 8), rel=1e-3)
    assert rope_factors({"type": "linear", "factor": 2}, theta=1e4, head_dim=4) == (2.0, 2.0)
    assert rope_factors({}, theta=1e4, head_dim=4) == ()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("blk.0.attn_q.bias", np.ones(8, np.float32), r"blk\.0\.attn_q\.bias has no place"),
        ("output_norm.weight", np.ones(8, np.int8), r"output_norm\.weight is quantised as I8"),
    ],
)
def test_a_gguf_tensor_we_cannot_use_is_refused(
    tmp_path: Path, name: str, data: Any, message: str
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for size in ("embedding_length", "block_count", "feed_forward_length", "context_length"):
        writer.add_uint32(f"llama.{size}", 8)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.ones((8, 8), dtype=np.float32))
    writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=message):
        load_weights(tmp_path / "m.gguf", torch.float32)
