"""What makes two requests the same for a replica that dies of one: a keyed hash, never the text.

The seed is left out, which the gateway draws where the client sets none, and so is how long an
answer may be: what ends a process is rarely the dice, and comes before the end.
"""

import hashlib
import hmac

import msgspec

from gateway.relay.job import Job

DIGEST_BYTES = 16

_encode = msgspec.msgpack.Encoder().encode


def fingerprint(key: bytes, job: Job) -> str:
    """Of the tenant, the version, the prompt and the sampling."""
    sampling = msgspec.structs.replace(job.sampling, seed=0, max_tokens=0, min_tokens=0)
    said = _encode((job.arm.tenant, job.model.version, job.choices, sampling, job.prompt_ids))
    return hmac.digest(key, said, hashlib.sha256)[:DIGEST_BYTES].hex()
