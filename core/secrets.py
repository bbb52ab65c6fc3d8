"""Secrets that we must be able to read again, sealed with AES-256-GCM under a named key.

The key ring is one setting, `id:base64,id:base64`: its first key seals, all of them open. A
key is rotated by putting a new one in front and sealing everything again. Each sealed secret
is bound to a context, and does not open in any other.
"""

import base64
import binascii
import re
from collections.abc import Mapping

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
NONCE_BYTES = 12  # NIST SP 800-38D, 8.2: random ones are safe for 2^32 seals under one key

_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A secret as it is stored. Its length is that of the secret, and is not hidden."""

    key_id: str
    nonce: bytes
    sealed: bytes


class CannotOpenError(Exception):
    """Its key is not on the ring, or it is not what was sealed in this context."""


class KeyRing:
    """Keys by id; the first seals."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        assert all(len(key) == KEY_BYTES for key in keys.values())
        self._keys = {key_id: AESGCM(key) for key_id, key in keys.items()}

    @property
    def sealing_id(self) -> str | None:
        """The key that new secrets are sealed with; None where there is no key."""
        return next(iter(self._keys), None)

    def seal(self, secret: str, *, context: bytes, nonce: bytes) -> Sealed:
        """`nonce` is random, and never used again. Only where there is a key."""
        return self.seal_bytes(secret.encode(), context=context, nonce=nonce)

    def open(self, sealed: Sealed, *, context: bytes) -> str:
        """Raises CannotOpenError."""
        try:
            return self.open_bytes(sealed, context=context).decode()
        except UnicodeDecodeError as error:
            raise CannotOpenError("it is no text") from error

    def seal_bytes(self, secret: bytes, *, context: bytes, nonce: bytes) -> Sealed:
        """As `seal`, of what is no text."""
        assert len(nonce) == NONCE_BYTES
        key_id, key = next(iter(self._keys.items()))
        return Sealed(key_id=key_id, nonce=nonce, sealed=key.encrypt(nonce, secret, context))

    def open_bytes(self, sealed: Sealed, *, context: bytes) -> bytes:
        """Raises CannotOpenError."""
        key = self._keys.get(sealed.key_id)
        if key is None:
            raise CannotOpenError(f"there is no key {sealed.key_id!r} on the ring")
        try:
            return key.decrypt(sealed.nonce, sealed.sealed, context)
        except (InvalidTag, ValueError) as error:
            raise CannotOpenError("it was not sealed for this, or was changed") from error


def read_key_ring(text: str) -> KeyRing:
    """From the setting; an empty one has no key. Raises ValueError, without a key's text."""
    keys: dict[str, bytes] = {}
    for number, entry in enumerate(filter(None, (part.strip() for part in text.split(","))), 1):
        key_id, colon, encoded = entry.partition(":")
        if not colon or not _ID.fullmatch(key_id) or key_id in keys:
            raise ValueError(f"key {number} must be ID:BASE64, with an id of its own")
        try:
            key = base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise ValueError(f"key {key_id!r} is not base64") from error
        if len(key) != KEY_BYTES:
            raise ValueError(f"key {key_id!r} has {len(key)} bytes, and not {KEY_BYTES}")
        keys[key_id] = key
    return KeyRing(keys)
