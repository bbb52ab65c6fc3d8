"""Verdicts: what of a metric is tolerated, against what is certain of both sides at one look.

    fail          the canary's lower bound is above what the stable's upper bound tolerates
    pass          the canary's upper bound is within what the stable's lower bound tolerates
    inconclusive  anything else; nothing measured is never a pass

Looks are taken again and again, so their chances of error must add up to what was allowed. Look
k of a window has `1/(k(k+1))` of it, which over all looks sums to one; and looks are due by
growth of the sample, so that k stays small. What is allowed of false alarms is shared so among
windows too, and evenly among all gates that could raise one; what may be missed is allowed at
every step, since a canary must pass them all. Nothing is assumed of how looks depend on each
other: chances are summed.
"""

from control_plane.rollouts.evidence import (
    COVERED_LEAST,
    HISTOGRAMS,
    Chances,
    Pair,
    distance,
    means,
    pair,
    quantiles,
    rates,
)
from control_plane.rollouts.plan import Gate, Metric, Plan
from control_plane.rollouts.samples import Side
from control_plane.rollouts.state import Bounds, Outcome, Verdict

P95 = 0.95
LOOKS_MAX = 200
RATE = "exact binomial bounds (Clopper-Pearson)"
QUANTILE = "distribution-free bounds of a quantile (order statistics)"
MEAN = "bounds of a mean within the DKW band (Anderson)"
SHAPE = "Kolmogorov-Smirnov distance within DKW bands"
UNITS: dict[Metric, str] = {
    "first_token_p95": " ms",
    "inter_token_p95": " ms",
    "tokens_mean": " tokens",
    "cost_mean": " micro-units",
}
WORDS: dict[Metric, str] = {
    "errors": "error rate",
    "truncated": "truncation rate",
    "filtered": "filtered rate",
    "refused": "refusal rate",
    "cancelled": "rate of clients that left",
    "unfinished": "requests still open",
    "first_token_p95": "time to first token, p95",
    "inter_token_p95": "time between tokens, p95",
    "output_tokens": "distribution of answer lengths",
    "tokens_mean": "tokens per request",
    "cost_mean": "cost per request",
}


def look_due(requests: int, least: int, growth: float) -> int:
    """The number of the latest look that so many requests allow; 0: too few for any."""
    look, needed = 0, float(least)
    while requests >= needed and look < LOOKS_MAX:
        look += 1
        needed *= growth
    return look


def chances(plan: Plan, window: int, look: int) -> Chances:
    """Of one gate at one look."""
    acting = sum(gate.role != "told" for gate in plan.gates)
    looks, windows = look * (look + 1), window * (window + 1)
    return Chances(
        fail=plan.rules.false_alarm / (acting * looks * windows),
        passing=plan.rules.missed / looks,
    )


def judge(plan: Plan, canary: Side, stable: Side, *, window: int, look: int) -> tuple[Verdict, ...]:
    """Every gate's verdict, in the plan's order."""
    allowed = chances(plan, window, look)
    return tuple(_verdict(gate, pair(gate.metric, canary, stable), allowed) for gate in plan.gates)


def outcome(verdicts: tuple[Verdict, ...]) -> Outcome:
    """Of all gates: failed by one that acts, passed by all that decide."""
    if any(v.outcome == "fail" and v.role != "told" for v in verdicts):
        return "fail"
    deciding = [v for v in verdicts if v.role == "decides"]
    return "pass" if deciding and all(v.outcome == "pass" for v in deciding) else "inconclusive"


def told(verdicts: tuple[Verdict, ...], wanted: Outcome) -> tuple[str, ...]:
    """The sentences behind an outcome: of the gates that make it."""
    makes = ("decides", "guards") if wanted == "fail" else ("decides",)
    return tuple(v.reason for v in verdicts if v.outcome == wanted and v.role in makes)


def _verdict(gate: Gate, both: Pair | None, allowed: Chances) -> Verdict:
    word = WORDS[gate.metric]
    if both is None:
        return Verdict(
            metric=gate.metric,
            role=gate.role,
            outcome="inconclusive",
            reason=f"{word}: not measured on both sides",
            test="none",
        )
    if both.covered < COVERED_LEAST:
        return Verdict(
            metric=gate.metric,
            role=gate.role,
            outcome="inconclusive",
            reason=f"{word}: only {both.covered:.0%} of the canary's requests are like any of the "
            "stable's",
            test="none",
        )
    if gate.metric == "output_tokens":
        return _shape(gate, both, allowed)
    return _compared(gate, both, allowed)


def _shape(gate: Gate, both: Pair, allowed: Chances) -> Verdict:
    gap = distance(both, allowed)
    found: Outcome = "inconclusive"
    if gap.low > gate.plus:
        found = "fail"
    elif gap.high < gate.plus:
        found = "pass"
    reason = (
        f"{WORDS[gate.metric]}: {both.canary.size:.0f} of the canary and {both.stable.size:.0f} of "
        f"the stable are {gap.value:.3f} apart ({gap.low:.3f} to {gap.high:.3f}); "
        f"{gate.plus:.3f} is tolerated: {found}"
    )
    return Verdict(
        metric=gate.metric,
        role=gate.role,
        outcome=found,
        reason=reason,
        test=SHAPE,
        canary=gap,
    )


def _compared(gate: Gate, both: Pair, allowed: Chances) -> Verdict:
    if gate.metric not in HISTOGRAMS:
        (canary, stable), test = rates(both, allowed), RATE
    elif gate.metric in {"first_token_p95", "inter_token_p95"}:
        (canary, stable), test = quantiles(both, P95, allowed), QUANTILE
    else:
        (canary, stable), test = means(both, allowed), MEAN
    found: Outcome = "inconclusive"
    if canary.low > tolerated(gate, stable.high):
        found = "fail"
    elif canary.high < tolerated(gate, stable.low):
        found = "pass"
    reason = (
        f"{WORDS[gate.metric]}: canary {_said(gate.metric, canary)}, "
        f"stable {_said(gate.metric, stable)}; up to "
        f"{_number(gate.metric, tolerated(gate, stable.value))} is tolerated: {found}"
    )
    return Verdict(
        metric=gate.metric,
        role=gate.role,
        outcome=found,
        reason=reason,
        test=test,
        canary=canary,
        stable=stable,
    )


def tolerated(gate: Gate, stable: float) -> float:
    """The most that a canary's metric may be beside such a stable's."""
    return stable * (1 + gate.ratio) + gate.plus


def _said(metric: Metric, bounds: Bounds) -> str:
    low, high = _number(metric, bounds.low), _number(metric, bounds.high)
    return f"{_number(metric, bounds.value)} ({low} to {high}, of {bounds.size:.0f})"


def _number(metric: Metric, value: float) -> str:
    return f"{value:.1f}{UNITS[metric]}" if metric in UNITS else f"{value:.2%}"
