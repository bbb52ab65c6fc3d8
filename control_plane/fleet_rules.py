"""Whether to believe a worker: pure judgements of its messages against the registry.

A replica id names a place, a boot id one life in it. Once a newer life has registered, an
older one is refused for ever: it may still hold the port, the old weights, or a stale mind.
"""

import re
from enum import Enum, auto

from core.fleet import Beat, Register
from store.fleet import CurrentBoot
from store.registry import Deployment

COUNT_MAX = 2**31 - 1  # of blocks, sequences, requests
SEQ_MAX = 2**63 - 1
AGE_MS_MAX = 366 * 86_400_000  # of a boot; and no drain lasts longer
REASON_CHARS_MAX = 200

# Ids travel in Valkey keys and URLs.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_URL = re.compile(r"https?://[^\s/]+")


def unsound_register(message: Register) -> str | None:
    """The field that cannot be what a worker means, or None."""
    capacity = message.capacity
    counts = {
        "capacity.kv_blocks": (capacity.kv_blocks, 0),
        "capacity.block_tokens": (capacity.block_tokens, 1),
        "capacity.context_tokens": (capacity.context_tokens, 1),
        "capacity.sequences": (capacity.sequences, 1),
    }
    for name in ("replica_id", "boot_id", "backend"):
        if not _ID.fullmatch(getattr(message, name)):
            return name
    if not _URL.fullmatch(message.url):
        return "url"
    if not 0 <= message.age_ms <= AGE_MS_MAX:
        return "age_ms"
    return _out_of_range(counts)


def unsound_beat(beat: Beat) -> str | None:
    """The field that cannot be what a worker means, or None."""
    if not 0 < beat.seq <= SEQ_MAX:
        return "seq"
    if not 0 <= beat.steps <= SEQ_MAX:
        return "steps"
    if not 0 <= (beat.drain_ms or 0) <= AGE_MS_MAX:
        return "drain_ms"
    if len(beat.drain_reason) > REASON_CHARS_MAX or (
        beat.drain_ms is not None and not beat.drain_reason
    ):
        return "drain_reason"
    counts = ("kv_blocks_free", "running", "waiting")
    return _out_of_range({name: (getattr(beat, name), 0) for name in counts})


def refuse_register(
    message: Register,
    *,
    deployment: Deployment | None,
    current: CurrentBoot | None,
    boot_known: bool,
) -> str | None:
    """Why this registration cannot stand, or None. The first reason in this order."""
    if deployment is None:
        return f"there is no deployment {message.deployment!r}"
    if message.region != deployment.region:
        return f"{deployment.name} is in region {deployment.region!r}, not {message.region!r}"
    if message.version != deployment.version:
        return f"{deployment.name} serves version {deployment.version}, not {message.version}"
    if boot_known and current is not None and current.boot_id != message.boot_id:
        return f"{message.boot_id} is an older life of {message.replica_id}"
    return None


class BeatVerdict(Enum):
    """What a heartbeat is worth."""

    TAKEN = auto()
    UNKNOWN = auto()  # register (again)
    STALE = auto()  # a newer one of this life came first; it proves nothing
    OLD_BOOT = auto()  # of a life that is over


def judge_beat(beat: Beat, *, current: CurrentBoot | None, boot_known: bool) -> BeatVerdict:
    """By whose it is, then by its order."""
    if current is None or current.boot_id != beat.boot_id:
        return BeatVerdict.OLD_BOOT if current and boot_known else BeatVerdict.UNKNOWN
    return BeatVerdict.TAKEN if beat.seq > current.beat_seq else BeatVerdict.STALE


def _out_of_range(counts: dict[str, tuple[int, int]]) -> str | None:
    for name, (value, least) in counts.items():
        if not least <= value <= COUNT_MAX:
            return name
    return None
