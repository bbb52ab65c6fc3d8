"""The console's pages: who sees them, and what they say where nothing can be shown."""

import asyncio
import re

import pytest

from tests.support.browser import a_browser
from tests.support.control_plane import ADMIN_TOKEN, assert_refused, running, the_settings

pytestmark = [pytest.mark.services, pytest.mark.anyio]

HEADERS = {"authorization": f"Bearer {ADMIN_TOKEN}"}
PAGES = (
    "", "/fleet", "/models", "/rollouts", "/rollouts/none", "/scaling", "/tenants",
    "/tenants/ten_none", "/usage", "/safety", "/users", "/audit", "/playground",
)  # fmt: skip


async def test_every_page_has_something_to_say_before_anything_is_there(plane):
    for path in PAGES:
        answer = await plane.client.get(f"/console{path}", headers=HEADERS)
        assert answer.status_code == 200, path
        assert "<h1>" in answer.text
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"


async def test_a_page_that_renews_itself_gets_its_middle_alone(plane):
    headers = HEADERS | {"hx-request": "true"}
    answer = await plane.client.get("/console/fleet", headers=headers)
    assert "<h1>Fleet</h1>" in answer.text
    assert "<html" not in answer.text


async def test_whoever_is_not_signed_in_is_led_to_where_one_signs_in(plane):
    for path in PAGES:
        answer = await plane.client.get(f"/console{path}")
        assert (answer.status_code, answer.headers["location"]) == (302, "/console/sign-in"), path
    answer = await plane.client.get("/console/fleet", headers={"hx-request": "true"})
    assert answer.headers["hx-redirect"] == "/console/sign-in"
    asked = await plane.client.post("/console/playground/chat", json={})
    assert asked.status_code == 302


async def test_what_is_asked_for_wrongly_is_no_page(plane):
    answer = await plane.client.get("/console?minutes=x", headers=HEADERS)
    assert answer.status_code == 422
    answer = await plane.client.get("/console?minutes=7", headers=HEADERS)
    assert "cannot be shown now" in answer.text


async def test_a_name_is_text_and_never_markup(plane):
    name = "<script>alert(1)</script>"
    await plane.made("/tenants", {"name": name})
    answer = await plane.client.get("/console/tenants", headers=HEADERS)
    assert "&lt;script&gt;alert(1)" in answer.text
    assert name not in answer.text


async def test_without_postgres_pages_say_what_cannot_be_shown(own_postgres, valkey_url):
    from store.migrate import upgrade  # noqa: PLC0415 - tests that need no database load without it

    upgrade(url := own_postgres.create_database("console"))
    async with running(the_settings(url, valkey_url)) as plane:
        session = cookie_of(await a_browser(plane, "viewer"))
        own_postgres.running.stop()
        answers = await asyncio.gather(
            *(
                plane.client.get("/console/fleet", headers=headers, timeout=60)
                for headers in (HEADERS, session)  # the second is nobody whom we know
            )
        )
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert "cannot be shown now" in answer.text


async def test_a_name_in_an_address_stays_one_part_of_it(plane):
    page = await plane.client.get("/console/tenants/%3Fname=mine", headers=HEADERS)
    assert "there is no tenant &#39;?name=mine&#39;" in page.text
    page = await plane.client.get("/console/rollouts/none%3Fx", headers=HEADERS)
    assert "none?x&#39;" in page.text


async def test_a_user_without_a_role_is_told_that_it_shows_nothing(plane):
    page = await plane.client.get("/console/fleet", headers=cookie_of(await a_browser(plane)))
    assert page.status_code == 200, page.text
    assert "Your role does not show you" in page.text


def cookie_of(browser):
    return {"cookie": "; ".join(f"{k}={v}" for k, v in browser.cookies.items())}


async def test_an_invitation_leads_to_where_browsers_reach_us(postgres_url, valkey_url):
    url = "https://ops.example.com"
    async with running(the_settings(postgres_url, valkey_url, public_url=url)) as plane:
        page = await plane.client.get("/console/users", headers=HEADERS)
    assert f"open it at {url}/console/welcome" in page.text


async def test_no_form_writes_a_secret_into_an_address(plane):
    for path in ("/sign-in", "/welcome", "/playground"):
        page = await plane.client.get(f"/console{path}", headers=HEADERS)
        assert 'type="password"' in page.text
        (form,) = re.findall("<form[^>]*>", page.text)
        assert 'method="post"' in form, path


async def test_another_sites_page_asks_nothing_of_the_playground(plane):
    browser = await a_browser(plane, "viewer")
    ours = {
        **cookie_of(browser),
        "origin": "http://control-plane",
        "x-csrf-token": browser.csrf,
        "x-playground-key": "hwk_x",
    }
    forged = (
        {"origin": "http://evil.example"},
        {"sec-fetch-site": "same-site"},
        {"x-csrf-token": "0" * 64},
    )
    for changed in forged:
        answer = await plane.client.post(
            "/console/playground/chat", json={}, headers=ours | changed
        )
        assert_refused(answer, 403, "permission_denied")
    answer = await plane.client.post("/console/playground/chat", json={}, headers=ours)
    assert_refused(answer, 503, "service_unavailable")  # there is no gateway
    odd = ours | {"x-playground-key": "hwk_\u00e4".encode("latin-1")}
    answer = await plane.client.post("/console/playground/chat", json={}, headers=odd)
    assert_refused(answer, 422, "unprocessable", "key")


async def test_without_a_gateway_the_playground_is_refused(plane):
    answer = await plane.client.post(
        "/console/playground/chat", json={}, headers=HEADERS | {"x-playground-key": "hwk_x"}
    )
    assert answer.status_code == 503
