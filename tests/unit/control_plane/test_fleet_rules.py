"""Which messages of workers are believed."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.fleet_rules import (
    COUNT_MAX,
    BeatVerdict,
    judge_beat,
    refuse_register,
    unsound_beat,
    unsound_register,
)
from core.fleet import Capacity, ReplicaState
from store.fleet import CurrentBoot
from store.registry import Deployment, DesiredState
from tests.support.registry import a_beat, a_register

DEPLOYMENT = Deployment(
    name="smol-a",
    version="v1",
    region="local",
    desired_state=DesiredState.RUNNING,
    created_ms=0,
)


def boot(boot_id="boot_1", seq=0):
    return CurrentBoot(boot_id=boot_id, state=ReplicaState.READY, beat_seq=seq)


def reason(message=None, *, deployment=DEPLOYMENT, current=None, boot_known=False):
    return refuse_register(
        message or a_register(), deployment=deployment, current=current, boot_known=boot_known
    )


def test_a_first_registration_stands():
    assert reason() is None


def test_the_same_life_may_register_again():
    assert reason(current=boot(), boot_known=True) is None


def test_a_new_life_replaces_the_old_one():
    assert reason(a_register(boot_id="boot_2"), current=boot()) is None


def test_an_older_life_is_refused_for_ever():
    assert "older life" in reason(current=boot("boot_2"), boot_known=True)


def test_a_life_whose_row_was_forgotten_may_come_back():
    assert reason(current=None, boot_known=True) is None


def test_refusals_come_in_order():
    message = a_register(region="far", version="v2")
    old = {"current": boot("boot_2"), "boot_known": True}
    assert "no deployment" in reason(message, deployment=None, **old)
    assert "region" in reason(message, **old)
    assert "version" in reason(a_register(version="v2"), **old)


def test_other_weights_on_the_same_port_are_refused():
    assert reason(a_register(version="v2"), current=boot()) == "smol-a serves version v1, not v2"


@given(seqs=st.lists(st.integers(1, 20), max_size=30))
def test_beats_are_taken_in_rising_order_only(seqs):
    latest = 0
    for seq in seqs:
        verdict = judge_beat(a_beat(seq=seq), current=boot(seq=latest), boot_known=True)
        assert verdict is (BeatVerdict.TAKEN if seq > latest else BeatVerdict.STALE)
        latest = max(latest, seq)


@pytest.mark.parametrize(
    ("current", "boot_known", "verdict"),
    [
        (None, False, BeatVerdict.UNKNOWN),
        (None, True, BeatVerdict.UNKNOWN),  # its row was forgotten: it may register again
        (boot("boot_2"), False, BeatVerdict.UNKNOWN),  # a life we have yet to hear of
        (boot("boot_2"), True, BeatVerdict.OLD_BOOT),
        (boot(), True, BeatVerdict.TAKEN),
    ],
)
def test_a_beat_is_judged_by_whose_it_is(current, boot_known, verdict):
    assert judge_beat(a_beat(), current=current, boot_known=boot_known) is verdict


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("replica_id", {"replica_id": ""}),
        ("replica_id", {"replica_id": "a b"}),
        ("boot_id", {"boot_id": "x" * 200}),
        ("backend", {"backend": "{}"}),
        ("url", {"url": "ftp://host"}),
        ("url", {"url": "http://"}),
        ("url", {"url": "http://host:1/path"}),
        ("age_ms", {"age_ms": -1}),
        ("age_ms", {"age_ms": 2**40}),
    ],
)
def test_an_impossible_registration_names_its_field(field, changes):
    assert unsound_register(a_register(**changes)) == field


@pytest.mark.parametrize("name", ["kv_blocks", "block_tokens", "context_tokens", "sequences"])
def test_an_impossible_capacity_names_its_field(name):
    capacity = Capacity(kv_blocks=0, block_tokens=1, context_tokens=1, sequences=1)
    assert unsound_register(a_register(capacity=capacity)) is None
    for value in (-1, COUNT_MAX + 1):
        broken = msgspec.structs.replace(capacity, **{name: value})
        assert unsound_register(a_register(capacity=broken)) == f"capacity.{name}"


def test_an_impossible_beat_names_its_field():
    assert unsound_beat(a_beat()) is None
    assert unsound_beat(a_beat(seq=0)) == "seq"
    told = {"drain_reason": "taken back", "drain_ms": 0}
    assert unsound_beat(a_beat(**told)) is None
    for drain_ms in (-1, 2**40):
        assert unsound_beat(a_beat(**told | {"drain_ms": drain_ms})) == "drain_ms"
    for reason in ("", "x" * 201):
        assert unsound_beat(a_beat(**told | {"drain_reason": reason})) == "drain_reason"
    names = ("steps", "kv_blocks_free", "running", "waiting")
    for name, value in itertools.product(names, (-1, 2**63)):
        assert unsound_beat(a_beat(**{name: value})) == name
