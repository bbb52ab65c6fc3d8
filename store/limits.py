"""What tiers, tenants and keys say of limits: written by the control plane, read with tenants.

A change of a tier's word is a change of each of its tenants: all take new versions, in the
same transaction, so that whoever caches them learns of it.
"""

from collections.abc import Mapping, Sequence

import msgspec

from core.allowance import NOTHING_SAID, Allowance, SaidRow, Subject
from store.changes import next_change
from store.postgres import Connection
from store.queries import load
from store.rows import struct_row

_sql = load("limits")


async def said_of(conn: Connection, subjects: Sequence[Subject], id_: str) -> list[SaidRow]:
    """What these subjects of one id say."""
    values = {"subjects": list(subjects), "id": id_}
    async with conn.cursor(row_factory=struct_row(SaidRow)) as cursor:
        await cursor.execute(_sql["said"], values)
        return await cursor.fetchall()


async def say(conn: Connection, subject: Subject, id_: str, allowance: Allowance) -> None:
    """Replace what it says of all models together. The caller raises the row's version."""
    await conn.execute(_sql["clear_limits"], {"subject": subject, "id": id_, "whole": True})
    await _put(conn, subject, id_, {"": allowance})


async def say_of_models(
    conn: Connection, subject: Subject, id_: str, models: Mapping[str, Allowance]
) -> None:
    """Replace all that it says of single models. As `say`."""
    await conn.execute(_sql["clear_limits"], {"subject": subject, "id": id_, "whole": False})
    await _put(conn, subject, id_, models)


async def unknown_models(conn: Connection, names: Sequence[str]) -> list[str]:
    """Those of these that no model has, and no route: nothing would ever count there."""
    cursor = await conn.execute(_sql["unknown_models"], {"models": list(names)})
    return [row[0] for row in await cursor.fetchall()]


async def lock_tier(conn: Connection, tier: str) -> None:
    """Have other changers of the tier and its tenants wait until the transaction ends."""
    await conn.execute(_sql["lock_tier"], {"tier": tier})
    await next_change(conn, "tenancy")


async def touch_tier(conn: Connection, tier: str) -> None:
    """New versions for all its tenants. For after `lock_tier`."""
    row = await (await conn.execute(_sql["tenants_of_tier"], {"tier": tier})).fetchone()
    assert row is not None, "a count is a row"
    taken = await (await conn.execute(_sql["take_numbers"], {"count": row[0]})).fetchone()
    assert taken is not None, "the migration made a clock for every stream"
    await conn.execute(_sql["touch_tier"], {"tier": tier, "last": taken[0]})


async def _put(conn: Connection, subject: Subject, id_: str, said: Mapping[str, Allowance]) -> None:
    for model, allowance in said.items():
        if allowance != NOTHING_SAID:
            names = {"subject": subject, "id": id_, "model": model}
            await conn.execute(_sql["put_limits"], names | msgspec.structs.asdict(allowance))
