"""Ledger commands as Hypothesis draws them: few ids and small numbers, so that they collide."""

from hypothesis import strategies as st

from core.ledger import release
from core.metering import AttemptTotals, RequestTimings
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
    prompt = draw(st.integers(0, 40))
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=draw(st.integers(0, prompt)),
        output_tokens=draw(st.one_of(st.just(0), st.integers(0, 60))),
    )


reserves = st.builds(
    a_reserve,
    requests,
    tenant_id=tenants,
    amount_micro=st.integers(0, 150),
    price_id=st.sampled_from([*(price.id for price in PRICES * 4), "price_none"]),
    key_id=st.sampled_from(["key_1", "key_1", "key_2"]),
    stream=st.booleans(),
    choices=st.sampled_from([1, 1, 2]),
)
top_ups = st.builds(a_top_up, requests, tenant_id=tenants, total_micro=st.integers(0, 300))


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
    source = draw(st.sampled_from(["journal", "journal", "checkpoint", "gateway"]))
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
