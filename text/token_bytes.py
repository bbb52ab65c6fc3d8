"""The bytes that each token stands for, so that text can be released as ids arrive.

Concatenating the bytes of any ids and decoding them as UTF-8 (`errors="replace"`) *is* the
text of those ids; `TextRules.decode` does nothing else. Control tokens have no bytes.
"""

import json
import re
from collections.abc import Container
from typing import Any

from tokenizers import Tokenizer

from text.parts import TokenizerFilesError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes_table(tokenizer: Tokenizer, silent: Container[int], size: int) -> list[bytes]:
    """Bytes by id, for ids up to at least `size`; b"" for `silent` ids and unused rows.

    Raises TokenizerFilesError for a decoder that does not work token by token.
    """
    as_bytes = _rule(json.loads(tokenizer.to_str())["decoder"])
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * max(size, 1 + max(vocabulary.values(), default=-1))
    for token, id_ in vocabulary.items():
        if id_ not in silent:
            table[id_] = as_bytes(token)
    return table


def _rule(decoder: dict[str, Any] | None) -> Any:
    kinds = _kinds(decoder)
    if "ByteLevel" in kinds:
        return _from_byte_letters
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _from_pieces
    raise TokenizerFilesError(f"a tokenizer that decodes by {sorted(kinds)} is not supported")


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    inner = [kind for one in decoder.get("decoders", ()) for kind in _kinds(one)]
    return {decoder["type"], *inner}


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if chr(byte) not in letters]
    return letters | {chr(0x100 + at): byte for at, byte in enumerate(rest)}


_LETTERS = _byte_letters()


def _from_byte_letters(token: str) -> bytes:
    # An added token may hold characters that are no byte's letter: then it stands for itself.
    if all(letter in _LETTERS for letter in token):
        return bytes(_LETTERS[letter] for letter in token)
    return token.encode()


def _from_pieces(token: str) -> bytes:
    """SentencePiece: `▁` is a space, `<0x0A>` a byte. The first space of a text is kept."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode()
