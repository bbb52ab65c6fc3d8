"""Identifiers: what they look like, and how each is made from given entropy.

An id is text with a prefix that names its kind, so that one pasted into the wrong place is
seen at once. Making one takes entropy as bytes: this module rolls no dice.
"""

from typing import NewType

TenantId = NewType("TenantId", str)
KeyId = NewType("KeyId", str)
RequestId = NewType("RequestId", str)
ReplicaId = NewType("ReplicaId", str)
BootId = NewType("BootId", str)
GatewayId = NewType("GatewayId", str)
VersionHash = NewType("VersionHash", str)
PoolId = NewType("PoolId", str)

ENTROPY_BYTES = 12
REQUEST_ENTROPY_BYTES = 8
TIME_MS_MAX = (1 << 48) - 1


def tenant_id(entropy: bytes) -> TenantId:
    """`ten_` and 24 hex digits."""
    return TenantId(f"ten_{_hex(entropy)}")


def key_id(entropy: bytes) -> KeyId:
    """`key_` and 24 hex digits: the public name of an API key, safe to log."""
    return KeyId(f"key_{_hex(entropy)}")


def request_id(region: str, entropy: bytes, now_ms: int) -> RequestId:
    """`req_<region>_` and 28 hex digits: 12 of the Unix millisecond, 16 of entropy.

    Ours alone, never taken from a client's header. Ids made together lie together in an index,
    and say by themselves in which month their request is kept.
    """
    assert len(entropy) == REQUEST_ENTROPY_BYTES, "a request id takes REQUEST_ENTROPY_BYTES bytes"
    assert 0 <= now_ms <= TIME_MS_MAX
    return RequestId(f"req_{region}_{now_ms:012x}{entropy.hex()}")


def boot_id(entropy: bytes) -> BootId:
    """`boot_` and 24 hex digits: one life of one worker process."""
    return BootId(f"boot_{_hex(entropy)}")


def gateway_id(entropy: bytes) -> GatewayId:
    """`gw_` and 24 hex digits: one incarnation of one gateway process."""
    return GatewayId(f"gw_{_hex(entropy)}")


def pool_id(deployment: str, region: str) -> PoolId:
    """The unit of dispatch, and the hash tag of its keys: one deployment in one region."""
    return PoolId(f"{deployment}@{region}")


def _hex(entropy: bytes) -> str:
    assert len(entropy) == ENTROPY_BYTES, "an id takes exactly ENTROPY_BYTES bytes"
    return entropy.hex()
