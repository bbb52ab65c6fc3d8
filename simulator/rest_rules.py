"""What must hold of every order once all is at rest: one end, in time, rightly paid."""

import msgspec

from core.ledger import Book
from core.money import EndCause, worst_case_micro
from core.requests import Row
from simulator.bank import PRICE
from simulator.exchange import OVERDUE_GRACE_MS
from simulator.generation import ABORT_MS
from simulator.orders import Order

# After its deadline and the grace, a request hears its abort out and tells its client.
LATE_MS = OVERDUE_GRACE_MS + 2 * ABORT_MS

PATIENCE_MS = 10_000  # when nothing goes wrong


class RestFacts(msgspec.Struct, frozen=True):
    """What orders are compared with."""

    book: Book
    dead_gateways: set[str]
    all_went_well: bool  # no fault was let loose


def order_problems(order: Order, facts: RestFacts) -> list[str]:
    """All that is wrong with it."""
    row = facts.book.rows.get(order.request_id)
    found = _ending_problems(order, facts) + _answer_problems(order)
    if row is None:
        if order.produced:
            found.append(f"{order.produced} tokens were produced for a request never reserved")
        return found
    found += _row_problems(order, row, facts)
    return found + _meter_problems(order, row) + _bill_problems(order, row)


def _ending_problems(order: Order, facts: RestFacts) -> list[str]:
    if not order.over:
        return ["starves"]
    if order.ended_ms > order.deadline_ms + LATE_MS:
        return [f"ended {order.ended_ms - order.deadline_ms} ms after its deadline"]
    if facts.all_went_well and order.ended_ms > order.arrived_ms + PATIENCE_MS:
        return [f"took {order.ended_ms - order.arrived_ms} ms though all went well"]
    return []


def _answer_problems(order: Order) -> list[str]:
    found: list[str] = []
    is_capped = order.profile.hard_cap_micro is not None
    whole = order.cause is EndCause.COMPLETE or (order.cause is EndCause.LENGTH and not is_capped)
    for choice, (got, expected) in enumerate(zip(order.got, order.expected, strict=True)):
        text, expected_text = order.got_text[choice], order.expected_text[choice]
        if got != expected[: len(got)] or not expected_text.startswith(text):
            found.append(f"choice {choice} is not the answer: {got}")
        if whole and (len(got) < len(expected) or text != expected_text):
            found.append(f"choice {choice} ended {order.cause} before its end")
    return found


def _row_problems(order: Order, row: Row, facts: RestFacts) -> list[str]:
    if row.cause is None:
        return ["is still open in the ledger"]
    if row.provisional:
        if row.asked.gateway_id not in facts.dead_gateways:
            return ["only the sweeper ended it, and its gateway lives"]
        return []
    if row.cause is EndCause.NOT_STARTED and not order.attempts:
        return []  # held and given back while the bank's answer was lost: never accepted
    if row.cause is not order.cause:
        return [f"ended {order.cause}, the ledger says {row.cause}"]
    return []


def _meter_problems(order: Order, row: Row) -> list[str]:
    metered, produced = row.metered.output_tokens, order.produced
    found: list[str] = []
    if metered > produced:
        found.append(f"metered {metered}, produced only {produced}")
    if order.journal_survived and metered != produced:
        found.append(f"metered {metered} of {produced} produced, and the journal survived")
    if order.delivered > metered and (order.journal_survived or not row.provisional):
        found.append(f"delivered {order.delivered}, metered only {metered}")
    if row.metered.prompt_tokens not in {0, len(order.prompt)}:
        found.append(f"metered {row.metered.prompt_tokens} prompt tokens of {len(order.prompt)}")
    return found


def _bill_problems(order: Order, row: Row) -> list[str]:
    found: list[str] = []
    got = sum(map(len, order.got))
    if row.cause is EndCause.COMPLETE and row.accepted_tokens != got:
        found.append(f"pays for {row.accepted_tokens} tokens, its answer has {got}")
    most = worst_case_micro(
        PRICE,
        prompt_tokens=len(order.prompt),
        output_tokens=order.sampling.max_tokens * order.choices,
    )
    if row.billed_micro > most:
        found.append(f"pays {row.billed_micro}, and what it asked for costs {most}")
    return found
