"""Takes workers' served journals into the ledger, and says how far it has come.

Every entry is a witness's absolute totals, so entries may come twice, late or in any order,
and of a life long over. A position is acknowledged only when everything up to it is
committed; an entry for a request we never heard of is counted and acknowledged too, for it
would be no better known tomorrow.
"""

import asyncio
from collections.abc import Iterator, Sequence

from control_plane.services import Services
from core.errors import Code, refuse
from core.fleet import Journal, JournalEntry, JournalReply
from core.metering import Witness
from store import fleet

TOKENS_MAX = 2**40  # of one attempt; more is a broken worker, not a long answer


async def take_journal(services: Services, message: Journal) -> JournalReply:
    """Raises RefusedError for a message too long or an entry that cannot be true."""
    entries = sorted(message.entries, key=lambda entry: entry.seq)
    limit = services.settings.journal_entries_max
    if len(entries) > limit:
        raise refuse(Code.TOO_LARGE, f"more than {limit} entries", param="entries")
    for entry in entries:
        _require_sound(entry)
    acked = await _acknowledge(services, message, 0)
    for chunk in chunks(entries, services.settings.journal_chunk):
        await _reconcile(services, message.replica_id, chunk)
        acked = await _acknowledge(services, message, chunk[-1].seq)
    return JournalReply(acked=acked)


def chunks(entries: Sequence[JournalEntry], size: int) -> Iterator[Sequence[JournalEntry]]:
    """In order, each at most `size` long."""
    for start in range(0, len(entries), size):
        yield entries[start : start + size]


def witness(replica_id: str, entry: JournalEntry) -> Witness:
    """The entry as the ledger hears it."""
    return Witness(
        request_id=entry.request_id,
        attempt=entry.attempt,
        source="journal",
        usage=entry.usage,
        final=entry.final,
        cause=entry.cause,
        replica_id=replica_id,
        at_ms=entry.at_ms,
    )


def is_sound(entry: JournalEntry) -> bool:
    """Whether these totals could be anyone's."""
    usage = entry.usage
    return (
        0 < entry.seq < TOKENS_MAX
        and 0 < entry.attempt <= 2**31 - 1
        and usage.is_possible
        and max(usage.prompt_tokens, usage.output_tokens) <= TOKENS_MAX
        and abs(entry.at_ms) < 2**53
    )


def _require_sound(entry: JournalEntry) -> None:
    # One bad row would fail the whole commit that it shares with others' money.
    if not is_sound(entry):
        raise refuse(
            Code.UNPROCESSABLE, f"entry {entry.seq} holds impossible numbers", param="entries"
        )


async def _reconcile(services: Services, replica_id: str, chunk: Sequence[JournalEntry]) -> None:
    """One group commit, more or less: all of them are on their way at once."""
    words = (services.ledger.reconcile(witness(replica_id, entry)) for entry in chunk)
    settled = await asyncio.gather(*words)
    known = sum(1 for answer in settled if answer is not None)
    services.metrics.journal_entries.labels("settled").inc(known)
    services.metrics.journal_entries.labels("noted").inc(len(chunk) - known)


async def _acknowledge(services: Services, message: Journal, acked: int) -> int:
    async with services.postgres.transaction() as conn:
        return await fleet.advance_journal(
            conn, boot_id=message.boot_id, replica_id=message.replica_id, acked=acked
        )
