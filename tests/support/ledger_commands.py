"""Builders of ledger commands with defaults, so that a test states only what it is about."""

from typing import Any

from core.metering import AttemptTotals, RequestTimings, Reserve, Settle, TopUp, Witness
from core.money import EndCause, Price
from core.protocol import Usage

PRICE = Price(
    id="price_test", input_micro=1_000_000, cached_input_micro=100_000, output_micro=2_000_000
)
# Rounds, and charges for the request itself.
ODD_PRICE = Price(
    id="price_odd",
    input_micro=333_333,
    cached_input_micro=77,
    output_micro=1_499_999,
    request_micro=5,
)
PRICES = [PRICE, ODD_PRICE]


def a_reserve(request_id: str = "req_1", **changes: Any) -> Reserve:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "gateway_id": "gw_1",
        "tenant_id": "ten_1",
        "key_id": "key_1",
        "amount_micro": 100,
        "price_id": PRICE.id,
        "model": "smol",
        "version": "v1",
        "region": "local",
        "service_class": "standard",
        "dialect": "openai",
        "endpoint": "/v1/chat/completions",
        "stream": True,
        "prompt_tokens": 10,
        "max_tokens": 45,
        "choices": 1,
        "created_ms": 1_000,
    }
    return Reserve(**(fields | changes))


def a_top_up(request_id: str = "req_1", **changes: Any) -> TopUp:
    fields: dict[str, Any] = {"tenant_id": "ten_1", "total_micro": 200}
    return TopUp(request_id=request_id, **(fields | changes))


def a_usage(prompt: int = 10, cached: int = 0, output: int = 20) -> Usage:
    return Usage(prompt_tokens=prompt, cached_tokens=cached, output_tokens=output)


def an_attempt(usage: Usage | None = None, *, attempt: int = 1) -> AttemptTotals:
    return AttemptTotals(attempt=attempt, replica_id="rep_1", usage=usage or a_usage())


def a_settle(request_id: str = "req_1", **changes: Any) -> Settle:
    fields: dict[str, Any] = {
        "tenant_id": "ten_1",
        "cause": EndCause.COMPLETE,
        "attempts": (an_attempt(),),
        "delivered_tokens": 20,
        "timings": RequestTimings(queue_ms=1.5, first_token_ms=20.0, total_ms=99.25),
        "ended_ms": 2_000,
    }
    return Settle(request_id=request_id, **(fields | changes))


def a_witness(request_id: str = "req_1", **changes: Any) -> Witness:
    fields: dict[str, Any] = {
        "attempt": 1,
        "source": "journal",
        "usage": a_usage(),
        "final": True,
        "cause": "complete",
        "replica_id": "rep_1",
        "at_ms": 3_000,
    }
    return Witness(request_id=request_id, **(fields | changes))
