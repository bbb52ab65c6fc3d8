"""Ledger commands as Hypothesis draws them: few ids and small numbers, so that they collide."""

import msgspec
from hypothesis import strategies as st

from core.caps import Period
from core.ledger import release
from core.metering import Adjust, AdjustmentKind, AttemptTotals, RequestTimings
from core.money import EndCause
from core.protocol import Usage
from tests.support.ledger_commands import PRICES, a_reserve, a_settle, a_top_up, a_witness

TENANTS = ("a", "b", "nobody")
HARD_CAPS = {"a": 500, "b": None}  # "nobody" has no account
REQUESTS = tuple(f"r{n}" for n in range(10))

requests = st.sampled_from(REQUESTS)
tenants = st.sampled_from((*"aaaabbb", "nobody"))
caps = st.one_of(st.none(), st.integers(0, 600))


@st.composite
def usages(draw):
    prompt, output = draw(st.integers(0, 40)), draw(st.one_of(st.just(0), st.integers(0, 60)))
    cached = draw(st.integers(0, prompt))
    write_5m = draw(st.one_of(st.just(0), st.integers(0, prompt - cached)))
    write_1h = draw(st.one_of(st.just(0), st.integers(0, prompt - cached - write_5m)))
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        cache_write_5m_tokens=write_5m,
        cache_write_1h_tokens=write_1h,
        output_tokens=output,
        reasoning_tokens=draw(st.one_of(st.just(0), st.integers(0, output))),
    )


@st.composite
def with_floor(draw, commands, amount):
    """A command that may do with less than it asks for."""
    command = draw(commands)
    floor = draw(st.one_of(st.none(), st.integers(0, getattr(command, amount))))
    return msgspec.structs.replace(command, floor_micro=floor)


def well_said(word):
    """Each kind with its own fields only."""
    of_request = word.kind in (AdjustmentKind.REFUND, AdjustmentKind.REPRICE)
    is_reprice = word.kind is AdjustmentKind.REPRICE
    amount = abs(word.amount_micro) + 1 if word.kind is AdjustmentKind.REFUND else word.amount_micro
    return msgspec.structs.replace(
        word,
        request_id=word.request_id if of_request else "",
        price_id=word.price_id if is_reprice else "",
        amount_micro=0 if is_reprice else amount,
    )


plain_reserves = st.builds(
    a_reserve,
    requests,
    tenant_id=tenants,
    amount_micro=st.integers(0, 150),
    price_id=st.sampled_from([*(price.id for price in PRICES * 4), "price_none"]),
    key_id=st.sampled_from(["key_1", "key_1", "key_2"]),
    stream=st.booleans(),
    choices=st.sampled_from([1, 1, 2]),
)
reserves = with_floor(plain_reserves, "amount_micro")
top_ups = with_floor(
    st.builds(a_top_up, requests, tenant_id=tenants, total_micro=st.integers(0, 300)),
    "total_micro",
)
adjustments = st.builds(
    Adjust,
    id=st.sampled_from([f"adj_{n}" for n in range(12)]),
    tenant_id=tenants,
    kind=st.sampled_from(AdjustmentKind),
    amount_micro=st.integers(-200, 600),
    request_id=requests,
    price_id=st.sampled_from([*(price.id for price in PRICES * 3), "price_none"]),
    reason=st.sampled_from(["goodwill", 'a "quoted", (odd) one\n\\']),
    author=st.just("admin"),
).map(well_said)
caps_set = st.tuples(
    st.sampled_from(["", "", "key_1", "key_2"]),
    st.sampled_from(Period),
    st.one_of(st.none(), st.integers(0, 300)),
    st.one_of(st.none(), st.integers(0, 500), st.integers(0, 500)),
)


@st.composite
def settles(draw):
    numbers = draw(st.lists(st.integers(1, 3), unique=True, max_size=3))
    attempts = tuple(
        AttemptTotals(attempt=n, replica_id=f"rep_{n}", usage=draw(usages())) for n in numbers
    )
    return a_settle(
        draw(requests),
        tenant_id=draw(tenants),
        cause=draw(st.sampled_from(EndCause)),
        attempts=attempts,
        delivered_tokens=0,
        timings=RequestTimings(queue_ms=draw(st.none() | st.floats(0, 1e6))),
        ended_ms=draw(st.integers(1_000, 9_000)),
    )


releases = st.builds(release, requests, tenants, st.integers(1_000, 9_000))


@st.composite
def witnesses(draw):
    source = draw(st.sampled_from(["journal", "journal", "checkpoint"]))
    final = source != "checkpoint" and draw(st.booleans())
    return a_witness(
        draw(requests),
        attempt=draw(st.integers(1, 3)),
        source=source,
        usage=draw(usages()),
        final=final,
        cause=draw(st.sampled_from(["complete", "aborted", "lost"])) if final else "",
    )


follow_ups = st.one_of(top_ups, settles(), settles(), releases, witnesses(), witnesses())
commands = st.one_of(reserves, reserves, follow_ups)


@st.composite
def batches(draw):
    """Commands of distinct requests, to be given at once."""
    batch = draw(st.lists(commands, min_size=2, max_size=5, unique_by=lambda c: c.request_id))
    return tuple(batch)
