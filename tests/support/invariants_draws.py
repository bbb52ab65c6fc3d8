"""What the invariants' machine draws: few keys and small numbers, so that they collide."""

from hypothesis import strategies as st

from core.caps import Period
from core.metering import AttemptTotals, RequestTimings
from core.money import EndCause
from core.protocol import Usage
from tests.support.invariants_evidence import PROMPT_TOKENS_MAX
from tests.support.invariants_world import PROCESSES, Strike
from tests.support.ledger_commands import ODD_PRICE, PRICE

TENANTS = ("open", "capped", "prepaid", "keyed")
FAULTS = (
    ["none"] * 8
    + ["twice"] * 3
    + ["cut"] * 3
    + ["crash"] * 2
    + ["cancel", "terminate", "serialize"]
)

NEEDS = {"cut": "proxied", "serialize": "serializable"}

PLACES = [
    ("", Period.DAY),
    ("", Period.TOTAL),
    ("key_1", Period.MONTH),
    ("key_2", Period.TOTAL),
]

tenants = st.sampled_from((*TENANTS * 3, "nobody"))
keys = st.sampled_from(("key_1", "key_1", "key_2"))
gateways = st.sampled_from(("alive", "alive", "dying", "unknown"))
prices = st.sampled_from((PRICE.id, PRICE.id, ODD_PRICE.id, "price_none"))
amounts = st.integers(0, 150)
places = st.sampled_from(PLACES)
caps = st.none() | st.integers(0, 900)
ages_days = st.integers(0, 40).map(lambda months: 30 * months)
floors = st.none() | st.integers(0, 60)


@st.composite
def usages(draw):
    prompt = draw(st.integers(0, PROMPT_TOKENS_MAX))
    cached = draw(st.integers(0, prompt))
    written = draw(st.integers(0, prompt - cached))
    output = draw(st.just(0) | st.integers(0, 60))
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        cache_write_5m_tokens=written // 2,
        cache_write_1h_tokens=written - written // 2,
        output_tokens=output,
        reasoning_tokens=draw(st.integers(0, output)),
    )


@st.composite
def attempts(draw):
    numbers = draw(st.lists(st.integers(1, 2), unique=True, max_size=2))
    return tuple(
        AttemptTotals(attempt=n, replica_id=f"rep_{n}", usage=draw(usages())) for n in numbers
    )


@st.composite
def endings(draw):
    """All of a settlement but whose it is."""
    return {
        "cause": draw(st.sampled_from(EndCause)),
        "attempts": draw(attempts()),
        "delivered_tokens": 0,
        "timings": RequestTimings(queue_ms=draw(st.none() | st.floats(0, 1e6))),
        "ended_ms": draw(st.integers(1_000, 9_000)),
    }


@st.composite
def testimonies(draw, *sources):
    """All of a witness's word but of which request."""
    source = draw(st.sampled_from(sources or ["journal", "journal", "checkpoint"]))
    final = source != "checkpoint" and draw(st.booleans())
    return {
        "attempt": draw(st.integers(1, 2)),
        "source": source,
        "usage": draw(usages()),
        "final": final,
        "cause": draw(st.sampled_from(["complete", "aborted", "lost"])) if final else "",
    }


@st.composite
def strikes(draw):
    fault = draw(st.sampled_from(FAULTS))
    process = draw(st.sampled_from(PROCESSES))
    others = [name for name in PROCESSES if name != process]
    return Strike(
        fault=fault,
        process=NEEDS.get(fault, process),
        again=draw(st.sampled_from(others)),
        at=draw(st.integers(0, 9_999)),
        flag=draw(st.booleans()),
    )
