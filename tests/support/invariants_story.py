"""One of everything that happens to a ledger, in a fixed order, for a planted fault to meet."""

import secrets
from collections.abc import AsyncIterator

from core.caps import Period
from core.ledger import release
from core.metering import Adjust, AdjustmentKind, Reserve
from core.protocol import Usage
from tests.support.invariants_world import Strike, World
from tests.support.ledger_commands import (
    ODD_PRICE,
    a_reserve,
    a_settle,
    a_top_up,
    a_usage,
    a_witness,
    an_attempt,
)

CAPS = {"open": None, "capped": 500, "prepaid": None, "keyed": None}


def an_adjust(world: World, tenant: str, kind: str, amount: int = 0, **changes: str) -> Adjust:
    words = {"reason": "a test", "author": "tests", "id": f"adj_{secrets.token_hex(8)}"}
    return Adjust(
        tenant_id=world.tenants[tenant],
        kind=AdjustmentKind(kind),
        amount_micro=amount,
        **(words | changes),
    )


async def tell_it(world: World) -> AsyncIterator[str]:
    """Yields what has just happened, to be checked before the next."""
    await prepare(world)
    yield "prepared"
    asked = {name: _reserve(world, name) for name in CAPS}
    for name, word in asked.items():
        await world.say([word])
        yield f"reserved for {name}"
    for step in (_over_and_under, _refused, _swept, _operators):
        async for what in step(world, asked):
            yield what


async def prepare(world: World) -> None:
    """Credit for the prepaid, and caps of every period."""
    await world.set_prepaid("prepaid", prepaid=True)
    await world.say([an_adjust(world, "prepaid", "credit", 400)])
    await world.set_cap("keyed", "", Period.DAY, 600)
    await world.set_cap("keyed", "key_1", Period.MONTH, 500)
    await world.set_cap("keyed", "key_2", Period.TOTAL, 300)


async def _over_and_under(world: World, asked: dict[str, Reserve]) -> AsyncIterator[str]:
    word = asked["open"]
    await world.say(
        [a_top_up(word.request_id, tenant_id=word.tenant_id, total_micro=120)],
        Strike(fault="twice"),
    )
    yield "topped up, twice at once"
    much = a_settle(
        word.request_id, tenant_id=word.tenant_id, attempts=(an_attempt(a_usage(40, 0, 90)),)
    )
    await world.say([much], Strike(fault="twice"))
    yield "a bill over its reservation, twice at once"
    word = asked["capped"]
    await world.say([a_settle(word.request_id, tenant_id=word.tenant_id)])
    yield "a bill under it"
    await world.say([a_witness(word.request_id, usage=a_usage(10, 5, 20))])
    yield "a journal corrects it"
    word = asked["keyed"]
    await world.say([release(word.request_id, word.tenant_id, 2_000)])
    yield "released"
    await world.reuse(_reserve(world, "open", request_id=word.request_id, amount_micro=7))
    yield "an id used again"


async def _refused(world: World, asked: dict[str, Reserve]) -> AsyncIterator[str]:
    too_much = _reserve(world, "capped", amount_micro=2_000)
    await world.say([too_much])
    yield "refused"
    await world.set_hard_cap("capped", 5_000)
    await world.say([too_much])
    yield "still refused, when there is room"
    fill = _reserve(world, "prepaid", amount_micro=10_000, floor_micro=1)
    await world.say([fill])
    yield "all the credit there is"
    await world.say([_reserve(world, "prepaid", amount_micro=50)])
    yield "and no more"
    await world.say([_reserve(world, "capped"), _reserve(world, "capped")])
    yield "two in one batch"


async def _swept(world: World, asked: dict[str, Reserve]) -> AsyncIterator[str]:
    lost = _reserve(world, "open", gateway_id=world.gateway("unknown"))
    idle = _reserve(world, "keyed", gateway_id=world.gateway("unknown"))
    await world.say([lost, idle])
    await world.say([a_witness(lost.request_id, source="checkpoint", final=False, cause="")])
    yield "two of a gateway that is gone"
    await world.sweep()
    yield "swept"
    late = a_settle(
        lost.request_id,
        tenant_id=lost.tenant_id,
        attempts=(an_attempt(Usage(prompt_tokens=10, output_tokens=30)),),
    )
    await world.say([late])
    yield "its gateway speaks late"
    await world.say([a_settle(idle.request_id, tenant_id=idle.tenant_id)])
    yield "and of the other"


async def _operators(world: World, asked: dict[str, Reserve]) -> AsyncIterator[str]:
    request_id = asked["open"].request_id
    refund = an_adjust(world, "open", "refund", 10, request_id=request_id)
    await world.say([refund], Strike(fault="twice"))
    yield "refunded, twice at once"
    await world.say([refund])
    yield "and once more"
    await world.say(
        [an_adjust(world, "open", "reprice", request_id=request_id, price_id=ODD_PRICE.id)]
    )
    yield "repriced"
    await world.say([an_adjust(world, "open", "adjustment", -5)])
    yield "adjusted"


def _reserve(world: World, tenant: str, **changes: object) -> Reserve:
    words = {
        "request_id": f"{world.prefix}_{secrets.token_hex(4)}",
        "gateway_id": world.gateway("alive"),
        "tenant_id": world.tenants[tenant],
    }
    return a_reserve(**(words | changes))
