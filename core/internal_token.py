"""Tokens our own processes show each other: `v1.<audience>.<subject>.<expiry ms>.<mac>`.

HMAC-SHA256 under one shared secret. The audience (worker, control-plane) keeps a token made
for one process from working at another.
"""

import hashlib
import hmac

SECRET_BYTES_MIN = 16
_FIELDS = 5


def sign(secret: bytes, *, audience: str, subject: str, expires_ms: int) -> str:
    """A token for `audience`, good until `expires_ms` (Unix milliseconds)."""
    assert len(secret) >= SECRET_BYTES_MIN
    assert "." not in audience + subject
    claims = f"v1.{audience}.{subject}.{expires_ms}"
    return f"{claims}.{_mac(secret, claims)}"


def verify(secret: bytes, token: str, *, audience: str, now_ms: int) -> str | None:
    """The subject, or None for a token that is malformed, foreign, forged or out of date."""
    claims, _, mac = token.rpartition(".")
    if not hmac.compare_digest(_mac(secret, claims).encode(), mac.encode()):
        return None
    fields = token.split(".")
    if len(fields) != _FIELDS or fields[0] != "v1" or fields[1] != audience:
        return None
    return fields[2] if int(fields[3]) > now_ms else None


def _mac(secret: bytes, claims: str) -> str:
    return hmac.new(secret, claims.encode(), hashlib.sha256).hexdigest()
