"""What was said of a request, by whom, and what follows: its metered totals.

Witnesses tell absolute totals of one attempt, in any order and any number of times. Honest
ones only ever say too little, so of two words about the same the larger stands; a journal that
saw the end itself is exact and overrules the rest.
"""

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from core.metering import Witness
from core.protocol import Usage

LOST_IN_JOURNAL = "lost"  # a journal's word on an attempt that its worker did not live to end


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """All that one source has said of one attempt."""

    usage: Usage
    exact: bool = False  # a journal's own last word: nothing overrules it
    final: bool = False
    cause: str = ""
    replica_id: str = ""
    at_ms: int = 0


Said: TypeAlias = tuple[int, str, Heard]  # about an attempt, by a source


def heard_from(witness: Witness) -> Heard:
    """A witness's word.

    Only a journal that saw the end itself is exact: the `lost` that a worker's next life
    writes is a lower bound, up to one flush behind.
    """
    is_journal = witness.source == "journal"
    return Heard(
        usage=witness.usage,
        exact=is_journal and witness.final and witness.cause != LOST_IN_JOURNAL,
        final=witness.final,
        cause=witness.cause,
        replica_id=witness.replica_id,
        at_ms=witness.at_ms,
    )


def merge(one: Heard, other: Heard) -> Heard:
    """What a source has said in all: an exact word replaces the rest, else the largest totals.

    Commutative, associative and idempotent, so that order and repetition do not matter.
    """
    if one.exact != other.exact:
        return one if one.exact else other
    return Heard(
        usage=largest((one.usage, other.usage)),
        exact=one.exact,
        final=one.final or other.final,
        cause=max(one.cause, other.cause),
        replica_id=max(one.replica_id, other.replica_id),
        at_ms=max(one.at_ms, other.at_ms),
    )


def largest(usages: Iterable[Usage]) -> Usage:
    """The fullest word on the prompt and the fullest on the output.

    Each is taken whole: parts from two words need not fit into one prompt. A prompt that was
    read further comes first, then one of which more was found in cache.
    """
    usages = list(usages)
    prompt, cached, write_1h, write_5m = max(map(_prompt_part, usages))
    output, reasoning = max((usage.output_tokens, usage.reasoning_tokens) for usage in usages)
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        cache_write_1h_tokens=write_1h,
        cache_write_5m_tokens=write_5m,
        output_tokens=output,
        reasoning_tokens=reasoning,
    )


def metered(said: Iterable[Said]) -> Usage:
    """A request's totals from all that was said of it.

    Within an attempt: the exact word if there is one, else the largest. Over attempts: output
    tokens add up, since each attempt produces its own; the prompt counts once, from the
    attempt that read the most of it and, among equals, found the most in cache, so that a
    retry never costs the tenant more.
    """
    totals = list(_attempt_totals(said).values())
    if not totals:
        return Usage()
    return msgspec.structs.replace(
        largest(totals),
        output_tokens=sum(total.output_tokens for total in totals),
        reasoning_tokens=sum(total.reasoning_tokens for total in totals),
    )


def accepted_tokens(said: Iterable[Said]) -> int:
    """The output that the gateway says it accepted, of each attempt within what was metered.

    An attempt that it does not speak of brought it nothing.
    """
    said = list(said)
    own = {
        attempt: heard.usage.output_tokens for attempt, source, heard in said if source == "gateway"
    }
    return sum(
        min(own.get(attempt, 0), total.output_tokens)
        for attempt, total in _attempt_totals(said).items()
    )


def _attempt_totals(said: Iterable[Said]) -> dict[int, Usage]:
    attempts: dict[int, list[Heard]] = {}
    for attempt, _, heard in said:
        attempts.setdefault(attempt, []).append(heard)
    return {attempt: _attempt_total(words) for attempt, words in attempts.items()}


def _attempt_total(words: list[Heard]) -> Usage:
    exact = [word.usage for word in words if word.exact]
    return largest(exact or [word.usage for word in words])


def _prompt_part(usage: Usage) -> tuple[int, int, int, int]:
    return (
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.cache_write_1h_tokens,
        usage.cache_write_5m_tokens,
    )
