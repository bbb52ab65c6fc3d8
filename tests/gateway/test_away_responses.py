"""Postgres away: answers are told and say that they are not kept; what is kept is 503 meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from store.migrate import upgrade
from tests.support.gateway_requests import error_of
from tests.support.gateway_world import MODEL, World, a_world, until_answered
from tests.support.responses_grammar import check_responses_stream
from tests.support.services import PostgresServer

pytestmark = [pytest.mark.anyio, pytest.mark.services]

RESPONSES = "/v1/responses"
ASKED: Any = {"model": MODEL, "input": "Hi"}


@pytest.fixture
async def lonely(
    own_postgres: PostgresServer, valkey_url: str, tmp_path: Path
) -> AsyncIterator[World]:
    """A world whose Postgres the test may stop."""
    url = own_postgres.create_database("own_responses")
    await asyncio.to_thread(upgrade, url)
    async with a_world(url, valkey_url, tmp_path) as made:
        yield made


async def test_with_postgres_away_nothing_is_kept_and_nothing_is_lost(
    lonely: World, own_postgres: PostgresServer
) -> None:
    caller = await lonely.add_caller()
    headers = {"authorization": f"Bearer {caller.key}"}
    async with httpx.AsyncClient(base_url=lonely.url, timeout=60, headers=headers) as client:
        made = (await client.post(RESPONSES, json=ASKED)).json()
        assert made["store"] is True
        path = f"{RESPONSES}/{made['id']}"
        await asyncio.to_thread(own_postgres.running.kill)
        whole, streamed, continued, read, deleted = await asyncio.gather(
            client.post(RESPONSES, json=ASKED),
            client.post(RESPONSES, json={**ASKED, "stream": True}),
            client.post(RESPONSES, json={**ASKED, "previous_response_id": made["id"]}),
            client.get(path),
            client.delete(path),
        )
        assert whole.status_code == 200, whole.text
        assert whole.json()["store"] is False
        assert check_responses_stream(streamed.content).response["store"] is False
        for refused in (continued, read, deleted):
            assert refused.status_code == 503, refused.text
            assert error_of(refused)["code"] == "service_unavailable"
            assert "retry-after" in refused.headers
        await asyncio.to_thread(own_postgres.running.start)

        async def is_back() -> bool:
            return (await client.get(path)).status_code == 200

        await until_answered(is_back, within_s=30)
        assert (await client.get(path)).json() == made
        again = await client.post(RESPONSES, json={**ASKED, "previous_response_id": made["id"]})
        assert again.json()["store"] is True
