"""Settings that would be unsafe to start with stop the start and say which."""

import msgspec
import pytest

from control_plane.settings import ControlPlaneSettings, checked
from core.settings import SettingsError, read_settings

ENVIRON = {
    "DATABASE_URL": "postgresql://localhost/x",
    "REDIS_URL": "redis://localhost",
    "HEADWORKS_INTERNAL_SECRET": "internal secret of tests",
    "HEADWORKS_KEY_PEPPER": "a pepper for the tests",
    "HEADWORKS_ADMIN_TOKEN": "an admin token for tests",
}


def test_defaults_suit_one_machine():
    settings = checked(read_settings(ControlPlaneSettings, ENVIRON))
    assert (settings.control_plane_host, settings.control_plane_port) == ("127.0.0.1", 8001)


@pytest.mark.parametrize("name", sorted(ENVIRON))
def test_what_has_no_default_must_be_given(name):
    environ = {key: value for key, value in ENVIRON.items() if key != name}
    with pytest.raises(SettingsError, match=name.removeprefix("HEADWORKS_")):
        read_settings(ControlPlaneSettings, environ)


@pytest.mark.parametrize("name", ["internal_secret", "key_pepper", "admin_token"])
def test_a_short_secret_stops_the_start(name):
    settings = msgspec.structs.replace(
        read_settings(ControlPlaneSettings, ENVIRON), **{name: "short"}
    )
    with pytest.raises(SettingsError, match=name.upper()):
        checked(settings)


def test_a_bound_of_nothing_stops_the_start():
    settings = read_settings(ControlPlaneSettings, ENVIRON)
    with pytest.raises(SettingsError, match="LEASE_MS"):
        checked(msgspec.structs.replace(settings, lease_ms=0))
    assert checked(msgspec.structs.replace(settings, control_plane_port=0))


@pytest.mark.parametrize("name", ["database_url", "redis_url"])
def test_an_address_of_another_kind_stops_the_start(name):
    settings = read_settings(ControlPlaneSettings, ENVIRON)
    with pytest.raises(SettingsError, match=name.upper()):
        checked(msgspec.structs.replace(settings, **{name: "http://localhost"}))


def test_a_level_of_logging_that_there_is_none_of_is_refused_by_name():
    assert read_settings(ControlPlaneSettings, ENVIRON | {"HEADWORKS_LOG_LEVEL": "DEBUG"})
    with pytest.raises(SettingsError, match="HEADWORKS_LOG_LEVEL"):
        read_settings(ControlPlaneSettings, ENVIRON | {"HEADWORKS_LOG_LEVEL": "debug"})


OIDC = {
    "oidc_issuer": "https://id.example.com",
    "oidc_client_id": "headworks",
    "oidc_client_secret": "s",
    "public_url": "https://ops.example.com",
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"oidc_issuer": "http://id.example.com"}, "OIDC_ISSUER"),
        ({"public_url": "http://ops.example.com"}, "PUBLIC_URL"),
        ({"public_url": ""}, "PUBLIC_URL"),
        ({"oidc_client_id": ""}, "OIDC_CLIENT_ID"),
        ({"oidc_client_secret": ""}, "OIDC_CLIENT_SECRET"),
        ({"oidc_roles": "sre=root"}, "OIDC_ROLES"),
        ({"argon2_memory_kib": 31}, "ARGON2_MEMORY_KIB"),
    ],
)
def test_an_unsafe_way_in_stops_the_start(change, named):
    settings = msgspec.structs.replace(read_settings(ControlPlaneSettings, ENVIRON), **OIDC)
    assert checked(settings)
    with pytest.raises(SettingsError, match=named):
        checked(msgspec.structs.replace(settings, **change))
