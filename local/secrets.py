"""The stack's secrets: made once, kept in the data directory, readable by its owner alone."""

import os
import secrets
from pathlib import Path

import msgspec

from local.layout import Layout


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """Losing the pepper invalidates every API key; the others may be changed."""

    internal_secret: str
    key_pepper: str
    admin_token: str


class SecretsError(Exception):
    """The file is there and cannot be understood; the message names it."""


def load_or_make(layout: Layout) -> Secrets:
    """Read the secrets, or make and keep them. Raises SecretsError."""
    if layout.secrets.exists():
        kept = _load(layout.secrets)
    else:
        kept = Secrets(
            internal_secret=secrets.token_urlsafe(32),
            key_pepper=secrets.token_urlsafe(32),
            admin_token=f"hwa_{secrets.token_urlsafe(24)}",
        )
        write_private(layout.secrets, msgspec.json.encode(kept))
    write_private(layout.admin_token, kept.admin_token.encode())
    return kept


def _load(path: Path) -> Secrets:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Secrets)
    except msgspec.DecodeError as error:
        # Made anew they would invalidate every API key: that is for its owner to decide.
        raise SecretsError(
            f"{path} cannot be read ({error}); restore it, or remove it to make new secrets, "
            "with which no API key made so far works"
        ) from error


def write_private(path: Path, content: bytes) -> None:
    """Replace `path` in one step; nobody else could read it, nor anybody a part of it."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
