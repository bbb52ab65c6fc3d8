"""Operators see what is open, and close it."""

import asyncio

import pytest

from store.leases import assert_lease
from tests.support.control_plane import assert_refused, running, the_settings
from tests.support.reconciler_case import (
    PROMPTLY,
)

pytestmark = [pytest.mark.services, pytest.mark.anyio]


@pytest.fixture
async def plane(fresh_postgres_url, valkey_url):
    settings = the_settings(
        fresh_postgres_url, valkey_url, **(PROMPTLY | {"reconcile_every_ms": 30})
    )
    async with running(settings) as plane:
        yield plane


async def until_open(plane, count):
    """The job itself finds them."""
    while True:
        answer = await plane.admin("GET", "/reconciliation")
        assert answer.status_code == 200, answer.text
        if len(answer.json()["differences"]) == count:
            return answer.json()["differences"]
        await asyncio.sleep(0.02)


async def test_operators_see_what_is_open_and_close_it(plane):
    pg = plane.services.postgres
    async with pg.transaction() as conn:
        await assert_lease(conn, "gw_1", "local", 5_000, refused_words=2)
        await assert_lease(conn, "gw_2", "local", 5_000, refused_words=1)
    second, first = await until_open(plane, 2)
    assert (first["kind"], first["subject"]) == ("refused_words", "gw_1")
    assert first["resolution"] is None
    assert first["raised_ms"] >= first["noticed_ms"] > 0

    page = (await plane.admin("GET", "/reconciliation", limit=1)).json()
    assert page == {"differences": [second], "before": second["id"]}
    page = (await plane.admin("GET", "/reconciliation", limit=1, before=second["id"])).json()
    assert page["differences"] == [first]
    assert (await plane.admin("GET", "/reconciliation", kind="chain")).json()["differences"] == []

    report = (await plane.admin("GET", "/check")).json()
    (item,) = [item for item in report["items"] if item["name"] == "reconciliation"]
    assert not item["ok"]
    assert "refused_words gw_1: 2 words were refused" in item["detail"]

    close = f"/reconciliation/{first['id']}/close"
    assert (await plane.admin("POST", close, {"note": "said again by hand"})).json() == {
        "id": first["id"],
        "kind": "refused_words",
        "subject": "gw_1",
    }
    assert_refused(await plane.admin("POST", close, {"note": "again"}), 404, "not_found")
    await asyncio.sleep(0.1)
    assert [item["subject"] for item in await until_open(plane, 1)] == ["gw_2"]
    every = (await plane.admin("GET", "/reconciliation", open=False)).json()["differences"]
    assert [item["resolution"] for item in every] == [None, "closed"]
    assert every[1]["note"] == "said again by hand"
    log = (await plane.admin("GET", "/audit-log", subject=str(first["id"]))).json()["records"]
    assert [line["action"] for line in log] == ["difference.close"]

    async with pg.transaction() as conn:
        await assert_lease(conn, "gw_1", "local", 5_000, refused_words=3)
    newest, oldest = await until_open(plane, 2)
    assert (newest["subject"], oldest["subject"]) == ("gw_1", "gw_2")
    words = {"kind": "refused_words", "upto": oldest["id"], "note": "all said"}
    close = "/reconciliation/close"
    assert (await plane.admin("POST", close, words)).json() == {"closed": 1}
    assert (await plane.admin("POST", close, words)).json() == {"closed": 0}
    assert (await until_open(plane, 1)) == [newest]


async def test_bad_questions_are_refused(postgres_url, valkey_url):
    async with running(the_settings(postgres_url, valkey_url)) as plane:
        for query, param in (
            ({"kind": "mood"}, "kind"),
            ({"open": "perhaps"}, "open"),
            ({"before": -1}, "before"),
        ):
            answer = await plane.admin("GET", "/reconciliation", **query)
            assert_refused(answer, 422, "unprocessable", param)
        words = {"kind": "chain", "upto": 1, "note": "x"}
        for change in ({"kind": "mood"}, {"upto": 0}, {"note": ""}, {"who": 1}):
            answer = await plane.admin("POST", "/reconciliation/close", words | change)
            assert_refused(answer, 422, "unprocessable", *change)
        for body, param in (({}, "note"), ({"note": ""}, "note"), ({"note": "x", "who": 1}, "who")):
            answer = await plane.admin("POST", "/reconciliation/1/close", body)
            assert_refused(answer, 422, "unprocessable", param)
