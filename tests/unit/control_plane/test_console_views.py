"""What the console's pages show, from what the API answers."""

import json

from hypothesis import given
from hypothesis import strategies as st

from control_plane.ui import fleet_view, formats, pulse_view, rollout_view, tenant_view


def a_point(at_ms, **changes):
    return {
        "at_ms": at_ms, "requests": 4, "good": 3, "failed": 1, "filtered": 0, "prompt_tokens": 100,
        "cached_tokens": 50, "output_tokens": 60, "cost_micro": 120, "ttft_ms_p50": 40.0,
        "ttft_ms_p95": 90.0, "itl_ms_p50": 10.0, "itl_ms_p95": 20.0, "queue_ms_p95": 1.0,
    } | changes  # fmt: skip


def a_replica(name, **changes):
    return {
        "replica_id": name, "deployment": "a", "state": "ready", "kv_blocks": 100,
        "kv_blocks_free": 25, "running": 2, "waiting": 1,
    } | changes  # fmt: skip


def a_deployment(name, state="running"):
    return {"name": name, "desired_state": state}


def by_name(figures):
    return {figure.name: figure for figure in figures}


def test_the_last_minutes_are_told_in_numbers():
    points = [a_point(0), a_point(15_000, ttft_ms_p95=None, ttft_ms_p50=None)]
    told = by_name(pulse_view.pulse_figures(points, 60_000))
    assert told["Goodput"].value == "6/min"
    assert told["Goodput"].note == "8 requests ended"
    assert (told["Failed"].value, told["Failed"].tone) == ("25 %", "bad")
    assert told["TTFT p95"].value == "90 ms"
    assert told["Output"].value == "2/s"
    assert told["Per million"].value == "2.00"


def test_of_nothing_nothing_is_claimed():
    told = by_name(pulse_view.pulse_figures([], 60_000))
    unknown = ("Failed", "TTFT p95", "ITL p95", "Per million")
    assert {told[name].value for name in unknown} == {formats.NOTHING}
    assert told["Failed"].tone == ""


def test_steps_without_a_request_are_gaps_in_latencies_and_zeros_in_rates():
    picture = {
        "points": [a_point(15_000)], "from_ms": 0, "step_ms": 15_000, "as_of_ms": 50_000,
    }  # fmt: skip
    goodput, _, first, _ = pulse_view.pulse_charts(picture)
    assert goodput.times_s == [0, 15, 30]
    assert goodput.lines["good"] == [0, 0.2, 0]
    assert first.lines["p95"] == [None, 90.0, None]
    assert first.said == "Time to first token: p50 now 40, at most 40 ms; p95 now 90, at most 90 ms"
    assert json.loads(first.json)["lines"]["p50"] == [None, 40.0, None]


def test_a_chart_of_nothing_says_so():
    *_, between = pulse_view.pulse_charts(
        {"points": [], "from_ms": 0, "step_ms": 15, "as_of_ms": 60}
    )
    assert between.said == "Inter-token time: nothing measured"


def test_replicas_are_with_their_deployment_and_the_gone_come_last():
    replicas = [a_replica("1", state="lost"), a_replica("2"), a_replica("x", deployment="other")]
    empty, pool = fleet_view.pools([a_deployment("b"), a_deployment("a")], replicas)[::-1]
    assert [r["replica_id"] for r in pool.replicas] == ["2", "1"]
    assert (pool.ready, pool.running, pool.waiting, pool.kv_used) == (1, 2, 1, 0.75)
    assert (pool.tone, empty.tone, empty.kv_used) == ("good", "bad", None)


def test_a_deployment_that_nobody_wants_needs_nobody():
    (pool,) = fleet_view.pools([a_deployment("a", "draining")], [])
    assert pool.tone == ""


def test_the_fleet_is_red_where_a_deployment_has_no_replica_and_full_where_it_is():
    full = a_replica("1", kv_blocks_free=1)
    pools = fleet_view.pools([a_deployment("a"), a_deployment("b")], [full])
    told = by_name(fleet_view.fleet_figures(pools))
    assert told["Replicas ready"].note == "1 of 2 deployments have none"
    assert told["Replicas ready"].tone == "bad"
    assert (told["KV in use"].value, told["KV in use"].tone) == ("99 %", "warn")
    calm = by_name(fleet_view.fleet_figures([]))
    assert (calm["Replicas ready"].tone, calm["KV in use"].value) == ("", formats.NOTHING)


