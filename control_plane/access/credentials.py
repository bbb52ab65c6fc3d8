"""Secrets that an operator shows: sessions, tokens, invitations. Made of given entropy.

Each begins with what it is and is 256 bits of chance. Only HMAC-SHA256(pepper, text) is stored,
so that a copied database opens nothing, and no secret of one kind works as another.
"""

import base64
import hashlib
import hmac
from enum import StrEnum

SECRET_BYTES = 32
ID_BYTES = 12


class Kind(StrEnum):
    """What a secret opens; its text begins with it."""

    SESSION = "hws_"
    TOKEN = "hwt_"  # noqa: S105 - the public prefix of every token, no secret
    INVITATION = "hwi_"


def mint(kind: Kind, entropy: bytes) -> str:
    """The whole text, which is shown once."""
    assert len(entropy) == SECRET_BYTES
    return kind + base64.urlsafe_b64encode(entropy).rstrip(b"=").decode()


def digest(pepper: bytes, kind: Kind, text: str) -> bytes:
    """What is stored of it. A text of another kind has one that nobody stored."""
    return hmac.digest(pepper, f"{kind}:{text}".encode(errors="replace"), hashlib.sha256)


def csrf_token(pepper: bytes, session: str) -> str:
    """What a page must say beside a session's cookie: no other site can read or guess it."""
    return hmac.digest(pepper, f"csrf:{session}".encode(errors="replace"), hashlib.sha256).hex()


def slot(pepper: bytes, name: str, *, slots: int) -> int:
    """One of a bounded number of places for what strangers choose; nobody can aim at another's."""
    taken = hmac.digest(pepper, f"slot:{name}".encode(errors="replace"), hashlib.sha256)
    return int.from_bytes(taken[:8]) % slots


def an_id(prefix: str, entropy: bytes) -> str:
    """`usr_`, `ses_` or `tok_` and 24 hex digits: a public name, safe to log."""
    assert len(entropy) == ID_BYTES
    return f"{prefix}_{entropy.hex()}"
