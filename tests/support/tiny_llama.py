"""Makes tiny random Llama checkpoints on the spot, as Hugging Face files and as GGUF.

Real files with a real byte-level BPE tokenizer, only small and untrained. The same shape and
seed give the same weights in both formats. Needs numpy, safetensors, tokenizers, gguf; no torch.
"""

import functools
import json
from pathlib import Path
from typing import Any, Literal

import gguf
import msgspec
import numpy as np
import safetensors
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

Array = np.ndarray[Any, np.dtype[np.float32]]

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LINES = (
    "The headworks of a waterway admit, measure and divert the flow to the turbines.",
    "What is the capital of France? The capital of France is Paris.",
    "def settle(reserved: int, used: int) -> int:\n    return max(0, reserved - used)\n",
    "It's 2024, isn't it? They've 1,234.56 reasons; we'll see, I'd say.",
    "안녕하세요. 오늘 날씨가 좋네요. 한국어 문장도 토큰으로 나뉩니다.",
    '{"role": "user", "content": "hello world, hello again"}',
    "user\nassistant\nsystem\nYou are a helpful assistant.\n",
)


class TinyLlama(msgspec.Struct, frozen=True, kw_only=True):
    """A model's shape. `vocab` counts embedding rows: the tokenizer fills at most as many."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 128
    vocab: int = 512
    context: int = 512
    tied: bool = False
    seed: int = 0
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5


def write_hf(
    directory: Path,
    model: TinyLlama | None = None,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    shards: int = 1,
    template: str | None = CHATML,
) -> Path:
    """A directory in Hugging Face layout; returns it."""
    model = model or TinyLlama()
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config(model, dtype))
    ends = {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2}
    _write_json(directory / "generation_config.json", ends)
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(model, template))
    tiny_tokenizer(model.vocab).save(str(directory / "tokenizer.json"))
    _write_safetensors(directory, weights(model), dtype, shards)
    return directory


def write_gguf(
    path: Path,
    model: TinyLlama | None = None,
    *,
    kind: Literal["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"] = "F32",
    template: str | None = CHATML,
) -> Path:
    """The same model as one GGUF file; `kind` is of the matrices, norms stay float32."""
    model = model or TinyLlama()
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    _add_shape(writer, model)
    _add_tokenizer(writer, model.vocab, template)
    chosen = gguf.GGMLQuantizationType[kind]
    for name, array in weights(model).items():
        kept = chosen if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(_permuted(name, array, model), kept)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@functools.cache
def tiny_tokenizer(vocab: int) -> Tokenizer:
    """Byte-level BPE with SmolLM2's splits, trained on a few lines; ids 0 to 2 are control."""
    assert vocab >= len(CONTROL) + 256, "every byte needs a token"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [AddedToken(text, special=True, normalized=False) for text in CONTROL]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        show_progress=False,
        special_tokens=control,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    return tokenizer


@functools.lru_cache(maxsize=4)
def weights(model: TinyLlama) -> dict[str, Array]:
    """Float32 by Hugging Face name; scaled so that logits differ enough to have a winner."""
    dice = np.random.default_rng(model.seed)

    def matrix(rows: int, columns: int) -> Array:
        drawn: Array = dice.standard_normal((rows, columns)).astype(np.float32)
        return drawn * np.float32(columns**-0.5)

    def norm() -> Array:
        return (1 + 0.1 * dice.standard_normal(model.hidden)).astype(np.float32)

    q_rows, kv_rows = model.heads * model.head_dim, model.kv_heads * model.head_dim
    embedding = dice.standard_normal((model.vocab, model.hidden)).astype(np.float32)
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm()}
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": norm(),
            f"{at}.self_attn.q_proj.weight": matrix(q_rows, model.hidden),
            f"{at}.self_attn.k_proj.weight": matrix(kv_rows, model.hidden),
            f"{at}.self_attn.v_proj.weight": matrix(kv_rows, model.hidden),
            f"{at}.self_attn.o_proj.weight": matrix(model.hidden, q_rows),
            f"{at}.post_attention_layernorm.weight": norm(),
            f"{at}.mlp.gate_proj.weight": matrix(model.intermediate, model.hidden),
            f"{at}.mlp.up_proj.weight": matrix(model.intermediate, model.hidden),
            f"{at}.mlp.down_proj.weight": matrix(model.hidden, model.intermediate),
        }
    if not model.tied:
        tensors["lm_head.weight"] = matrix(model.vocab, model.hidden)
    return tensors


def bfloat16_bits(array: Array) -> "np.ndarray[Any, np.dtype[np.uint16]]":
    """Round to nearest even, as hardware does."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _config(model: TinyLlama, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tied,
        "torch_dtype": dtype,
        "vocab_size": model.vocab,
    }


def _tokenizer_config(model: TinyLlama, template: str | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": CONTROL[1],
        "eos_token": CONTROL[2],
        "pad_token": CONTROL[2],
        "unk_token": CONTROL[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.context,
    }
    return config if template is None else config | {"chat_template": template}


def _write_safetensors(directory: Path, tensors: dict[str, Array], dtype: str, shards: int) -> None:
    names = sorted(tensors)
    groups = [names[at::shards] for at in range(shards)]
    places: dict[str, str] = {}
    for at, group in enumerate(groups):
        file = "model.safetensors"
        if shards > 1:
            file = f"model-{at + 1:05}-of-{shards:05}.safetensors"
        stored = {name: _as_dtype(tensors[name], dtype) for name in group}
        specs = {name: _spec(array, dtype) for name, array in stored.items()}
        safetensors.serialize_file(specs, str(directory / file), {"format": "pt"})
        places |= dict.fromkeys(group, file)
    if shards > 1:
        size = sum(array.nbytes for array in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        _write_json(directory / "model.safetensors.index.json", index)


def _as_dtype(array: Array, dtype: str) -> "np.ndarray[Any, Any]":
    return array if dtype == "float32" else bfloat16_bits(array)


def _spec(array: "np.ndarray[Any, Any]", dtype: str) -> safetensors.TensorSpec:
    """Points into `array`, which must outlive it. numpy has no bfloat16 to infer from."""
    return safetensors.TensorSpec(
        dtype=dtype, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
    )


def _add_shape(writer: gguf.GGUFWriter, model: TinyLlama) -> None:
    writer.add_name("tiny")
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.hidden)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.intermediate)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_vocab_size(model.vocab)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: int, template: str | None) -> None:
    description = json.loads(tiny_tokenizer(vocab).to_str())["model"]
    by_id = {id_: token for token, id_ in description["vocab"].items()}
    kinds = [
        gguf.TokenType.CONTROL
        if id_ < len(CONTROL)
        else gguf.TokenType.NORMAL
        if id_ in by_id
        else gguf.TokenType.UNUSED
        for id_ in range(vocab)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([by_id.get(id_, f"[PAD{id_}]") for id_ in range(vocab)])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in description["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(value=False)
    if template is not None:
        writer.add_chat_template(template)


def _permuted(name: str, array: Array, model: TinyLlama) -> Array:
    """GGUF's Llama keeps each head's two rotary halves interleaved row by row."""
    heads = {"q_proj": model.heads, "k_proj": model.kv_heads}
    count = next((heads[part] for part in heads if part in name), None)
    if count is None:
        return array
    halves = array.reshape(count, 2, model.head_dim // 2, model.hidden)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_GGUF_NAMES[part]}.weight"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