def test_usage_has_every_day_up_to_now():
    day = tenant_view.DAY_MS
    total = {"bucket_ms": 2 * day, "prompt_tokens": 7, "output_tokens": 3}
    found = {"totals": [total], "from_ms": day, "to_ms": 31 * day, "fresh_as_of_ms": 4 * day + 5}
    chart = tenant_view.usage_chart(found)
    assert chart.times_s == [86_400 * n for n in (1, 2, 3, 4)]
    assert chart.lines == {"prompt": [0, 7, 0, 0], "output": [0, 3, 0, 0]}
    assert tenant_view.usage_chart(found | {"totals": []}).lines["prompt"] == [0, 0, 0, 0]


def test_a_route_is_told_in_a_line():
    assert tenant_view.route_summary({"alias": "big"}) == "alias of big"
    assert tenant_view.route_summary({"targets": []}) == ""
    targets = [{"deployment": "a", "weight": 3}, {"provider": "p", "model": "m"}]
    told = tenant_view.route_summary({"targets": targets, "fallbacks": [{}]})
    assert told == "a 75 %, p/m 25 % · 1 fallbacks"


def a_side(**changes):
    spread = {"count": 3, "mean": 20.0, "p50": 20.0, "p95": 30.0}
    names = ("first_token_ms", "inter_token_ms", "output_tokens", "cost_micro")
    causes = {"complete": 3, "length": 1}
    return dict.fromkeys(names, spread) | {
        "requests": 4, "error_rate": 0.0, "causes": causes,
    } | changes  # fmt: skip


def test_a_rollouts_sides_stand_beside_each_other():
    none = {"count": 0, "mean": None, "p50": None, "p95": None}
    stable = a_side(requests=0, error_rate=None, causes={}, first_token_ms=none)
    rows = {row.name: row for row in rollout_view.sides({"canary": a_side(), "stable": stable})}
    assert (rows["Errors"].canary, rows["Errors"].stable) == ("0 %", formats.NOTHING)
    assert (rows["TTFT p95"].canary, rows["TTFT p95"].stable) == ("30 ms", formats.NOTHING)
    assert rows["Cut by length"].canary == "25 %"
    assert rows["Cut by length"].stable == formats.NOTHING


def test_limits_that_say_nothing_are_not_told():
    said = {
        "tenant": {"requests_per_minute": 60, "concurrency": None, "flag": True},
        "models": {"tiny": {"concurrency": 2, "none": 0}},
    }
    assert tenant_view.held(said) == [
        ("requests per minute", "60"),
        ("models: tiny concurrency", "2"),
    ]


@given(value=st.floats(0, 1e15))
def test_numbers_stay_short(value):
    assert len(formats.count(value)) <= len("1000000B")
    assert len(formats.milliseconds(value)) < 20
    assert len(formats.duration(value)) < 30


@given(micro=st.integers(-(10**18), 10**18))
def test_money_is_never_told_with_an_exponent(micro):
    assert "e" not in formats.money(micro)


def test_short_forms():
    assert formats.moment("2026-03-01T00:00:00.123Z") == "2026-03-01 00:00:00"
    assert formats.moment(None) == formats.short("") == formats.share(None) == formats.NOTHING
    assert formats.moment(1_772_323_200_000) == "2026-03-01 00:00:00"
    assert formats.short("ten_1") == "ten_1"
    assert formats.rate(0.5) == "30/min"
    assert (formats.rate(12), formats.share(0.004)) == ("12/s", "0.4 %")
    assert [formats.milliseconds(ms) for ms in (0.4, 1_500, 90_000)] == [
        "0.4 ms",
        "1.50 s",
        "90.0 s",
    ]
    assert [formats.duration(ms) for ms in (None, 4e2, 65e3, 73e5, 2e8)] == [
        formats.NOTHING, "0 s", "1 min 5 s", "2 h 1 min", "2 d 7 h",
    ]  # fmt: skip
    assert [formats.money(m) for m in (None, 0, 9, 12_346, 12_345_678_900)] == [
        formats.NOTHING, "0.00", "0.000009", "0.01235", "12,345.68",
    ]  # fmt: skip
    assert [formats.count(n) for n in (None, 0.25, 999_999)] == [formats.NOTHING, "0.25", "1000k"]
    assert formats.short("0123456789abcdef") == "0123456789…"
