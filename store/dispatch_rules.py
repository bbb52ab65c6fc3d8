"""Bounds of one gateway's side of dispatch, and the clock that its deadlines are told on."""

import time

import msgspec

from core.dispatch import PoolRules
from core.limits import LimitRules


class DispatchRules(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one gateway's side, and the rules that decisions go by."""

    renew_ms: int = 500
    charge_ms: int = 100
    report_ms: int = 50  # how soon a replica's report is passed on while tickets wait
    call_timeout_ms: int = 1_000
    in_flight_max: int = 16_384  # calls unanswered
    batch_max: int = 256  # tickets told of in one call
    strays_max: int = 64  # cancels under way of tickets nobody here knows
    scopes_remembered_max: int = 40_000  # whose rooms are kept for when Valkey is away
    close_ms: int = 2_000
    alone_ms: int = 250  # at least, once Valkey failed: one that comes and goes is no help
    pool: PoolRules = PoolRules()
    limits: LimitRules = LimitRules()


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000
