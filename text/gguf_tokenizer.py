"""Builds a tokenizer from GGUF metadata, equal to the Hugging Face one it was made from.

GGUF keeps vocabulary, merges and token types, but of the pre-tokenizer only a name; the
splits behind the names are in `_SPLITS` (llama.cpp `src/llama-vocab.cpp` holds the same as
regular expressions). A name or model that is not there is refused, never guessed.
"""

from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from text.control import ControlToken
from text.gguf_header import read_metadata
from text.parts import TokenizerFilesError, TokenizerParts

# Turn ends that instruction-tuned files often leave out of `eos_token_id`.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>")

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# name: (each digit alone, regular expression or None for GPT-2's, whole words before merges)
_SPLITS: dict[str, tuple[bool, str | None, bool]] = {
    "gpt-2": (False, None, False),
    "smollm": (True, None, False),
    "llama-bpe": (False, _LLAMA3, True),
    "qwen2": (False, _QWEN2, False),
}


class _TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_gguf(path: Path) -> TokenizerParts:
    """Raises TokenizerFilesError."""
    metadata = read_metadata(path)
    try:
        return _parts(metadata)
    except KeyError as error:
        raise TokenizerFilesError(f"{path.name}: the metadata lacks {error}") from error


def _parts(metadata: Mapping[str, Any]) -> TokenizerParts:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    control = [
        ControlToken(id=id_, text=tokens[id_])
        for id_, kind in enumerate(types)
        if kind in (_TokenType.CONTROL, _TokenType.UNKNOWN)
    ]
    family = metadata["general.architecture"]
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", False)
    return TokenizerParts(
        tokenizer=_tokenizer(metadata, tokens, types, control),
        control=control,
        template=metadata.get("tokenizer.chat_template"),
        variables=_variables(metadata, tokens),
        prefix_ids=(metadata["tokenizer.ggml.bos_token_id"],) if adds_bos else (),
        eos_ids=_eos_ids(metadata, control),
        vocab_size=len(tokens),
        context_tokens=metadata[f"{family}.context_length"],
        family=family,
    )


def _tokenizer(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], control: list[ControlToken]
) -> Tokenizer:
    model = metadata["tokenizer.ggml.model"]
    split = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or split not in _SPLITS:
        raise TokenizerFilesError(
            f"tokenizer {model!r} with pre-tokenizer {split!r} is not read from GGUF "
            f"(those that are: gpt2 with {', '.join(_SPLITS)}); pull the Hugging Face files instead"
        )
    digits_apart, pattern, whole_words = _SPLITS[split]
    # Rows that only pad the embedding are no tokens.
    vocabulary = {
        token: id_
        for id_, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != _TokenType.UNUSED
    }
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole_words))
    tokenizer.pre_tokenizer = _pre_tokenizer(digits_apart=digits_apart, pattern=pattern)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token.text, special=True, normalized=False) for token in control]
    )
    tokenizer.add_tokens(
        [
            AddedToken(tokens[id_], normalized=False)
            for id_, kind in enumerate(types)
            if kind == _TokenType.USER_DEFINED
        ]
    )
    return tokenizer


def _pre_tokenizer(*, digits_apart: bool, pattern: str | None) -> pre_tokenizers.PreTokenizer:
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if digits_apart:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, by_bytes])
    if pattern is not None:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), by_bytes])
    return by_bytes


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _variables(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {short: metadata.get(f"tokenizer.ggml.{name}_token_id") for name, short in names.items()}
    return {f"{short}_token": tokens[id_] for short, id_ in ids.items() if id_ is not None}


def _eos_ids(metadata: Mapping[str, Any], control: list[ControlToken]) -> frozenset[int]:
    named = {metadata["tokenizer.ggml.eos_token_id"], metadata.get("tokenizer.ggml.eot_token_id")}
    turn_ends = {token.id for token in control if token.text in TURN_ENDS}
    return frozenset(id_ for id_ in named | turn_ends if id_ is not None)
