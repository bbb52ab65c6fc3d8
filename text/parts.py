"""What a tokenizer is made of, whichever files it was read from."""

from collections.abc import Mapping, Sequence

import msgspec
from tokenizers import Tokenizer

from text.control import ControlToken


class TokenizerParts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `TextRules` needs; one reader for each file format makes it."""

    tokenizer: Tokenizer  # knows the control tokens as special, and adds none by itself
    control: Sequence[ControlToken]
    template: str | None
    variables: Mapping[str, str]  # `bos_token` and so on, as the template may name them
    prefix_ids: tuple[int, ...]  # what a plain text starts with, usually () or (bos,)
    eos_ids: frozenset[int]
    vocab_size: int  # rows of the model's embedding
    context_tokens: int
    family: str


class TokenizerFilesError(Exception):
    """The files do not hold a tokenizer that this code reads; the message says what is wrong."""
