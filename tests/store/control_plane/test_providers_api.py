"""Providers as operators write them: what is taken, what is refused, and what is never told."""

import base64
import secrets

import msgspec
import pytest

from core.providers import key_context
from core.secrets import CannotOpenError, read_key_ring
from store import providers, registry
from store.routing_view import routing_view
from tests.support.control_plane import ControlPlane, assert_refused, running, the_settings
from tests.support.registry import a_deployment

pytestmark = [pytest.mark.services, pytest.mark.anyio]

OLD = "k1:" + base64.b64encode(b"o" * 32).decode()
NEW = "k2:" + base64.b64encode(b"n" * 32).decode()
KEY = "sk-acme-0123456789"


@pytest.fixture
async def plane(postgres_url, valkey_url):
    settings = the_settings(postgres_url, valkey_url, provider_keys=OLD)
    async with running(settings) as plane:
        yield plane


def a_name() -> str:
    return f"acme-{secrets.token_hex(4)}"


def a_body(**changes):
    return {"dialect": "openai", "base_url": "https://api.acme.test/v1", "key": KEY} | changes


async def row_of(plane: ControlPlane, name: str):
    async with plane.services.postgres.connection() as conn:
        return await providers.provider(conn, name)


def opened(row, ring: str = OLD) -> str:
    context = key_context(row.name, row.dialect, row.base_url)
    return read_key_ring(ring).open(row.key, context=context)


async def test_a_provider_is_created_told_replaced_and_deleted_without_its_key(plane):
    name = a_name()
    made = await plane.admin("POST", "/providers", a_body(name=name, settings={"concurrency": 3}))
    assert made.status_code == 201, made.text
    body = made.json()
    assert (body["has_key"], body["sealed_with"], body["settings"]["concurrency"]) == (
        True,
        "k1",
        3,
    )
    row = await row_of(plane, name)
    assert opened(row) == KEY
    again = await plane.admin("PUT", f"/providers/{name}", a_body(key="sk-other"))
    assert again.status_code == 200, again.text
    assert again.json()["version"] > body["version"]
    assert again.json()["settings"]["concurrency"] == 0  # all of it is replaced
    assert opened(await row_of(plane, name)) == "sk-other"
    listed = await plane.admin("GET", "/providers", limit=1000)
    read = await plane.admin("GET", f"/providers/{name}")
    assert read.json() in listed.json()["providers"]
    log = await plane.admin("GET", "/audit_log", subject=name)
    for answer in (made, again, listed, read, log):
        assert "sk-" not in answer.text
    gone = await plane.admin("DELETE", f"/providers/{name}")
    assert gone.status_code == 200, gone.text
    assert_refused(await plane.admin("GET", f"/providers/{name}"), 404, "not_found")


async def test_a_key_stays_unless_it_is_sent_and_goes_with_null(plane):
    name = a_name()
    await plane.admin("POST", "/providers", a_body(name=name))
    kept = a_body(settings={"drain_ms": 7})
    del kept["key"]
    answer = await plane.admin("PUT", f"/providers/{name}", kept)
    assert answer.json()["has_key"] is True
    assert opened(await row_of(plane, name)) == KEY
    answer = await plane.admin("PUT", f"/providers/{name}", a_body(key=None))
    assert answer.json()["has_key"] is False


async def test_a_changed_address_wants_the_key_again(plane):
    name = a_name()
    await plane.admin("POST", "/providers", a_body(name=name))
    for change in ({"base_url": "https://evil.test/v1"}, {"dialect": "anthropic"}):
        body = a_body(**change)
        del body["key"]
        answer = await plane.admin("PUT", f"/providers/{name}", body)
        assert_refused(answer, 409, "conflict", "key")
    assert (await row_of(plane, name)).base_url == "https://api.acme.test/v1"


async def test_a_key_copied_to_another_row_does_not_open(plane):
    mine, other = a_name(), a_name()
    await plane.admin("POST", "/providers", a_body(name=mine))
    await plane.admin("POST", "/providers", a_body(name=other, base_url="https://evil.test"))
    row = await row_of(plane, mine)
    moved = msgspec.structs.replace(await row_of(plane, other), key=row.key)
    with pytest.raises(CannotOpenError):
        opened(moved)


