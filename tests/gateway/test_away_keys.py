"""Keys while Postgres is out of reach: known ones serve a quarter of an hour, others not at all."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest

from core.errors import Code, RefusedError
from core.ids import ENTROPY_BYTES, KeyId, key_id
from core.tenancy import KEY_ENTROPY_BYTES, key_digest, mint_key, public_part
from gateway.auth import Authenticator, AuthLimits, SourceAwayError
from gateway.settings import GatewaySettings
from gateway.sources import PostgresSource
from store import tenants
from store.postgres import Postgres, PostgresConfig
from tests.support.fault_proxy import FaultProxy, Passage
from tests.support.postgres_faults import a_proxy, timed
from tests.support.registry import a_new_tenant

pytestmark = [pytest.mark.anyio, pytest.mark.services]

PEPPER = b"pepper"
QUARTER_S = 900.0
BLOCK_S = 0.3  # for a connection, and then for what is done on it
BOUND_S = 2 * BLOCK_S
SLACK_S = 0.6  # a busy machine's


class Door:
    """An authenticator whose Postgres is beyond a proxy, and a way to change keys past it."""

    def __init__(self, beyond: Postgres, direct: Postgres, proxy: FaultProxy) -> None:
        self.now_s = 0.0
        self.proxy = proxy
        self.direct = direct
        self.auth = Authenticator(
            source=PostgresSource(beyond, "local", changes_max=3),
            pepper=PEPPER,
            limits=AuthLimits(),
            clock_s=lambda: self.now_s,
        )

    async def a_key(self) -> tuple[KeyId, str]:
        new, text = a_new_tenant(), mint_key(secrets.token_bytes(KEY_ENTROPY_BYTES))
        identity = key_id(secrets.token_bytes(ENTROPY_BYTES))
        async with self.direct.transaction() as conn:
            await tenants.create_tenant(conn, new)
            await tenants.create_key(
                conn,
                key_id=identity,
                tenant_id=new.id,
                name="test",
                public=public_part(text),
                digest=key_digest(PEPPER, text),
            )
        return identity, text

    async def says(self, text: str) -> Code | None:
        """Why the key is refused, within the bound; None when it is good."""
        answer, took_s = await timed(self.auth.authenticate([(b"x-api-key", text.encode())]))
        assert took_s < BOUND_S + SLACK_S
        if isinstance(answer, RefusedError):
            return answer.refusal.code
        assert not isinstance(answer, Exception), answer
        return None

    async def poll_in_vain(self) -> None:
        answer, took_s = await timed(self.auth.poll())
        assert isinstance(answer, SourceAwayError)
        assert took_s < BOUND_S + SLACK_S

    async def poll_again(self) -> None:
        async with asyncio.timeout(5):
            while isinstance((await timed(self.auth.poll()))[0], SourceAwayError):
                pass


@pytest.fixture
async def door(postgres_url: str) -> AsyncIterator[Door]:
    def config(url: str) -> PostgresConfig:
        return PostgresConfig(
            database_url=url,
            application_name="door",
            acquire_timeout_s=BLOCK_S,
            transaction_timeout_s=BLOCK_S,
            connections_max=4,
        )

    async with a_proxy(postgres_url) as proxy:
        beyond = await Postgres.open(config(proxy.via(postgres_url)))
        direct = await Postgres.open(config(postgres_url))
        door = Door(beyond, direct, proxy)
        await door.auth.poll()
        yield door
        proxy.heal()
        await beyond.close()
        await direct.close()


def test_a_gateway_lets_keys_be_stale_for_a_quarter_of_an_hour():
    fields = {"database_url", "redis_url", "internal_secret", "key_pepper"}
    settings = GatewaySettings(**dict.fromkeys(fields, "x"), models_dir="models", spool_dir="spool")
    assert settings.auth_stale_ms / 1000 == AuthLimits().stale_s == QUARTER_S


@pytest.mark.parametrize("fault", ["black hole", "gone"])
async def test_known_keys_serve_a_quarter_of_an_hour_after_the_last_poll_and_no_longer(door, fault):
    _, known = await door.a_key()
    _, other = await door.a_key()
    door.now_s = 100.0
    assert await door.says(known) is None
    door.now_s = 200.0
    await door.auth.poll()
    if fault == "gone":
        door.proxy.refuse()
        door.proxy.reset()
    else:
        door.proxy.black_hole()
    await door.poll_in_vain()
    assert await door.says(other) is Code.UNAVAILABLE
    door.now_s = 200.0 + QUARTER_S - 0.1
    await door.poll_in_vain()
    assert await door.says(known) is None
    door.now_s = 200.0 + QUARTER_S
    assert await door.says(known) is Code.UNAVAILABLE
    door.proxy.heal()
    await door.poll_again()
    assert await door.says(known) is None
    assert await door.says(other) is None


async def test_a_key_revoked_out_of_reach_is_refused_with_the_first_poll(door):
    identity, text = await door.a_key()
    assert await door.says(text) is None
    door.proxy.black_hole()
    async with door.direct.transaction() as conn:
        await tenants.revoke_key(conn, identity)
    await door.poll_in_vain()
    assert await door.says(text) is None, "it cannot know"
    door.proxy.heal()
    await door.poll_again()
    assert await door.says(text) is Code.INVALID_KEY


async def test_a_poll_reads_every_change_however_many_there_are(door):
    identity, text = await door.a_key()
    assert await door.says(text) is None
    for _ in range(7):  # more than are read at a time
        await door.a_key()
    async with door.direct.transaction() as conn:
        await tenants.revoke_key(conn, identity)
    await door.auth.poll()
    assert await door.says(text) is Code.INVALID_KEY


async def test_a_row_is_as_old_as_the_question_that_it_answers(door):
    _, text = await door.a_key()
    door.proxy.set(to_client=Passage(latency_s=0.04))  # for each of its three questions
    asking = asyncio.create_task(door.says(text))
    await asyncio.sleep(0.02)
    door.now_s = 300.0  # read, and then long on its way
    assert await asking is None
    door.proxy.set(to_client=Passage(stalled=True))
    door.now_s = QUARTER_S - 0.1
    assert await door.says(text) is None
    door.now_s = QUARTER_S
    assert await door.says(text) is Code.UNAVAILABLE


async def test_keys_never_seen_are_not_waited_for_by_each_other(door):
    texts = [(await door.a_key())[1] for _ in range(12)]
    door.proxy.black_hole()
    answers, took_s = await timed(asyncio.gather(*(door.says(text) for text in texts)))
    assert answers == [Code.UNAVAILABLE] * 12
    assert took_s < BOUND_S + SLACK_S  # three times as many as connections
