"""Looks into model files and says what they are, before anything is stored.

A directory is one GGUF file, with a `generation_config.json` or without, or Hugging Face's
layout with safetensors; a GGUF file that is named itself is that file alone. Architectures that
cannot be served and files that are cut are refused here, by name, before they take up room;
what a loader knows better (a kind of rotary scaling, say) is the loader's to refuse.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from artifacts.errors import CorruptError, UnsupportedError
from artifacts.files import sha256_of
from artifacts.gguf_header import read_gguf_header
from artifacts.manifest import Format

# GGUF `general.architecture` and Hugging Face `model_type` agree on this word.
FAMILIES = ("llama",)
ARCHITECTURES = ("LlamaForCausalLM",)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
REQUIRED = ("config.json", "tokenizer.json")
GENERATION = "generation_config.json"
OPTIONAL = (
    GENERATION,
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
HEADER_BYTES_MAX = 100 << 20  # the safetensors format's own bound


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory holds. `paths` are the files that make the version."""

    format: Format
    family: str
    context_tokens: int
    weight_dtype: str
    paths: tuple[Path, ...]
    tokenizer_sha256: str
    template_sha256: str


def read_layout(source: Path) -> Layout:
    """Of a GGUF file or a directory. Raises UnsupportedError, CorruptError."""
    if source.is_file():
        return _gguf(source)
    found = sorted(source.glob("*.gguf"))
    if len(found) > 1:
        raise UnsupportedError(f"{source} holds {len(found)} GGUF files: name one of them")
    if not found:
        return _hugging_face(source)
    generation = source / GENERATION
    return _gguf(found[0], *([generation] if generation.is_file() else ()))


def _gguf(path: Path, *beside: Path) -> Layout:
    try:
        header = read_gguf_header(path)
    except Exception as error:  # the library raises whatever the bytes lead it into
        raise CorruptError(f"{path} is not a whole GGUF file: {error}") from error
    family = str(header.values.get("general.architecture"))
    _require(family, FAMILIES, f"{path.name}: architecture")
    _require(header.values.get("tokenizer.ggml.model"), ("gpt2",), f"{path.name}: GGUF tokenizer")
    return Layout(
        format="gguf",
        family=family,
        context_tokens=_tokens(header.values, f"{family}.context_length", path.name),
        weight_dtype=_widest(header.dtype_bytes),
        paths=(path, *beside),
        tokenizer_sha256=header.tokenizer_sha256,
        template_sha256=_sha256(str(header.values.get("tokenizer.chat_template", ""))),
    )


def _hugging_face(directory: Path) -> Layout:
    for name in REQUIRED:
        if not (directory / name).is_file():
            raise UnsupportedError(f"{directory} has no {name}: not a Hugging Face model directory")
    config = _read_json(directory / "config.json")
    _require(config.get("model_type"), FAMILIES, "config.json: model_type")
    for architecture in config.get("architectures") or ():
        _require(architecture, ARCHITECTURES, "config.json: architecture")
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method")
        raise UnsupportedError(f"config.json: weights quantised by {method!r} are not supported")
    weights = _weights(directory)
    optional = [directory / name for name in OPTIONAL if (directory / name).is_file()]
    return Layout(
        format="safetensors",
        family=config["model_type"],
        context_tokens=_tokens(config, "max_position_embeddings", "config.json"),
        weight_dtype=_widest(_dtype_sizes(weights)),
        paths=(*(directory / name for name in REQUIRED), *optional, *weights),
        tokenizer_sha256=sha256_of(directory / "tokenizer.json"),
        template_sha256=_sha256(_template(directory)),
    )


def _weights(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.is_file():
        if (directory / WEIGHTS).is_file():
            return [directory / WEIGHTS]
        raise UnsupportedError(f"{directory} has no {WEIGHTS}: only safetensors weights are read")
    shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
    for shard in shards:
        if Path(shard).name != shard or not (directory / shard).is_file():
            raise CorruptError(f"{index} names {shard!r}, which is not in {directory}")
    return [index, *(directory / shard for shard in shards)]


def _dtype_sizes(weights: Iterable[Path]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for path in weights:
        if path.suffix == ".safetensors":
            for tensor in _tensors(path):
                start, end = tensor["data_offsets"]
                sizes[tensor["dtype"].lower()] += end - start
    return sizes


def _tensors(path: Path) -> list[dict[str, Any]]:
    """The header's entries: 8 bytes of length, JSON, data. Checked against the file's size."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(size, HEADER_BYTES_MAX)))
            tensors = [entry for name, entry in header.items() if name != "__metadata__"]
            end = max(entry["data_offsets"][1] for entry in tensors)
        except (ValueError, KeyError, AttributeError) as error:
            raise CorruptError(f"{path} is not a safetensors file: {error}") from error
    if path.stat().st_size != 8 + size + end:
        raise CorruptError(f"{path} is cut: its header tells of {8 + size + end} bytes")
    return tensors


def _template(directory: Path) -> str:
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    config = directory / "tokenizer_config.json"
    found = _read_json(config).get("chat_template", "") if config.is_file() else ""
    return found if isinstance(found, str) else json.dumps(found, sort_keys=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorruptError(f"{path} is not a JSON object")
    return content


def _tokens(values: Mapping[str, Any], key: str, file: str) -> int:
    if not isinstance(values.get(key), int):
        raise CorruptError(f"{file} lacks {key}, the length of the context")
    return int(values[key])


def _require(value: object, known: tuple[str, ...], what: str) -> None:
    if value not in known:
        raise UnsupportedError(f"{what} {value!r} is not supported (only {', '.join(known)})")


def _widest(sizes: Counter[str]) -> str:
    if not sizes:
        raise CorruptError("the weights hold no tensor")
    return sizes.most_common(1)[0][0]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
