"""What keeps requests from a provider for a while, and which addresses one may have."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.providers import ProviderSettings, base_url_fault
from gateway.providers.faults import away, broken, busy
from gateway.providers.guard import KEY_RETRY_S, Guard
from gateway.providers.verdict import refused


def test_a_guard_waits_longer_each_time_and_forgets_when_it_gets_through() -> None:
    guard = Guard(ProviderSettings(failures=2, cooldown_ms=1_000, cooldown_max_ms=3_000))
    failure = away("x").fault

    def fails(now_s: float) -> None:
        assert guard.enter(now_s) is None
        guard.leave(now_s, failure)

    fails(0)
    fails(0)
    cooling = guard.enter(0.5)
    assert cooling is not None
    assert cooling.kind == "error"
    assert cooling.refusal.retry_after_ms == 1_000
    fails(1)  # the probe
    assert guard.enter(2.9) is not None
    assert guard.enter(3) is None
    assert guard.enter(3) is not None  # one probe at a time
    guard.leave(3, "unknown")
    fails(3)
    assert guard.enter(5.9) is not None  # 3 s at most, and not 4
    assert guard.enter(6) is None
    guard.leave(6, "answered")
    fails(6)
    assert guard.enter(6) is None  # one failure opens nothing again


def test_a_provider_without_room_is_left_alone_as_long_as_it_asks() -> None:
    guard = Guard(ProviderSettings(cooldown_ms=1_000))
    for _ in range(2):
        assert guard.enter(0) is None
    guard.leave(0, busy("x", 30_000).fault)
    guard.leave(1, busy("x", 40_000).fault)  # what was under way does not double it
    cooling = guard.enter(40)
    assert cooling is not None
    assert cooling.kind == "capacity"
    assert guard.enter(41) is None


def test_a_dead_key_is_tried_again_after_a_while_or_a_change() -> None:
    guard = Guard(ProviderSettings())
    assert guard.enter(0) is None
    guard.leave(0, refused(401, {}, b"").fault)
    assert [guard.key_dead] == [True]
    assert guard.enter(KEY_RETRY_S - 1) is not None
    assert guard.enter(KEY_RETRY_S) is None
    guard.leave(KEY_RETRY_S, "answered")
    assert [guard.key_dead] == [False]
    guard.renew(ProviderSettings())
    assert guard.enter(0) is None


class GuardMachine(RuleBasedStateMachine):
    """Whatever happens: it counts who is inside, and is never stuck for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.running = 0
        self.settings = ProviderSettings(failures=2, cooldown_ms=500, cooldown_max_ms=4_000)
        self.guard = Guard(self.settings)

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def ask(self) -> None:
        fault = self.guard.enter(self.now_s)
        self.running += fault is None
        assert fault is None or fault.refusal.status == 503

    @precondition(lambda self: self.running)
    @rule(end=st.sampled_from(["answered", "unknown", away("x").fault, broken("x").fault,
        busy("x", 9_000).fault, refused(403, {}, b"").fault]))  # fmt: skip
    def ends(self, end: Any) -> None:
        self.guard.leave(self.now_s, end)
        self.running -= 1

    @rule()
    def is_changed(self) -> None:
        self.guard.renew(self.settings)

    @invariant()
    def holds(self) -> None:
        assert self.guard.running == self.running

    def teardown(self) -> None:
        while self.running:
            self.ends("unknown")
        self.now_s += 300  # past every cooldown
        assert self.guard.enter(self.now_s) is None


TestGuard = GuardMachine.TestCase


@pytest.mark.parametrize(
    ("url", "allow_http", "sound"),
    [
        ("https://api.acme.test/v1/", False, True),
        ("https://[::1]:8443", False, True),
        ("http://127.0.0.1:1/v1", True, True),
        ("http://127.0.0.1:1/v1", False, False),
        ("ftp://a", True, False),
        ("https://", False, False),
        ("https://a@b", False, False),
        ("https://a:99999", False, False),
        ("https://a:0", False, False),
        ("https://a/?q", False, False),
        ("https://a/#f", False, False),
        ("https://é", False, False),
        ("https://a b", False, False),
        ("https://[::1", False, False),
        ("https://" + "a" * 600, False, False),
    ],
)
def test_an_address_is_sound_or_said_why_not(url, allow_http, sound) -> None:
    assert (base_url_fault(url, allow_http=allow_http) is None) == sound
