"""One character as searches see it: without what a reader overlooks.

Character by character, so that a text folds the same in whatever pieces it comes.
"""

import unicodedata
from functools import lru_cache

# Invisible characters passed over in a row. More of them end a match, for a hold must end too.
SKIPPED_MAX = 16


@lru_cache(maxsize=65_536)
def fold(char: str) -> str:
    """Case, width and accents removed: none, one or several characters."""
    decomposed = unicodedata.normalize("NFKD", char)
    kept = "".join(c for c in decomposed if unicodedata.category(c) not in ("Mn", "Me", "Cf"))
    return unicodedata.normalize("NFKD", kept.casefold())


def narrow(char: str) -> str:
    """Width and script of digits removed; "" for a character that shows nothing."""
    if char.isascii():
        return char
    if unicodedata.category(char) == "Cf":
        return ""
    digit = unicodedata.decimal(char, None)
    if digit is not None:
        return str(digit)
    narrowed = unicodedata.normalize("NFKC", char)
    return narrowed if len(narrowed) == 1 else char


def is_word(char: str) -> bool:
    """Whether words are made of it."""
    return char.isalnum() or char == "_"
