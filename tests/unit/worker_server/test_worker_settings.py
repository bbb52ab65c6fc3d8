"""Settings that would be unsafe to start with are refused by name, before anything is loaded."""

import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import internal_token
from core.settings import SettingsError
from worker.__main__ import main
from worker.settings import MAY_BE_ZERO, WorkerSettings, checked

SOUND = WorkerSettings(
    internal_secret="x" * 16,
    replica_id="node-1_a",
    models_dir=Path("models"),
    model_version="v",
    journal_dir=Path("journal"),
    control_plane_url="http://127.0.0.1:1",
)
INTEGERS = [f.name for f in msgspec.structs.fields(WorkerSettings) if f.type is int]


def having(**changes):
    return msgspec.structs.replace(SOUND, **changes)


def test_sound_settings_pass_unchanged():
    zeros = having(**dict.fromkeys(MAY_BE_ZERO, 0))
    assert checked(SOUND) is SOUND
    assert checked(zeros) is zeros


def test_a_short_secret_is_refused():
    with pytest.raises(SettingsError, match="HEADWORKS_INTERNAL_SECRET is shorter than 16 bytes"):
        checked(having(internal_secret="x" * 15))


@pytest.mark.parametrize("name", ["", "node-1.example", "a b", "a:b", "é", "a\n", "-a", "a" * 129])
def test_a_replica_id_that_cannot_travel_is_refused(name):
    with pytest.raises(SettingsError, match="HEADWORKS_REPLICA_ID"):
        checked(having(replica_id=name))


@given(st.text(max_size=20) | st.from_regex(r"[A-Za-z0-9._-]{1,130}", fullmatch=True))
def test_every_replica_id_that_passes_can_be_signed_for(name):
    try:
        checked(having(replica_id=name))
    except SettingsError:
        return
    secret = SOUND.internal_secret.encode()
    token = internal_token.sign(secret, audience="worker", subject=name, expires_ms=2)
    assert internal_token.verify(secret, token, audience="worker", now_ms=1) == name


@pytest.mark.parametrize("name", INTEGERS)
def test_a_number_below_its_least_is_refused(name):
    least = 0 if name in MAY_BE_ZERO else 1
    with pytest.raises(SettingsError, match=f"HEADWORKS_{name.upper()} must be at least {least}"):
        checked(having(**{name: least - 1}))


def test_a_bad_setting_ends_the_process_with_its_name(monkeypatch, capsys):
    for field, value in msgspec.structs.asdict(having(replica_id="node-1.example")).items():
        monkeypatch.setenv(f"HEADWORKS_{field.upper()}", str(value))
    monkeypatch.setattr(sys, "argv", ["worker"])
    assert main() == 2
    assert "HEADWORKS_REPLICA_ID" in capsys.readouterr().err


@pytest.mark.parametrize("stretch", [-1.0, 0.5, 0.999, float("nan")])
def test_a_stretch_below_one_is_refused(stretch):
    with pytest.raises(SettingsError, match="HEADWORKS_ITL_STRETCH"):
        checked(having(itl_stretch=stretch))


@pytest.mark.parametrize("stretch", [0.0, 1.0, 9.0])
def test_no_stretch_and_one_of_at_least_one_are_fine(stretch):
    assert checked(having(itl_stretch=stretch)).itl_stretch == stretch
