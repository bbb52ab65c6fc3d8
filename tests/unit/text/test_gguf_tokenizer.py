"""GGUF metadata: read as the gguf library reads it, split as the names promise."""

import json
import struct
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from tests.support.tiny_llama import TinyLlama, tiny_tokenizer, write_gguf
from text.gguf_header import read_metadata
from text.gguf_tokenizer import read_gguf
from text.parts import TokenizerFilesError
from text.rules import TextRules

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EXPRESSIONS = {
    "smollm": [r"\p{N}", GPT2],
    "gpt-2": [GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", TinyLlama(layers=1))


def rewritten(source: Path, target: Path, **changes: object) -> Path:
    """The metadata alone, with keys changed (None: left out); underscores stand for dots."""
    metadata = read_metadata(source)
    for key, value in changes.items():
        metadata[key.replace("__", ".")] = value
    writer = gguf.GGUFWriter(target, "llama")
    for key, value in metadata.items():
        if value is None or key == "general.architecture":
            continue
        kind = gguf.GGUFValueType.get_type(value)
        sub = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(key, value, kind, sub)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return target


def by_hand(pre: str, text: str) -> list[str]:
    """Pieces by plain regular expressions, one after the other as llama.cpp applies them."""
    pieces = [text]
    for expression in EXPRESSIONS[pre]:
        pieces = [
            part for piece in pieces for part in regex.split(f"({expression})", piece) if part
        ]
    return pieces


def test_metadata_equals_what_the_gguf_library_reads(tiny):
    fields = gguf.GGUFReader(tiny).fields
    theirs = {key: field.contents() for key, field in fields.items()}
    assert read_metadata(tiny) == {
        key: value for key, value in theirs.items() if not key.startswith("GGUF.")
    }


class MergesByDefinition:
    """Byte-pair encoding of one piece: the best-ranked neighbours merge until none is left."""

    def __init__(self, *, words_first: bool) -> None:
        model = json.loads(tiny_tokenizer(512).to_str())["model"]
        self._ids = model["vocab"]
        self._ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
        self._words_first = words_first

    def ids(self, piece: str) -> list[int]:
        spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        parts = list(spelled.pre_tokenize_str(piece)[0][0])
        if self._words_first and "".join(parts) in self._ids:
            return [self._ids["".join(parts)]]
        while ranked := [
            (self._ranks[pair], at)
            for at, pair in enumerate(pairwise(parts))
            if pair in self._ranks
        ]:
            _, at = min(ranked)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self._ids[part] for part in parts]


@pytest.fixture(scope="module")
def rules_by_name(tiny, tmp_path_factory) -> dict[str, TextRules]:
    folder = tmp_path_factory.mktemp("names")
    return {
        pre: TextRules(read_gguf(rewritten(tiny, folder / f"{pre}.gguf", tokenizer__ggml__pre=pre)))
        for pre in EXPRESSIONS
    }


@pytest.mark.parametrize("pre", sorted(EXPRESSIONS))
@given(text=st.text(alphabet="aB'sve 12½٣\n\r\t.,!日é한👩\u200d"))
def test_text_is_split_as_the_pre_tokenizers_name_promises(rules_by_name, pre, text):
    merges = MergesByDefinition(words_first=pre == "llama-bpe")
    expected = [id_ for piece in by_hand(pre, text) for id_ in merges.ids(piece)]
    assert rules_by_name[pre].plain_ids(text) == expected


def test_without_a_name_the_split_is_gpt2s(tiny, tmp_path, rules_by_name):
    path = rewritten(tiny, tmp_path / "x.gguf", tokenizer__ggml__pre=None)
    text = "it's 2024"
    assert TextRules(read_gguf(path)).plain_ids(text) == rules_by_name["gpt-2"].plain_ids(text)


def test_the_start_token_is_added_only_where_the_file_says_so(tiny, tmp_path):
    assert read_gguf(tiny).prefix_ids == ()
    path = rewritten(tiny, tmp_path / "x.gguf", tokenizer__ggml__add_bos_token=True)
    rules = TextRules(read_gguf(path))
    assert rules.plain_ids("a")[0] == 1
    assert rules.decode(rules.plain_ids("a")) == "a"


def test_end_tokens_hold_the_end_of_a_turn_and_of_a_chat(tiny, tmp_path):
    path = rewritten(tiny, tmp_path / "x.gguf", tokenizer__ggml__eos_token_id=0)
    assert read_gguf(path).eos_ids == {0, 2}
    path = rewritten(tiny, tmp_path / "y.gguf", tokenizer__ggml__eot_token_id=0)
    assert read_gguf(path).eos_ids == {0, 2}


def test_user_defined_tokens_are_whole_and_written(tiny, tmp_path):
    metadata = read_metadata(tiny)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    at = types.index(gguf.TokenType.UNUSED)
    tokens[at], types[at] = "<think>", gguf.TokenType.USER_DEFINED
    path = rewritten(
        tiny,
        tmp_path / "x.gguf",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[int(kind) for kind in types],
    )
    rules = TextRules(read_gguf(path))
    assert at in rules.plain_ids("a<think>b")
    assert rules.decode(rules.plain_ids("a<think>b")) == "a<think>b"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer__ggml__model": "llama"}, "'llama' with pre-tokenizer 'smollm'"),
        ({"tokenizer__ggml__pre": "novel"}, "pre-tokenizer 'novel'"),
        ({"tokenizer__ggml__merges": None}, "lacks 'tokenizer.ggml.merges'"),
        ({"llama__context_length": None}, "lacks 'llama.context_length'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tiny, tmp_path, changes, message):
    with pytest.raises(TokenizerFilesError, match=message):
        read_gguf(rewritten(tiny, tmp_path / "x.gguf", **changes))


def broken(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    return path


def key(kind: int, value: bytes) -> bytes:
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    return start + struct.pack("<I", kind) + value


def test_nested_arrays_are_read_to_a_depth(tmp_path):
    inner = struct.pack("<IQ2B", 0, 2, 7, 8)
    assert read_metadata(broken(tmp_path, key(9, struct.pack("<IQ", 9, 1) + inner))) == {
        "k": [[7, 8]]
    }
    deep = key(9, struct.pack("<IQ", 9, 1) * 9 + inner)
    with pytest.raises(TokenizerFilesError, match="nest too deep"):
        read_metadata(broken(tmp_path, deep))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it ends early"),
        (b"PK\x03\x04", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "over 65536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1), "it ends early"),
        (key(8, struct.pack("<Q", 1 << 60)), "over"),
        (key(8, struct.pack("<Q", 2) + b"\xff\xff"), "utf-8"),
        (key(13, b""), "type 13"),
        (key(9, struct.pack("<IQ", 12, 1 << 27)), "over"),
    ],
)
def test_a_broken_header_is_refused(tmp_path, data, message):
    with pytest.raises(TokenizerFilesError, match=message):
        read_metadata(broken(tmp_path, data))
