"""A lane's connection answers as a cursor would, and is never left with somebody's answer."""

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest

from store.lane_connection import (
    LaneConnection,
    Statement,
    read_int,
    read_text,
    rows,
    text_array,
)
from store.postgres import PostgresConfig, connect_as, cut

pytestmark = [pytest.mark.anyio, pytest.mark.services]

ECHO = Statement(b"echo", b"SELECT t, length(t) FROM unnest($1::text[]) WITH ORDINALITY AS u (t)")
SUM = Statement(b"sum", b"SELECT $1::bigint + $2::integer")
SLEEP = Statement(b"sleep", b"SELECT pg_sleep($1::float8)")
WORDS = ["", "a", '"', "\\", "{,}", "NULL", "né", " b "]


@pytest.fixture
async def conn(postgres_url: str) -> AsyncIterator[LaneConnection]:
    config = PostgresConfig(database_url=postgres_url, application_name="lane")
    conn = await connect_as(LaneConnection, config)
    yield conn
    await conn.close()


async def test_texts_arrive_as_they_were_and_nothing_as_nothing(conn: LaneConnection) -> None:
    for _ in range(2):
        told = rows(await conn.run(ECHO, [text_array(WORDS)]), (read_text, read_int))
        assert told == [[word, len(word)] for word in WORDS]
    assert rows(await conn.run(SUM, [b"-5", None]), (read_int,)) == [[None]]
    assert rows(await conn.run(SUM, [b"-5", b"3"]), (read_int,)) == [[-2]]


async def test_more_than_a_socket_takes_at_once(conn: LaneConnection) -> None:
    word = "x" * 20_000_000
    ((_, length),) = rows(await conn.run(ECHO, [text_array([word])]), (read_text, read_int))
    assert length == len(word)


async def test_an_error_is_the_statements_alone(conn: LaneConnection) -> None:
    with pytest.raises(psycopg.errors.NumericValueOutOfRange):
        await conn.run(SUM, [b"9223372036854775807", b"1"])
    assert rows(await conn.run(SUM, [b"1", b"1"]), (read_int,)) == [[2]]


async def test_cursors_and_statements_take_turns(conn: LaneConnection) -> None:
    for number in range(3):
        assert rows(await conn.run(SUM, [b"%d" % number, b"0"]), (read_int,)) == [[number]]
        cursor = await conn.execute("SELECT 'cursor'")
        assert await cursor.fetchone() == ("cursor",)


async def test_who_leaves_takes_the_connection_along(conn: LaneConnection) -> None:
    leaving = asyncio.create_task(conn.run(SLEEP, [b"20"]))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert conn.closed


async def test_a_connection_that_is_cut_says_so_at_once(conn: LaneConnection) -> None:
    waiting = asyncio.create_task(conn.run(SLEEP, [b"20"]))
    await asyncio.sleep(0)
    cut(conn)
    with pytest.raises(psycopg.OperationalError):
        await asyncio.wait_for(waiting, 10)
    assert conn.closed


async def test_a_server_that_hangs_up_between_statements_is_noticed_by_the_next(
    conn: LaneConnection,
) -> None:
    await conn.run(SUM, [b"1", b"1"])
    cut(conn)
    await asyncio.sleep(0)
    with pytest.raises(psycopg.OperationalError):
        await conn.run(SUM, [b"1", b"1"])
    assert conn.closed
