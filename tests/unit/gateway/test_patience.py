"""How long a request may take, whoever says so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import RefusedError
from gateway.patience import Bounds, Patience, bounded, patience, shortened

BOUNDS = Bounds(deadline_ms=600_000, first_token_ms=500_000, idle_ms=120_000)
UNHURRIED = Patience(whole_ms=600_000, first_token_ms=500_000, idle_ms=120_000)
SDK_DEFAULT = [(b"x-stainless-read-timeout", b"600")]


def header(name: str, value: str) -> list[tuple[bytes, bytes]]:
    return [(f"x-headworks-{name}".encode(), value.encode())]


def test_who_says_nothing_has_what_we_allow() -> None:
    assert patience([], BOUNDS) == UNHURRIED
    assert shortened(UNHURRIED, [], timeout_s=None, stream=False) == UNHURRIED


def test_each_header_bounds_its_own_part() -> None:
    assert patience(header("deadline-ms", "1000"), BOUNDS) == Patience(
        whole_ms=1000, first_token_ms=1000, idle_ms=1000
    )
    assert patience(header("first-token-ms", "700"), BOUNDS).first_token_ms == 700
    assert patience(header("idle-ms", "300"), BOUNDS).idle_ms == 300


def test_nobody_gets_more_than_we_or_the_tenant_allow() -> None:
    assert patience(header("deadline-ms", "999999999"), BOUNDS).whole_ms == 600_000
    assert patience(header("deadline-ms", "9000"), BOUNDS, tenant_ms_max=5000).whole_ms == 5000
    assert patience([], BOUNDS, tenant_ms_max=5000).whole_ms == 5000


def test_a_bound_found_later_shortens_it_too() -> None:
    assert bounded(UNHURRIED, 0) == UNHURRIED
    assert bounded(UNHURRIED, 700_000) == UNHURRIED
    assert bounded(UNHURRIED, 90).whole_ms == 90


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "", "soon", "9" * 13, "1 "])
@pytest.mark.parametrize("name", ["deadline-ms", "first-token-ms", "idle-ms"])
def test_a_header_that_is_no_number_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(RefusedError) as error:
        patience(header(name, value), BOUNDS)
    assert error.value.refusal.param == f"x-headworks-{name}"


def test_the_body_s_timeout_is_in_seconds() -> None:
    assert shortened(UNHURRIED, [], timeout_s=1.5, stream=True).whole_ms == 1500
    assert shortened(UNHURRIED, [], timeout_s=0.0001, stream=True).whole_ms == 1
    assert shortened(UNHURRIED, [], timeout_s=1e6, stream=True) == UNHURRIED


def test_an_sdk_s_read_timeout_bounds_a_whole_answer_and_no_stream() -> None:
    hint = [(b"x-stainless-read-timeout", b"2.5")]
    assert shortened(UNHURRIED, hint, timeout_s=None, stream=False).whole_ms == 2500
    assert shortened(UNHURRIED, hint, timeout_s=None, stream=True) == UNHURRIED


def test_an_sdk_s_default_changes_nothing() -> None:
    for stream in (True, False):
        assert shortened(UNHURRIED, SDK_DEFAULT, timeout_s=None, stream=stream) == UNHURRIED


@pytest.mark.parametrize("value", [b"", b"0", b"-1", b"nan", b"inf", b"1e3", b"\xff", b"9" * 10])
def test_a_hint_that_cannot_be_read_is_none(value: bytes) -> None:
    hint = [(b"x-stainless-read-timeout", value)]
    assert shortened(UNHURRIED, hint, timeout_s=None, stream=False) == UNHURRIED


@given(
    said=st.dictionaries(
        st.sampled_from(["deadline-ms", "first-token-ms", "idle-ms"]), st.integers(1, 10**12 - 1)
    ),
    hint=st.none() | st.integers(1, 10**6),
    timeout_s=st.none() | st.floats(0.001, 1e6),
    tenant_ms=st.integers(0, 10**6),
    stream=st.booleans(),
)
def test_nothing_a_caller_says_makes_a_request_live_longer(
    said: dict[str, int],
    hint: int | None,
    timeout_s: float | None,
    tenant_ms: int,
    *,
    stream: bool,
) -> None:
    headers = [pair for name, value in said.items() for pair in header(name, str(value))]
    if hint is not None:
        headers.append((b"x-stainless-read-timeout", str(hint).encode()))
    silent = patience([], BOUNDS, tenant_ms_max=tenant_ms)
    got = patience(headers, BOUNDS, tenant_ms_max=tenant_ms)
    got = shortened(got, headers, timeout_s=timeout_s, stream=stream)
    assert 0 < got.whole_ms <= silent.whole_ms
    assert 0 < got.first_token_ms <= silent.first_token_ms
    assert 0 < got.idle_ms <= silent.idle_ms
