"""Tenants' API keys: their shape, their check digits, and how they are stored.

A key is `hw_<8 public>_<32 secret>_<6 check>`, base-32 letters. The public part may be shown
and logged; the check part tells a mistyped key from an unknown one without a look-up. Only
HMAC-SHA256(pepper, key) is stored, so that a copied database opens nothing.
"""

import base64
import hashlib
import hmac
import re

import msgspec

from core.allowance import NOTHING_SAID, UNBOUNDED, Allowance, Bounds, OutputPolicy
from core.ids import KeyId, TenantId
from core.safety.policy import Assigned
from core.tickets import Limits

KEY_ENTROPY_BYTES = 25  # 5 for the public part, 20 for the secret

_KEY = re.compile(r"hw_([a-z2-7]{8})_([a-z2-7]{32})_([0-9a-f]{6})")


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant as gateways cache it. `version` rises with every change."""

    id: TenantId
    name: str
    salt: bytes  # of its prefix blocks
    limits: Limits  # its tier's where it has none of its own, as all of these
    bounds: Bounds = UNBOUNDED
    key_allowance: Allowance = NOTHING_SAID  # of each key that has none of its own
    model_allowances: dict[str, Allowance] = {}
    output_policy: OutputPolicy = "clamp"
    weight: int
    hard_cap_micro: int | None  # None: post-paid without a cap
    price_book: str = "list"  # whose prices it pays; what the book leaves out is at list price
    tier: str = "standard"  # of prices
    billed: bool = True  # false: a model without a price is free, and not refused
    hard_capped: bool = False  # prepaid, or some hard limit is on the whole account
    overload_output_tokens: int = 0  # of an answer while others wait long; 0: it is not cut
    models: tuple[str, ...] | None = None  # the only names its keys may ask for; None: any
    safety: Assigned | None = None  # what is screened of its requests; None: nothing
    disabled: bool
    version: int


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An API key as gateways cache it."""

    id: KeyId
    tenant_id: TenantId
    name: str
    revoked: bool
    hard_capped: bool = False  # some hard limit is on this key
    allowance: Allowance = NOTHING_SAID  # its own, as that for models
    model_allowances: dict[str, Allowance] = {}
    models: tuple[str, ...] | None = None  # as its tenant's: both must allow a name
    version: int


def mint_key(entropy: bytes) -> str:
    """A new key's text, which is shown once and stored nowhere."""
    assert len(entropy) == KEY_ENTROPY_BYTES
    letters = base64.b32encode(entropy).decode().lower()
    body = f"hw_{letters[:8]}_{letters[8:]}"
    return f"{body}_{_check(body)}"


def well_formed(key: str) -> bool:
    """Whether this could be a key at all: its shape and check digits agree."""
    match = _KEY.fullmatch(key)
    return match is not None and _check(key[: match.end(2)]) == match.group(3)


def public_part(key: str) -> str:
    """`hw_abcdefgh`: enough for a person to tell keys apart."""
    return key[:11]


def key_digest(pepper: bytes, key: str) -> bytes:
    """What is stored and looked up: 32 bytes."""
    return hmac.new(pepper, key.encode(), hashlib.sha256).digest()


def _check(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:6]
