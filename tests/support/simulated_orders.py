"""An order that went well, and the books that say so: what a test then spoils."""

from core.ledger import Book
from core.metering import AttemptTotals, RequestTimings, Reserve, Settle
from core.money import EndCause
from core.protocol import Sampling, Usage
from core.tickets import Limits
from simulator.bank import PRICE
from simulator.orders import Attempt, Order, Profile, an_order
from simulator.rest_rules import RestFacts

PROFILE = Profile(
    tenant="ten",
    salt=b"0123456789abcdef",
    limits=Limits(),
    weight=1,
    hard_cap_micro=None,
    gap_ms=1,
    service_class="standard",
)


def served() -> tuple[Order, RestFacts]:
    """An order that got its whole answer, and the books that say so."""
    order = an_order(
        "r1",
        PROFILE,
        (1, 2, 3),
        Sampling(seed=1, max_tokens=6, temperature=0.0),
        choices=1,
        context_tokens=96,
        deadline_ms=60_000,
        patience_ms=0,
        arrived_ms=1_000,
    )
    number = len(order.expected[0])
    order.attempts[1] = Attempt("w", {0: 0}, {0: number})
    order.got, order.got_text = [list(order.expected[0])], list(order.expected_text)
    order.delivered, order.ended_ms, order.cause = number, 2_000, EndCause.LENGTH
    book = Book([PRICE])
    book.open_account("ten", None)
    book.reserve(reserve())
    usage = Usage(prompt_tokens=3, output_tokens=number)
    book.settle(
        Settle(
            request_id="r1",
            tenant_id="ten",
            cause=EndCause.LENGTH,
            attempts=(AttemptTotals(attempt=1, replica_id="w", usage=usage),),
            delivered_tokens=number,
            timings=RequestTimings(),
            ended_ms=2_000,
        )
    )
    return order, RestFacts(book=book, dead_gateways=set(), all_went_well=True)


def reserve(request_id: str = "r1") -> Reserve:
    return Reserve(
        request_id=request_id,
        gateway_id="gw",
        tenant_id="ten",
        key_id="key",
        amount_micro=100,
        price_id=PRICE.id,
        model="m",
        version="v",
        region="local",
        service_class="standard",
        dialect="openai",
        endpoint="/",
        stream=True,
        prompt_tokens=3,
        max_tokens=6,
        created_ms=1_000,
    )
