"""Kept answers as they are stored: sealed where there is a key, else as they are. Pure.

    0x00 | length of the key's id | the id | nonce, 12 bytes | AES-256-GCM of the answer

No answer of ours begins with a zero, so what was kept before there was a key is read as ever; it
is gone with its time. Invariant: what is sealed opens for the tenant and the name it was kept
under, and for no other.
"""

from collections.abc import Callable

import msgspec

from core.secrets import NONCE_BYTES, KeyRing, Sealed

MARK = 0
ID_AT = 2

_context = msgspec.json.Encoder().encode


class AnswerSeal:
    """The ring's first key seals, any of them opens. `new_nonce` is random bytes, so many."""

    def __init__(self, ring: KeyRing, new_nonce: Callable[[int], bytes]) -> None:
        self._ring = ring
        self._new_nonce = new_nonce

    def seal(self, answer: bytes, *place: str) -> bytes:
        """As it is to be stored there. `place` begins with the kind and the tenant."""
        assert answer[:1] != bytes([MARK])
        if self._ring.sealing_id is None:
            return answer
        sealed = self._ring.seal_bytes(
            answer, context=_context(place), nonce=self._new_nonce(NONCE_BYTES)
        )
        key_id = sealed.key_id.encode()
        return bytes([MARK, len(key_id)]) + key_id + sealed.nonce + sealed.sealed

    def open(self, stored: bytes, *place: str) -> bytes:
        """What was sealed for this place, or was not sealed. Raises CannotOpenError."""
        if stored[:1] != bytes([MARK]):
            return stored
        # Of one that is cut short the parts are too, and no key opens them.
        nonce_at = ID_AT + int.from_bytes(stored[1:ID_AT], "big")
        body_at = nonce_at + NONCE_BYTES
        sealed = Sealed(
            key_id=stored[ID_AT:nonce_at].decode("latin-1"),
            nonce=stored[nonce_at:body_at],
            sealed=stored[body_at:],
        )
        return self._ring.open_bytes(sealed, context=_context(place))
