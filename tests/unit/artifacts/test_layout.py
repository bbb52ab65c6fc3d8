"""What can be served is recognised; what cannot is refused by name before it is stored."""

import json
from pathlib import Path

import pytest

from artifacts.errors import CorruptError, UnsupportedError
from artifacts.layout import read_layout
from tests.support.tiny_llama import TinyLlama, write_gguf, write_hf


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(("dtype", "expected"), [("float32", "f32"), ("bfloat16", "bf16")])
def test_hugging_face_files_are_recognised(tmp_path, dtype, expected):
    layout = read_layout(write_hf(tmp_path, TinyLlama(context=77), dtype=dtype))
    assert (layout.format, layout.family, layout.context_tokens) == ("safetensors", "llama", 77)
    assert layout.weight_dtype == expected
    assert {path.name for path in layout.paths} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_a_gguf_file_is_recognised_by_itself_or_in_its_directory(tmp_path, kind):
    path = write_gguf(tmp_path / "some.gguf", TinyLlama(context=77), kind=kind)
    layout = read_layout(path)
    assert (layout.format, layout.family, layout.context_tokens) == ("gguf", "llama", 77)
    assert layout.weight_dtype == kind.lower()
    assert layout.paths == (path,)
    assert read_layout(tmp_path) == layout


def test_a_generation_config_beside_a_gguf_file_is_of_the_version(tmp_path):
    path = write_gguf(tmp_path / "some.gguf")
    beside = tmp_path / "generation_config.json"
    beside.write_text("{}")
    (tmp_path / "README.md").touch()
    assert read_layout(tmp_path).paths == (path, beside)
    assert read_layout(path).paths == (path,)


def test_template_and_tokenizer_have_hashes_of_their_own(tmp_path):
    one = read_layout(write_gguf(tmp_path / "a.gguf", template="a"))
    two = read_layout(write_gguf(tmp_path / "b.gguf", template="b"))
    none = read_layout(write_gguf(tmp_path / "c.gguf", template=None))
    assert one.tokenizer_sha256 == two.tokenizer_sha256
    assert len({one.template_sha256, two.template_sha256, none.template_sha256}) == 3
    tokens = read_layout(write_gguf(tmp_path / "d.gguf", TinyLlama(vocab=400), template="a"))
    assert tokens.template_sha256 == one.template_sha256
    assert tokens.tokenizer_sha256 != one.tokenizer_sha256


def test_shards_are_taken_with_their_index(tmp_path):
    layout = read_layout(write_hf(tmp_path, shards=3))
    assert sum(path.suffix == ".safetensors" for path in layout.paths) == 3
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CorruptError, match="model-00002-of-00003"):
        read_layout(tmp_path)


def test_an_index_cannot_name_files_elsewhere(tmp_path):
    write_hf(tmp_path / "model")
    (tmp_path / "other.safetensors").touch()
    index = {"weight_map": {"a": "../other.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptError, match=r"other\.safetensors"):
        read_layout(tmp_path / "model")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "qwen3"}, "model_type 'qwen3' is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_by_name(tmp_path, fields, message):
    write_hf(tmp_path)
    change(tmp_path / "config.json", **fields)
    with pytest.raises(UnsupportedError, match=message):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    ("missing", "error", "message"),
    [
        ("config.json", UnsupportedError, "has no config.json"),
        ("tokenizer.json", UnsupportedError, "has no tokenizer.json"),
        ("model.safetensors", UnsupportedError, "only safetensors weights"),
    ],
)
def test_a_missing_file_is_named(tmp_path, missing, error, message):
    (write_hf(tmp_path) / missing).unlink()
    with pytest.raises(error, match=message):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", "config.json is not JSON"),
        ("config.json", b"[]", "config.json is not a JSON object"),
        ("config.json", b'{"model_type": "llama"}', "config.json lacks"),
        ("model.safetensors", b"", "is not a safetensors file"),
        ("model.safetensors", b"\x02" + bytes(7) + b"{}", "is not a safetensors file"),
        ("model.safetensors", b"\x02" + bytes(7) + b"[]", "is not a safetensors file"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    (write_hf(tmp_path) / name).write_bytes(content)
    with pytest.raises(CorruptError, match=message):
        read_layout(tmp_path)


def test_cut_weights_are_seen_without_reading_them(tmp_path):
    path = write_hf(tmp_path) / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)
    with pytest.raises(CorruptError, match="is cut"):
        read_layout(tmp_path)


def test_a_cut_gguf_file_is_seen(tmp_path):
    path = write_gguf(tmp_path / "x.gguf")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CorruptError, match="not a whole GGUF file"):
        read_layout(path)
    path.write_bytes(b"")
    with pytest.raises(CorruptError, match="not a whole GGUF file"):
        read_layout(path)


def test_two_gguf_files_need_a_choice(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(UnsupportedError, match="holds 2 GGUF files"):
        read_layout(tmp_path)