UNSOUND = [
    ({"base_url": "http://api.acme.test/v1"}, "base_url"),
    ({"base_url": "https://me:pw@api.acme.test/v1"}, "base_url"),
    ({"base_url": "https://api.acme.test/v1?key=1"}, "base_url"),
    ({"base_url": "https:///v1"}, "base_url"),
    ({"base_url": "file:///etc/passwd"}, "base_url"),
    ({"base_url": "https://api.acme.test/v1\r\nx: y"}, "base_url"),
    ({"key": "sk-1\r\nx-evil: 1"}, "key"),
    ({"key": ""}, "key"),
    ({"dialect": "gemini"}, "dialect"),
    ({"secret": "x"}, "secret"),
    ({"settings": {"parallel": 3}}, "settings.parallel"),
    ({"settings": {"failures": 0}}, "settings.failures"),
    ({"settings": {"cooldown_max_ms": 1}}, "settings.cooldown_max_ms"),
    ({"name": "a/b"}, "name"),
]


async def test_what_cannot_be_is_refused_by_name_and_not_repeated(plane):
    for change, param in UNSOUND:
        answer = await plane.admin("POST", "/providers", a_body(**{"name": a_name()} | change))
        assert_refused(answer, 422, "unprocessable", param)
        assert "sk-" not in answer.text
        assert "pw" not in answer.text


async def test_plain_http_is_for_those_who_say_so(plane):
    name = a_name()
    body = a_body(name=name, base_url="http://127.0.0.1:8801/v1/", allow_http=True, key=None)
    answer = await plane.admin("POST", "/providers", body)
    assert answer.status_code == 201, answer.text
    assert answer.json()["base_url"] == "http://127.0.0.1:8801/v1"


async def test_a_taken_name_and_an_unknown_one_are_told(plane):
    name = a_name()
    await plane.admin("POST", "/providers", a_body(name=name))
    taken = await plane.admin("POST", "/providers", a_body(name=name))
    assert_refused(taken, 409, "conflict", "name")
    missing = await plane.admin("PUT", "/providers/none", a_body())
    assert_refused(missing, 404, "not_found")
    assert_refused(await plane.admin("DELETE", "/providers/none"), 404, "not_found")


async def test_without_a_key_ring_no_key_is_kept(postgres_url, valkey_url):
    async with running(the_settings(postgres_url, valkey_url)) as plane:
        answer = await plane.admin("POST", "/providers", a_body(name=a_name()))
        assert_refused(answer, 409, "conflict", "key")
        assert "HEADWORKS_PROVIDER_KEYS" in answer.text
        bare = await plane.admin("POST", "/providers", a_body(name=a_name(), key=None))
        assert bare.status_code == 201


async def test_a_new_key_in_front_of_the_ring_seals_everything_again(
    fresh_postgres_url, valkey_url
):
    names = [a_name(), a_name()]
    before = the_settings(fresh_postgres_url, valkey_url, provider_keys=OLD)
    async with running(before) as plane:
        for name in names:
            await plane.admin("POST", "/providers", a_body(name=name))
    after = the_settings(fresh_postgres_url, valkey_url, provider_keys=f"{NEW},{OLD}")
    async with running(after) as plane:
        answer = await plane.admin("POST", "/providers/reseal")
        assert answer.json() == {"sealed_with": "k2", "resealed": sorted(names)}
        for name in names:
            assert opened(await row_of(plane, name), NEW) == KEY
        assert (await plane.admin("POST", "/providers/reseal")).json()["resealed"] == []
    lost = the_settings(fresh_postgres_url, valkey_url, provider_keys="k3:" + NEW[3:])
    async with running(lost) as plane:
        assert_refused(await plane.admin("POST", "/providers/reseal"), 409, "conflict")
        assert opened(await row_of(plane, names[0]), NEW) == KEY


async def test_a_view_has_every_provider_and_passes_over_newer_settings(plane):
    name = a_name()
    await plane.admin("POST", "/providers", a_body(name=name))
    async with plane.services.postgres.transaction() as conn:
        await conn.execute(
            "UPDATE providers SET settings = settings || '{\"from_next_year\": 1}' WHERE name = %s",
            [name],
        )
        view = await routing_view(conn, "local")
    (found,) = [each for each in view.providers if each.name == name]
    assert found.key is not None
    assert found.version <= view.version


async def test_a_provider_that_a_table_leads_to_stays(plane):
    name = a_name()
    await plane.admin("POST", "/providers", a_body(name=name))
    async with plane.services.postgres.transaction() as conn:
        deployment = f"dep-{secrets.token_hex(4)}"
        await a_deployment(conn, deployment)
    body = {
        "targets": [
            {"provider": name, "model": "gpt", "context_tokens": 100, "max_output_tokens": 10}
        ]
    }
    answer = await plane.admin("PUT", f"/routes/{a_name()}", body)
    if answer.status_code == 404:
        pytest.skip("tables do not lead to providers yet")
    assert answer.status_code == 200, answer.text
    async with plane.services.postgres.connection() as conn:
        assert await registry.provider_in_use(conn, name)
    assert_refused(await plane.admin("DELETE", f"/providers/{name}"), 409, "conflict", "name")
