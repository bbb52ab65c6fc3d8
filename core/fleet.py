"""What workers and the control plane say to each other, as JSON over HTTP.

    POST /fleet/register  Register  -> Registered    at start, and when a beat says UNKNOWN
    POST /fleet/beat      Beat      -> BeatReply     every `beat_interval_ms`
    POST /fleet/journal   Journal   -> JournalReply  when there is something unacknowledged

All carry an internal token for audience `control-plane`. A boot id is one life of one worker
process: messages of an older life are refused with 409.
"""

from enum import StrEnum

import msgspec

from core.protocol import Timings, Usage


class ReplicaState(StrEnum):
    """Life of a replica. Only READY ones are placed on."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    SLEEPING = "sleeping"
    DRAINING = "draining"
    STOPPED = "stopped"
    LOST = "lost"


class Capacity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one replica can hold."""

    kv_blocks: int
    block_tokens: int
    context_tokens: int
    sequences: int


class Register(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker announces itself. `deployment` is the name it was started to serve.

    Before its weights are loaded it holds nothing: `capacity.kv_blocks` is 0, and it registers
    again when it knows.
    """

    replica_id: str
    boot_id: str
    url: str
    deployment: str
    region: str
    version: str
    state: ReplicaState
    capacity: Capacity
    backend: str = "headworks"
    can_resume: bool = True
    age_ms: int = 0  # of this boot: cold starts are measured from its beginning


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """`journal_acked` is the last journal sequence of this boot already taken."""

    beat_interval_ms: int
    journal_acked: int


class Beat(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Absolute state; `seq` rises within a boot."""

    replica_id: str
    boot_id: str
    seq: int
    state: ReplicaState
    kv_blocks_free: int
    running: int
    waiting: int
    steps: int  # engine steps so far: health is progress, not an open port
    drain_reason: str = ""  # why it drains, where it was told so itself: a machine taken back
    drain_ms: int | None = None  # that it still has for it


class BeatReply(msgspec.Struct, frozen=True, kw_only=True):
    """`known` false: register again. `drain` true: finish what runs within `drain_ms`, and stop.

    Null is the worker's own bound.
    """

    known: bool
    drain: bool = False
    drain_ms: int | None = None


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attempt's absolute totals as the engine knows them.

    `final` is false for progress, true for the last word. `cause` is empty until then:
    complete, aborted, expired, failed, or `lost` (written by the worker's next life about
    an attempt that the previous one did not end).
    """

    seq: int
    request_id: str
    attempt: int
    usage: Usage
    final: bool
    cause: str = ""
    timings: Timings = Timings()
    at_ms: int = 0


class Journal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Entries in `seq` order. `boot_id` is the life that wrote them, which may be an old one."""

    replica_id: str
    boot_id: str
    entries: tuple[JournalEntry, ...]


class JournalReply(msgspec.Struct, frozen=True, kw_only=True):
    """Everything up to and including `acked` is in Postgres and may be trimmed."""

    acked: int
