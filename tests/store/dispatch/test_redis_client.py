"""The tick-batched connection: order, bounds, and what happens when the server is not there."""

import asyncio
import contextlib
import hashlib
import time

import pytest
import redis

from store.redis_client import (
    RedisAddress,
    RedisAwayError,
    RedisClient,
    RedisReplyError,
    parse_address,
)
from store.scripts import Function, Library
from tests.support.dispatchers import until

pytestmark = [pytest.mark.anyio, pytest.mark.services]


def a_function(body: str) -> Function:
    name = f"hw_test_{hashlib.sha256(body.encode()).hexdigest()[:8]}"
    code = f"redis.register_function('{name}', function(keys, args) {body} end)"
    return Function(name.encode(), Library(name, f"#!lua name={name}\n{code}"))


@contextlib.asynccontextmanager
async def connected(url: str, **options):
    client = RedisClient(url, **options)
    client.start()
    try:
        async with asyncio.timeout(5):
            await client.connected.wait()
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://localhost", RedisAddress(host="localhost", port=6379)),
        ("valkey://h:1/2", RedisAddress(host="h", port=1, database=2)),
        ("rediss://u:p%40@h:1", RedisAddress(host="h", port=1, username="u", password="p@", tls=True)),  # noqa: E501 - a row
        ("redis://:secret@h:1/0", RedisAddress(host="h", port=1, password="secret")),
        ("unix:///run/v.sock?db=3", RedisAddress(path="/run/v.sock", database=3)),
        ("valkey+unix:///run/v.sock", RedisAddress(path="/run/v.sock")),
    ],
)  # fmt: skip
def test_addresses(url, address):
    assert parse_address(url) == address


@pytest.mark.parametrize("url", ["http://h", "h:1", ""])
def test_an_address_of_another_kind_is_refused_without_telling_its_password(url):
    with pytest.raises(ValueError, match="not a Redis URL"):
        parse_address(url)


async def test_calls_of_one_tick_leave_as_one_write_and_answer_in_order(valkey_url):
    async with connected(valkey_url) as client:
        transport = client._wire._transport
        writes = []
        write = transport.write

        class Counting:
            def __getattr__(self, name):
                return getattr(transport, name)

            def write(self, data):
                writes.append(data)
                write(data)

        client._wire._transport = Counting()
        calls = [client.call(b"INCR", "counter") for _ in range(50)]
        assert await asyncio.gather(*calls) == list(range(1, 51))
        assert len(writes) == 1


async def test_a_caller_that_gives_up_loses_its_answer_and_nobody_elses(valkey_url):
    async with connected(valkey_url) as client:
        first, second, third = (client.call(b"ECHO", word) for word in ("a", "b", "c"))
        second.cancel()
        assert (await first, await third) == (b"a", b"c")


async def test_a_function_the_server_forgot_is_loaded_again(valkey_url):
    function = a_function("return {keys[1], args[1]}")
    async with connected(valkey_url, libraries=[function.library]) as client:
        assert await client.run(function, (b"k",), "u") == [b"k", b"u"]
        with redis.Redis.from_url(valkey_url) as admin:
            admin.function_flush()
        both = [client.run(function, (b"k",), word) for word in ("v", "w")]
        assert await asyncio.gather(*both) == [[b"k", b"v"], [b"k", b"w"]]


async def test_a_function_that_cannot_be_loaded_is_a_refusal(valkey_url):
    broken = Function(b"hw_test_none", Library("none", "no library at all"))
    async with connected(valkey_url) as client:
        with pytest.raises(RedisReplyError):
            await client.run(broken, ())


async def test_an_error_in_a_function_is_no_absence(valkey_url):
    async with connected(valkey_url) as client:
        with pytest.raises(RedisReplyError):
            await client.run(a_function("return redis.call('GET')"), ())
        assert await client.call(b"PING") == b"PONG"


async def test_a_server_that_does_not_answer_is_away_after_the_timeout(own_valkey):
    lost = []
    url = own_valkey.embedded.url
    async with connected(url, timeout_ms=200, on_lost=lambda: lost.append(1)) as client:
        loop = asyncio.get_running_loop()
        own_valkey.running.pause()
        try:
            began = loop.time()
            calls = [client.call(b"PING") for _ in range(3)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert 0.15 < loop.time() - began < 1.0
            assert all(isinstance(answer, RedisAwayError) for answer in answers)
            assert lost == [1]
            with pytest.raises(RedisAwayError):
                client.call(b"PING")
        finally:
            own_valkey.running.resume()
        await until(client.connected.is_set)
        assert await client.call(b"PING") == b"PONG"


async def test_a_process_that_was_held_up_does_not_take_the_server_for_away(valkey_url):
    lost = []
    async with connected(valkey_url, timeout_ms=100, on_lost=lambda: lost.append(1)) as client:
        for _ in range(3):
            answer = client.call(b"PING")
            time.sleep(0.3)  # noqa: ASYNC251 - what is tested: nothing of ours runs meanwhile
            assert await answer == b"PONG"
        assert not lost


async def test_a_killed_server_fails_calls_at_once_and_is_found_again(own_valkey):
    async with connected(own_valkey.embedded.url) as client:
        await asyncio.to_thread(own_valkey.running.kill)
        await until(lambda: not client.connected.is_set())
        with pytest.raises(RedisAwayError):
            client.call(b"PING")
        await asyncio.to_thread(own_valkey.running.start)
        await until(client.connected.is_set)
        assert await client.call(b"PING") == b"PONG"


async def test_unanswered_calls_are_bounded(valkey_url):
    async with connected(valkey_url, in_flight_max=10) as client:
        calls = [client.call(b"PING") for _ in range(10)]
        with pytest.raises(RedisAwayError, match="10 calls are unanswered"):
            client.call(b"PING")
        assert await asyncio.gather(*calls) == [b"PONG"] * 10


async def test_a_wrong_password_never_connects(valkey_url):
    client = RedisClient(valkey_url.replace("redis://:", "redis://:wrong"))
    client.start()
    await asyncio.sleep(0.2)
    assert not client.connected.is_set()
    with pytest.raises(RedisAwayError):
        client.call(b"PING")
    await client.close()


async def test_databases_are_apart(valkey_url):
    other_url = valkey_url.removesuffix("/0") + "/1"
    async with connected(valkey_url) as zero, connected(other_url) as one:
        await zero.call(b"SET", "key", "zero")
        assert await one.call(b"GET", "key") is None


async def test_a_unix_socket_serves_as_well(own_valkey, tmp_path):
    own_valkey.running.stop()
    config = own_valkey.embedded.directory / "valkey.conf"
    path = tmp_path / "sock"
    config.write_text(config.read_text() + f"unixsocket {path}\n")
    own_valkey.running.start()
    password = (own_valkey.embedded.directory / "password").read_text().strip()
    async with connected(f"unix://:{password}@{path}") as client:
        assert await client.call(b"PING") == b"PONG"


async def test_messages_come_between_answers(valkey_url):
    heard = []
    async with connected(
        valkey_url, channels=lambda: (b"wake",), on_message=heard.append
    ) as client:
        with redis.Redis.from_url(valkey_url) as admin:
            await until(lambda: admin.publish("wake", "one") == 1)
        assert await client.call(b"PING") == b"PONG"
        await until(lambda: heard != [])
        assert heard[0] == b"one"


async def test_a_server_that_is_loading_is_away():
    async def answer(reader, writer):
        await reader.read(1000)
        writer.write(b"-LOADING the dataset\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = RedisClient(f"redis://127.0.0.1:{port}")
    client.start()
    await asyncio.sleep(0.2)
    assert not client.connected.is_set()
    await client.close()
    server.close()
    await server.wait_closed()
